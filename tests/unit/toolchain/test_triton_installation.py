"""Where a Triton is looked for. The folders here are empty shells: that a real one serves is an integration test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.errors import ToolMissing
from tasks.toolchain import triton_installation
from tasks.toolchain.triton_installation import (
    DESCRIPTION,
    FORMAT,
    VARIABLE,
    backend_digest,
    containers_folder,
    default_folder,
    find_installation,
    requirements_digest,
)


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_SERVER_VERSION", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(triton_installation.sys, "prefix", str(tmp_path / "prefix"))


def describe(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True)
    made = {
        "format": FORMAT,
        "requirements": requirements_digest(),
        "backend": backend_digest(),
        "python": "3.11",
        "version": "2.51.0",
    }
    (folder / DESCRIPTION).write_text(json.dumps(made | changes))
    return folder


def binary(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("")
    path.chmod(0o755)
    return path


def test_without_any_the_command_that_makes_one_is_named() -> None:
    with pytest.raises(ToolMissing, match="enginehouse serve setup"):
        find_installation()


def test_the_default_folder_lies_in_this_environment(tmp_path: Path) -> None:
    describe(default_folder())
    found = find_installation()
    assert found.backends == "cpu stand-in"
    assert found.version == "2.51.0"
    assert found.tritonserver.is_relative_to(tmp_path / "prefix" / "share" / "enginehouse" / "triton")
    environment = dict(found.environment)
    assert environment["PATH"].startswith(str(default_folder() / "env" / "bin"))
    assert environment["OMP_NUM_THREADS"] == "1"


def test_a_tritonserver_on_the_path_goes_before_the_default_folder(tmp_path: Path) -> None:
    describe(default_folder())
    server = binary(tmp_path / "bin" / "tritonserver")
    found = find_installation()
    assert (found.tritonserver, found.backends, found.version) == (server, "native", "unknown")


def test_a_native_one_tells_its_version_in_the_file_of_nvidias_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = binary(tmp_path / "opt" / "tritonserver" / "bin" / "tritonserver")
    (server.parent.parent / "TRITON_VERSION").write_text("2.61.0\n")
    monkeypatch.setenv(VARIABLE, str(server))
    assert find_installation().version == "2.61.0"


def test_the_variable_goes_first_and_may_name_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary(tmp_path / "bin" / "tritonserver")
    monkeypatch.setenv(VARIABLE, str(describe(tmp_path / "mine")))
    assert find_installation().tritonserver.is_relative_to(tmp_path / "mine")


@pytest.mark.parametrize("named", ["nowhere", "empty", "file"])
def test_a_variable_that_names_no_triton_is_told_and_nothing_else_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    describe(default_folder())
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / named))
    with pytest.raises(ToolMissing) as caught:
        find_installation()
    assert f"${VARIABLE}" in str(caught.value)
    assert str(tmp_path / named) in str(caught.value)


@pytest.mark.parametrize("changes", [{"requirements": "other"}, {"backend": "other"}])
def test_one_that_was_made_for_another_version_is_not_taken(changes: dict[str, str]) -> None:
    describe(default_folder(), **changes)
    with pytest.raises(ToolMissing, match="another version"):
        find_installation()


def test_one_of_an_unknown_format_counts_as_none() -> None:
    describe(default_folder(), format=FORMAT + 1)
    with pytest.raises(ToolMissing):
        find_installation()


def test_every_requirement_is_pinned_exactly() -> None:
    lines = (containers_folder() / "triton" / "requirements.txt").read_text().splitlines()
    wanted = [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
    assert all("==" in line for line in wanted)
    assert any(line.startswith("numpy==1.") for line in wanted), "Triton's stub answers wrongly with numpy 2"
