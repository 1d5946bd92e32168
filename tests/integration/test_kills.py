"""A run that is killed at any instant leaves nothing half done and no process behind; the next run ends the same."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

SETTINGS = ["--set", "train.max_epochs=3", "--set", "gates.metrics.accuracy.min=0.5"]
TRIALS = 2
KILLS = 5


def contents(report):
    return {stage["stage"]: stage["content"] for stage in report["stages"] if stage["content"]}


@pytest.fixture(scope="module")
def reference(workspaces):
    """What an undisturbed run builds, and how long it takes."""
    workspace = workspaces("reference")
    report = workspace.report("run", workspace.pipeline("digits"), *SETTINGS)
    workspace.enginehouse("serve", "stop")
    return contents(report), report["seconds"]


def processes_of(workspace):
    """Every process that carries this workspace's home in its environment, with its pid."""
    mark = f"ENGINEHOUSE_HOME={workspace.home}\0".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if mark in (entry / "environ").read_bytes() + b"\0":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it ended while we looked
                continue
    return found


def unrecorded(workspace):
    recorded = {json.loads(file.read_text())["pid"] for file in (workspace.home / "serve").glob("*.json")}
    left = {}
    for pid, command in processes_of(workspace).items():
        try:
            if os.getsid(pid) not in recorded:
                left[pid] = command
        except ProcessLookupError:
            continue
    return left


def assert_whole(workspace):
    """Every version in the repository has all its files, and the config lists only versions that are there."""
    folder = workspace.repository / "digits"
    for version in folder.glob("[0-9]*"):
        provenance = json.loads((version / "provenance.json").read_text())
        for file in provenance["files"]:
            assert (version / file["path"]).stat().st_size == file["size"]
    if (folder / "config.pbtxt").exists():
        assert (folder / "1").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True], ids=["the main process", "its whole process group"])
@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_run_killed_again_and_again_leaves_nothing_and_ends_the_same(trial, whole_group, reference, workspace):
    expected, seconds = reference
    workspace = replace(workspace, prefect_url=None)  # with Prefect's temporary server, which is a process more to end
    chance = random.Random(f"{trial} {whole_group}")
    # Each run goes on from what the one before has left, so that later kills strike later stages.
    instants = [chance.uniform(0.2, seconds) for _ in range(KILLS)]
    struck = [instant for instant in instants if killed(workspace, whole_group, lambda run, at=instant: ends(run, at))]
    print(f"killed after {struck} s; undisturbed it takes {seconds:.1f} s")
    assert struck
    ends_well(workspace, expected)


def test_a_run_killed_while_it_trains_leaves_nothing_and_the_next_one_goes_on(workspace):
    workspace = replace(workspace, prefect_url=None)
    log = workspace.home / "runs"

    def trains(run):
        deadline = time.monotonic() + 120
        while not any('"stage": "train", "done"' in file.read_text() for file in log.glob("*.log")):
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(0.05)

    assert killed(workspace, True, trains)
    ends_well(workspace, None)


def ends(run, seconds):
    """Let it run for so long, or to its end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(seconds)


def killed(workspace, whole_group, wait):
    """Start a run, kill it when `wait` returns, and look at what it has left; whether it was still running."""
    run = subprocess.Popen(
        [str(workspace.command), "run", str(workspace.pipeline("digits")), *SETTINGS],
        env=workspace.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait(run)
    running = run.poll() is None
    if running:
        (os.killpg if whole_group else os.kill)(run.pid, signal.SIGKILL)
    assert run.wait() in (0, -signal.SIGKILL)
    deadline = time.monotonic() + 30
    while left := unrecorded(workspace):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert_whole(workspace)
    return running


def ends_well(workspace, expected):
    report = workspace.report("run", workspace.pipeline("digits"), *SETTINGS)
    assert_whole(workspace)
    if expected is not None:
        assert contents(report) == expected
    assert sorted(p.name for p in (workspace.repository / "digits").iterdir()) == ["1", "config.pbtxt"]
    assert workspace.report("run", workspace.pipeline("digits"), *SETTINGS)["state"] == "unchanged"
    assert workspace.report("artifacts", "verify") == []
    assert len(workspace.report("serve", "status")) == 1
