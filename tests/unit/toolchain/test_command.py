"""The parts of running children that need no child; the rest is in tests/integration/test_command.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tasks.toolchain.command import last_lines, python_program
from tasks.toolchain.supervised import Ending, signal_name


def test_a_program_of_ours_starts_isolated_and_unbuffered() -> None:
    interpreter, *options, bootstrap, name, job = python_program("train", Path("/work/job.json"))
    assert interpreter == sys.executable
    assert options == ["-I", "-u"]
    assert Path(bootstrap).parent.name == "programs"
    assert (name, job) == ("train", "/work/job.json")


@pytest.mark.parametrize(
    ("written", "count", "expected"),
    [
        (b"", 3, ()),
        (b"one\n", 3, ("one",)),
        (b"one\ntwo\nthree\nfour\n", 3, ("two", "three", "four")),
        (b"one\nno end", 3, ("one", "no end")),
        (b"caf\xe9\n", 3, ("caf\ufffd",)),
        (b"x\n" * 100_000 + b"end\n", 2, ("x", "end")),
    ],
)
def test_the_end_of_a_log_is_read(tmp_path: Path, written: bytes, count: int, expected: tuple[str, ...]) -> None:
    log = tmp_path / "log"
    log.write_bytes(written)
    assert last_lines(log, count) == expected


def test_a_log_that_does_not_exist_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (Ending(cause="exited", status=3), "exit status 3"),
        (Ending(cause="exited", signal=9), "killed by SIGKILL"),
        (Ending(cause="exited", signal=44), "killed by signal 44"),
        (Ending(cause="cancelled"), "cancelled"),
        (
            Ending(cause="could not start", error="[Errno 2] No such file"),
            "could not be started: [Errno 2] No such file",
        ),
    ],
)
def test_an_ending_says_how(ending: Ending, text: str) -> None:
    assert str(ending) == text


def test_signals_have_their_names() -> None:
    assert signal_name(15) == "SIGTERM"
