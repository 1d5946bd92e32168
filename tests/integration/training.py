"""A small pipeline whose training is interrupted: the stage as a run builds it, with real torchrun and its workers.

Run as a program with a folder, it builds that folder's training: an orchestrator that can be killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flows.chain import Selection, open_job, run_stage
from tasks import train
from tasks.artifacts.record import BuildRecord
from tasks.home import VARIABLE

RECIPE = """
import time

import numpy as np
import torch
from torch import nn

def rows(count, seed):
    made = np.random.default_rng(seed).normal(size=(count, 16)).astype(np.float32)
    return [({"x": row}, np.int64(row[:4].sum() > 0)) for row in made]


class Accuracy:
    def __init__(self):
        self.right = self.seen = 0

    def update(self, outputs, targets):
        self.right += int((outputs["y"].argmax(1) == targets).sum())
        self.seen += len(targets)

    def result(self):
        return {"accuracy": self.right / self.seen}


class Small:
    outputs = ("y",)

    def model(self):
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))

    def train_data(self):
        return rows(203, 1)

    def validation_data(self):
        return rows(41, 2)

    def test_data(self):
        return rows(41, 3)

    def loss(self, outputs, targets):
        time.sleep(0.03)  # there is time to interrupt it, also where nothing else runs
        return nn.functional.cross_entropy(outputs["y"], targets, reduction="none")

    def metric(self):
        return Accuracy()
"""

PIPELINE = """
name: small
recipe: recipe.py:Small
data: {rows: {version: "1"}}
shapes: {batch: {min: 1, opt: 4, max: 8}}
inputs: {input: {dtype: float32, shape: [batch, 16]}}
train: {nproc_per_node: 2, max_epochs: 8, batch_size: 10, checkpoint: {every_steps: 7}}
"""


@dataclass
class Trainee:
    """A folder with the pipeline, and the runs of its training."""

    folder: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def made(cls, folder: Path, *, recipe: str = RECIPE, pipeline: str = PIPELINE) -> Trainee:
        folder.mkdir(parents=True)
        (folder / "recipe.py").write_text(recipe.replace('{"x": row}', '{"input": row}'))
        (folder / "pipeline.yaml").write_text(pipeline)
        return cls(folder)

    def train(self, *overrides: str, rebuild: bool = False) -> BuildRecord:
        """Find or build the training; its record."""
        before, os.environ[VARIABLE] = os.environ.get(VARIABLE), str(self.folder / "home")
        try:
            selection = Selection(until="train", rebuild=frozenset({"train"} if rebuild else ()))
            job = open_job(self.folder / "pipeline.yaml", overrides, selection, self.events.append)
            outcome = run_stage(train.STAGE, job, dict(job.given), self.events.append)
            assert outcome.artifact is not None
            return job.store.get_record(outcome.artifact)
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before

    def start(self, *, around: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """The same in a process of its own; `around` stands before its command line."""
        log = (self.folder / "orchestrator.log").open("ab")
        command = [*around, sys.executable, "-m", "tests.integration.training", str(self.folder)]
        return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=log, stderr=log)

    @property
    def lines(self) -> list[str]:
        return [event["line"] for event in self.events if event["type"] == "line"]

    def work(self) -> Path | None:
        """The training's working folder, while there is one."""
        found = (self.folder / "home" / "store" / "claims").glob("*/*/work/train/work")
        try:
            return next(found, None)
        except FileNotFoundError:  # it was committed while we looked
            return None

    def beat(self, rank: int) -> dict[str, Any] | None:
        work = self.work()
        try:
            return None if work is None else json.loads((work / "ranks" / f"rank-{rank}.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def parent(self, pid: int) -> int:
        """A worker's torchrun."""
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def living_at(self, step: int, *, rank: int, struck: set[str]) -> dict[str, Any]:
        """Wait for a sign of life of a rank past a step, of a start of the workers that was not `struck` yet."""
        deadline = time.monotonic() + 120
        while (beat := self.beat(rank)) is None or beat["step"] < step or beat["attempt"] in struck:
            assert time.monotonic() < deadline, f"rank {rank} does not come to step {step}"
            time.sleep(0.02)
        struck.add(beat["attempt"])
        return beat

    def at_step(self, step: int, act: Callable[[dict[str, Any]], None], *, rank: int = 1) -> threading.Thread:
        """Call `act` with the rank's sign of life, once it says that it is past a step."""

        def wait() -> None:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                beat = self.beat(rank)
                if beat is not None and beat["step"] >= step:
                    act(beat)
                    return
                time.sleep(0.02)

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


@contextmanager
def memory_limit(megabytes: int) -> Iterator[list[str]]:
    """A control group of the kernel's with a limit, as a container or a job has it: what starts a command within."""
    own = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    root = Path("/sys/fs/cgroup")
    if "memory" in own:  # version 1
        group, file = root / "memory" / own["memory"].lstrip("/") / f"eh-{os.getpid()}", "memory.limit_in_bytes"
    else:
        group, file = root / f"eh-{os.getpid()}", "memory.max"
    try:
        group.mkdir()
        (group / file).write_text(str(megabytes << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        deadline = time.monotonic() + 10
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        group.rmdir()


def kill(number: signal.Signals) -> Callable[[dict[str, Any]], None]:
    return lambda beat: os.kill(beat["pid"], number)


if __name__ == "__main__":
    Trainee(Path(sys.argv[1])).train()
