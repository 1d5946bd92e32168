"""`enginehouse init`: what it writes is a valid pipeline, and it overwrites nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.artifacts.code import recipe_code
from tasks.errors import ConfigError, Refused, StoreUnusable
from tasks.init import FILES, TEMPLATE, init
from tasks.pipeline_file import load


def test_the_new_folder_holds_a_valid_pipeline_of_that_name(tmp_path: Path) -> None:
    written = init(tmp_path / "deep" / "flowers", "flowers-2")
    assert [path.name for path in written] == list(FILES)
    pipeline = load(tmp_path / "deep" / "flowers" / "pipeline.yaml")
    assert pipeline.name == pipeline.model == "flowers-2"
    code = recipe_code(pipeline.recipe_file, pipeline.recipe_attribute)
    assert "torch" in code.train["distributions"]
    assert "torch" not in code.metric["distributions"]
    assert all("my-model" not in path.read_text() for path in written)


def test_every_file_of_the_template_is_written(tmp_path: Path) -> None:
    present = {path.name for path in TEMPLATE.iterdir() if path.name != "__pycache__"}
    assert present == set(FILES.values())


def test_the_name_is_the_folders_if_none_is_given(tmp_path: Path) -> None:
    (tmp_path / "flowers").mkdir()
    init(tmp_path / "flowers")
    assert load(tmp_path / "flowers" / "pipeline.yaml").name == "flowers"


def test_the_new_folders_own_tests_pass(tmp_path: Path) -> None:
    init(tmp_path / "flowers")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(argv, check=False, cwd=tmp_path / "flowers", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(Refused, match=r"is not empty, it holds mine.txt"):
        init(tmp_path, "a")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(Refused, match="is a file"):
        init(tmp_path / "mine.txt", "a")


@pytest.mark.parametrize("name", ["", "a b", "../a", ".a", "a/b", "a" * 101])
def test_a_name_that_is_no_pipeline_name_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="expected up to 100 letters"):
        init(tmp_path / "new", name)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_told() -> None:
    with pytest.raises(StoreUnusable, match="cannot be written"):
        init(Path("/proc/new"), "a")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreUnusable, match="Permission denied"):
        init(tmp_path / "new", "a")
