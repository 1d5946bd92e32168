"""Two hosts, as two network namespaces: one is lost and comes back, and the training shrinks and grows with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.integration.training import RECIPE, Trainee

pytestmark = pytest.mark.slow
PATIENCE = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"
"""Seconds until a round of ranks is complete, and beats of a host that may be missed."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """Two namespaces that reach each other, and nothing else."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.fail("network namespaces need root and iproute2, as .ci/run has them")
    tag = uuid.uuid4().hex[:6]
    names = [f"eh-{tag}-a", f"eh-{tag}-b"]
    for name in names:
        ip("netns", "add", name)
    try:
        ip("link", "add", f"v{tag}a", "netns", names[0], "type", "veth", "peer", "name", f"v{tag}b", "netns", names[1])
        for name, end, number in zip(names, "ab", (1, 2), strict=True):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"v{tag}{end}")
            ip("-n", name, "link", "set", f"v{tag}{end}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


PIPELINE = f"""
name: hosts
recipe: recipe.py:Small
data: {{rows: {{version: "1"}}}}
shapes: {{batch: {{min: 1, opt: 4, max: 8}}}}
inputs: {{input: {{dtype: float32, shape: [batch, 16]}}}}
train:
  nnodes: 1:2
  rdzv_endpoint: 10.77.0.1:29400
  rdzv_conf: {PATIENCE}
  max_epochs: 80
  batch_size: 10
  max_restarts: 20
  collective_timeout_seconds: 10
  checkpoint: {{every_steps: 5}}
"""


def on(host: str, end: str, command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start something on a host; what differs from host to host is in the environment."""
    tag = host.split("-")[1]
    of_host = {"GLOO_SOCKET_IFNAME": f"v{tag}{end}", "PET_LOCAL_ADDR": f"10.77.0.{1 if end == 'a' else 2}"}
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *command],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **of_host},
        stdout=log.open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def lose(process: subprocess.Popen[bytes]) -> None:
    """As a host that loses power: everything at once."""
    for victim in [*psutil.Process(process.pid).children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.wait()


def torchrun_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    below = psutil.Process(process.pid).children(recursive=True)
    (found,) = [p for p in below if "torch.distributed.run" in p.cmdline() and p.cmdline()[1] == "-I"]
    return found


def test_hosts_are_lost_and_come_back_and_the_rendezvous_too(hosts, tmp_path):
    """The host of the rendezvous is the one that runs the pipeline; there the torchrun that keeps it is killed."""
    made = Trainee.made(
        tmp_path / "user", recipe=RECIPE.replace("time.sleep(0.03)", "time.sleep(0.05)"), pipeline=PIPELINE
    )
    log = made.folder / "orchestrator.log"
    run = on(hosts[0], "a", [sys.executable, "-m", "tests.integration.training", str(made.folder)], log)

    def latest() -> str:
        work = made.work()
        file = work / "checkpoints" / "LATEST" if work is not None else None
        return file.read_text() if file is not None and file.exists() else ""

    def build_log() -> str:
        work = made.work()
        return (work.parents[1] / "build.log").read_text() if work is not None else ""

    def join() -> subprocess.Popen[bytes]:
        work = made.work()
        assert work is not None
        return on(hosts[1], "b", ["sh", str(work.parent / "join.sh")], made.folder / "other.log")

    def wait_for(condition, what: str, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert run.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"{what}\n{build_log()[-5000:]}"
            time.sleep(0.1)

    def progress() -> None:
        before = latest()
        wait_for(lambda: latest() > before, "no checkpoint")

    other = None
    try:
        wait_for(lambda: (work := made.work()) is not None and (work.parent / "join.sh").exists(), "no start")
        other = join()
        progress()
        lose(other)
        wait_for(lambda: "with 1 ranks" in build_log(), "it did not go on with one host")
        progress()
        other = join()
        wait_for(lambda: "with 2 ranks" in build_log(), "it did not grow again")
        progress()
        torchrun_of(run).kill()
        assert run.wait(240) == 0, log.read_text()[-3000:]
        assert other.wait(60) == 0  # it joined again, by itself, and ended with the training
    finally:
        for process in (run, other):
            if process is not None and process.poll() is None:
                lose(process)
    record = made.train()
    sizes = [ranks for _, ranks in record.details["world_sizes"]]
    assert sizes[-1] == 2
    assert any(sizes[at : at + 3] == [2, 1, 2] for at in range(len(sizes))), sizes
    assert len(record.details["history"]) == 80
    resubmitted = [entry["reason"] for entry in record.details["interruptions"] if entry.get("resubmitted")]
    assert len(resubmitted) == 1, record.details["interruptions"]
    assert resubmitted[0] == "torchrun was killed by SIGKILL" or resubmitted[0].startswith("asked to stop")


def test_a_machine_whose_own_name_leads_nowhere_trains(tmp_path):
    """As in a container with the network of its host."""
    made = Trainee.made(tmp_path / "user")
    alone = ["unshare", "--uts", "sh", "-c", 'hostname leads-nowhere && exec "$@"', "sh"]
    run = made.start(around=alone)
    try:
        assert run.wait(120) == 0, (made.folder / "orchestrator.log").read_text()[-3000:]
    finally:
        run.kill()
