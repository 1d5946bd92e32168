"""What identifies a data set: bytes for paths, the version for distributions, and nothing of the place."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tasks.artifacts.digest import hash_file
from tasks.config import Pipeline
from tasks.data_identity import data_identity
from tasks.errors import ConfigError


def identity(folder: Path, **source: str) -> dict[str, Any]:
    return data_identity(pipeline(folder, data={"d": source}), hash_file)["d"]


def pipeline(folder: Path, data: dict[str, Any]) -> Pipeline:
    fields = {"name": "a", "recipe": "r.py:R", "inputs": {"x": {"dtype": "bool", "shape": [1]}}, "data": data}
    return Pipeline.model_validate(fields, context={"source": folder / "pipeline.yaml"})


def test_a_version_is_its_own_identity(tmp_path: Path) -> None:
    assert identity(tmp_path, version="2026-11") == {"version": "2026-11"}


def test_a_distribution_is_identified_by_its_version(tmp_path: Path) -> None:
    expected = {"distribution": "pydantic", "version": metadata.version("pydantic")}
    assert identity(tmp_path, distribution="pydantic") == expected


def test_a_file_is_identified_by_its_bytes_not_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2")
    (tmp_path / "b.csv").write_text("1,2")
    (tmp_path / "c.csv").write_text("1,3")
    a, b, c = (identity(tmp_path, path=f"{name}.csv") for name in "abc")
    assert a == b != c
    assert a == {"content": str(hash_file(tmp_path / "a.csv")), "files": 1}


def tree(folder: Path) -> Path:
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "data" / "one").write_text("1")
    (folder / "data" / "deep" / "two").write_text("2")
    return folder


def test_a_folder_is_identified_by_its_files_wherever_it_is(tmp_path: Path) -> None:
    here, there = tree(tmp_path / "here"), tree(tmp_path / "there")
    (there / "data" / "empty").mkdir()
    assert identity(here, path="data") == identity(there, path="../there/data")
    assert identity(here, path="data")["files"] == 2


@pytest.mark.parametrize("change", ["edit", "rename", "add", "remove"])
def test_any_change_within_a_folder_is_another_identity(tmp_path: Path, change: str) -> None:
    data = tree(tmp_path) / "data"
    before = identity(tmp_path, path="data")
    match change:
        case "edit":
            (data / "deep" / "two").write_text("3")
        case "rename":
            (data / "one").rename(data / "uno")
        case "add":
            (data / ".hidden").write_text("")
        case "remove":
            (data / "one").unlink()
    assert identity(tmp_path, path="data") != before


def test_links_are_followed_and_a_loop_ends(tmp_path: Path) -> None:
    plain, linked = tree(tmp_path / "plain"), tmp_path / "linked"
    (linked / "data").mkdir(parents=True)
    (linked / "data" / "one").symlink_to(plain / "data" / "one")
    (linked / "data" / "deep").symlink_to(plain / "data" / "deep")
    assert identity(linked, path="data") == identity(plain, path="data")
    (plain / "data" / "loop").symlink_to(plain / "data")
    assert identity(plain, path="data")["files"] == 2


def test_each_file_is_hashed_by_what_is_handed_in(tmp_path: Path) -> None:
    tree(tmp_path)
    seen: list[Path] = []
    data_identity(pipeline(tmp_path, data={"d": {"path": "data"}}), lambda file: seen.append(file) or "sha256:00")
    assert seen == [tmp_path / "data" / "deep" / "two", tmp_path / "data" / "one"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"distribution": "pydantik"},
            r"data.d.distribution: .* pydantik is not installed \(did you mean pydantic\?\)",
        ),
        ({"distribution": "qqqqqqqq"}, "install it with: pip install qqqqqqqq"),
        ({"distribution": "../x"}, "is not installed"),
        ({"path": "daat"}, r"data.d.path: .*/daat is not there \(did you mean data\?\)"),
        ({"path": "no/data"}, "the folder .*/no is not there either"),
        ({"path": "void"}, "holds no files"),
        ({"path": "pipe"}, "is neither a file nor a folder"),
        ({"path": "odd"}, "odd/broken is no regular file, or a link to nothing"),
    ],
)
def test_data_that_is_not_there_is_told_with_its_field_and_mend(
    tmp_path: Path, source: dict[str, str], message: str
) -> None:
    tree(tmp_path)
    (tmp_path / "void").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "broken").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=message):
        identity(tmp_path, **source)


def test_all_data_sets_that_are_missing_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        data_identity(pipeline(tmp_path, data={"a": {"path": "x"}, "b": {"path": "y"}}), hash_file)
    assert [p.field for p in caught.value.problems] == ["data.a.path", "data.b.path"]
