"""Two hosts, as two network namespaces: one is lost and comes back, and the training shrinks and grows with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tasks.toolchain.torchrun import ENVIRONMENT
from tests.integration.training import RECIPE

pytestmark = pytest.mark.slow
PATIENCE = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"
"""Seconds until a round of ranks is complete, and beats of a host that may be missed."""
BOOTSTRAP = Path(__file__).parents[2] / "tasks" / "programs" / "bootstrap.py"


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


def agent(host: str, tag: str, *, is_host: bool, job: Path, log: Path) -> subprocess.Popen[bytes]:
    """One host's torchrun with one worker; the first host keeps the rendezvous."""
    interface = f"v{tag}{'a' if is_host else 'b'}"
    command = [
        "ip", "netns", "exec", host, sys.executable, "-I", "-m", "torch.distributed.run",
        "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "20", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "10.77.0.1:29400", "--rdzv-id", "hosts", "--local-addr", f"10.77.0.{1 if is_host else 2}",
        "--rdzv-conf", f"is_host={str(is_host).lower()},{PATIENCE}",
        "--no-python", "--", sys.executable, "-I", "-u", str(BOOTSTRAP), "train", str(job),
    ]  # fmt: skip
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
    return subprocess.Popen(
        command, env=environment, stdout=log.open("ab"), stderr=subprocess.STDOUT, start_new_session=True
    )


def descendants(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def end(process: subprocess.Popen[bytes]) -> None:
    """As a host that loses power: everything at once."""
    for pid in [*descendants(process.pid), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def wait_for(condition, what: str, log: Path, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}\n{log.read_text()[-5000:]}"
        time.sleep(0.1)


def test_a_lost_host_shrinks_the_training_and_its_return_grows_it(hosts, tmp_path):
    tag = hosts[0].split("-")[1]
    job, log = tmp_path / "job.json", tmp_path / "log"
    config = {
        "max_epochs": 40, "batch_size": 10, "seed": 0, "threads": 1, "timeout": 10, "checkpoint": {"every_steps": 5},
    }  # fmt: skip
    folders = {name: str(tmp_path / name) for name in ("output", "work")}
    inputs = {"input": {"dtype": "float32", "shape": ["batch", 16]}}
    recipe = RECIPE.replace("time.sleep(0.03)", "time.sleep(0.05)").replace('{"x": row}', '{"input": row}')
    (tmp_path / "recipe.py").write_text(recipe)
    job.write_text(json.dumps({"recipe": f"{tmp_path}/recipe.py:Small", "inputs": inputs, "config": config, **folders}))

    def started(ranks: int) -> int:
        return log.read_text().count(f"with {ranks} ranks") if log.exists() else 0

    first = agent(hosts[0], tag, is_host=True, job=job, log=log)
    second = agent(hosts[1], tag, is_host=False, job=job, log=log)
    try:
        latest = tmp_path / "work" / "checkpoints" / "LATEST"
        wait_for(latest.exists, "no checkpoint by two hosts", log)
        end(second)
        wait_for(lambda: started(1) == 1, "it did not go on with one host", log)
        before = latest.read_text()
        wait_for(lambda: latest.read_text() > before, "no checkpoint by one host", log)
        second = agent(hosts[1], tag, is_host=False, job=job, log=log)
        wait_for(lambda: started(2) >= 1, "it did not grow again", log)
        wait_for(lambda: first.poll() is not None, "it did not end", log, 300)
        assert first.returncode == 0, log.read_text()[-5000:]
    finally:
        for process in (first, second):
            if process.poll() is None:
                end(process)
    report = json.loads((tmp_path / "output" / "metrics.json").read_text())
    assert [ranks for _, ranks in report["world_sizes"]] == [2, 1, 2]
    assert len(report["history"]) == 40
