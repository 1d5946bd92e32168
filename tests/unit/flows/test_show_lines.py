"""What a person sees: lines that stay whole where they are read by a program, and a view that moves while it waits."""

import errno
import io
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from flows import cli, show, words
from flows.cli import flow_process, setup
from tasks.errors import StoreUnusable
from tasks.events import silent
from tasks.home import Home

ENDED = {
    "type": "stage_ended",
    "stage": "train",
    "state": "built",
    "artifact": "digits/train@1",
    "seconds": 22.0,
    "metrics": {"train_loss": 0.04826, "validation_accuracy": 0.9889, "validation_loss": 0.05093},
}


def terminal(width: int) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=True, color_system=None, width=width, highlight=False), written


def test_what_is_no_terminal_gets_lines_of_any_length(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    show.RunView(show.console(stderr=True))(ENDED)
    show.console().print(show.rows(["artifact", ""], [["digits/train@1", "x" * 300]], cut=True))
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.endswith("22 s  train_loss 0.04826, validation_accuracy 0.9889, validation_loss 0.05093\n")
    assert "x" * 300 in said.out


def test_a_narrow_terminal_gets_the_metrics_on_a_line_of_their_own():
    console, written = terminal(80)
    show.RunView(console)(ENDED)
    first, second = written.getvalue().splitlines()
    assert first.endswith("22 s")
    assert second == " " * 15 + "train_loss 0.04826, validation_accuracy 0.9889, validation_loss 0.05093"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_running_line_counts_on_between_events_and_stays_one_line(width, monkeypatch):
    console, _ = terminal(width)
    view = show.RunView(console)
    view({"type": "stage_started", "stage": "triton_config", "why": "config.serve.max_batch_size: 1 -> 2; " * 5})
    now = time.monotonic()
    monkeypatch.setattr(show.time, "monotonic", lambda: now + 41)
    with console.capture() as drawn:
        console.print(view._running())
    assert drawn.get().count("\n") == 1
    assert " 41 s " in drawn.get()


def test_the_view_tells_what_it_waits_for_before_the_first_stage():
    console, written = terminal(80)
    view = show.RunView(console)
    view.waits_for("starting Prefect")
    console.print(view._running())
    assert "starting Prefect" in written.getvalue()


def test_a_path_is_shown_whole_whatever_is_in_it(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "[bold]my model[/bold]"
    setup.init(folder, name="m")
    said = capsys.readouterr().out
    assert f"wrote {folder / 'recipe.py'}\n" in said
    following = shlex.split(said.splitlines()[-1])
    assert following[0] == "next:"
    assert following[-2:] == ["run", str(folder / "pipeline.yaml")]
    console, written = terminal(80)
    for line in show.card({"name": "a", "log": str(folder) + "x" * 80}):
        console.print(line, soft_wrap=True)
    assert str(folder) + "x" * 80 in written.getvalue()


def test_a_command_is_named_so_that_the_shell_finds_it(tmp_path, monkeypatch):
    command = tmp_path / "bin" / "enginehouse"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command.with_name("python3")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert words.invoked() == [str(command)]
    monkeypatch.setenv("PATH", str(command.parent))
    assert words.invoked() == ["enginehouse"]
    monkeypatch.setattr(sys, "executable", str(Path("/nowhere/python3")))
    assert words.invoked() == ["enginehouse"]


def test_what_ctrl_c_has_not_ended_is_not_said_to_have_ended(monkeypatch, capsys):
    def interrupt(folder):
        raise KeyboardInterrupt("the run may not have ended yet")

    monkeypatch.setattr("flows.cli.serve.home_at", interrupt)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "status"])
    assert ended.value.code == cli.INTERRUPTED
    assert "may not have ended yet" in capsys.readouterr().err


def test_ctrl_c_ends_with_a_word_and_the_status_of_an_interrupt(monkeypatch, capsys):
    def interrupt(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.cli.serve.home_at", interrupt)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "status", "--json"])
    assert ended.value.code == cli.INTERRUPTED
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "interrupted"
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "status"])
    assert ended.value.code == cli.INTERRUPTED


@pytest.mark.parametrize("width", [70, 80, 120])
def test_a_listing_cuts_its_last_column_and_nothing_else(width):
    console, _ = terminal(width)
    line = [
        "digits/triton_config@1",
        "f35ffff805d1",
        "382 B",
        "2026-11-30 18:00:10",
        "accuracy 0.98, loss 0.1, more 0.2",
    ]
    with console.capture() as drawn:
        console.print(show.rows(["artifact", "content", "size", "built (UTC)", ""], [line], cut=True))
    row = drawn.get().splitlines()[1]
    assert row.split("  ")[:4] == line[:4]
    assert row.rstrip().endswith("…") == (width < 105)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["artifacts", "show", "--help"]])
def test_a_reader_that_has_had_enough_is_no_error(arguments):
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--version"], ["run", "--help"], ["doctor", "--json"]])
def test_an_output_on_a_full_disk_is_told_in_one_line(arguments):
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 4
    assert ended.stderr == "output standard output cannot be written: No space left on device\n"


def test_ctrl_c_during_the_imports_ends_like_any_other(tmp_path):
    # In place of rich, one of the first modules that the commands import.
    (tmp_path / "rich.py").write_text("import os, signal; os.unlink(__file__); signal.raise_signal(signal.SIGINT)")
    code = (
        "import sys; from flows.cli import main; sys.path.insert(0, sys.argv[1])\n"
        "try: main(['--version'])\n"
        "except KeyboardInterrupt: sys.exit('a traceback')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, env=os.environ
    )
    assert ended.returncode == cli.INTERRUPTED, ended.stderr


def test_a_run_goes_on_when_nobody_reads_what_it_tells():
    code = (
        "from flows import show\n"
        "view = show.RunView(show.console(stderr=True))\n"
        "for _ in range(3): view({'type': 'note', 'text': 'x'})\n"
        "print('went on')"
    )
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=write, text=True, check=False)
    os.close(write)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")


def test_a_progress_bar_leaves_nothing_where_there_is_no_terminal(capsys):
    with show.Bytes(show.console(stderr=True)) as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""


def test_a_log_that_cannot_be_written_is_the_home_s_fault_and_not_ours(tmp_path, monkeypatch):
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(StoreUnusable, match="runs"):
        flow_process.run_flow(Home(tmp_path), "digits", {}, silent)
    (tmp_path / "runs").unlink()
    (tmp_path / "runs").mkdir()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(flow_process.command, "run", full)
    with pytest.raises(StoreUnusable, match="the disk is full"):
        flow_process.run_flow(Home(tmp_path), "digits", {}, silent)
