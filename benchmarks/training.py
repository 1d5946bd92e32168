"""The trainer against a bare DDP loop, the price of checkpoints, and the time to recover from a killed worker.

    python benchmarks/training.py [speed|checkpoint|recovery]…      (all three without a name)

`speed` runs both loops in turn in the same two processes, on the same model and rows, and compares the medians of their
steps per second, so that a machine that is busy at times disturbs both alike. `checkpoint` saves a model of 50 MB with
AdamW (150 MB in all) every 20 steps, and relates the pause of one save to the time of 100 steps. `recovery` kills one
of two workers and takes the time until the next step.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROUNDS = 7

RECIPE = """
import numpy as np
import torch
from torch import nn

WIDTH = {width}


class Rows:
    def __init__(self, count):
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(count, {features})).astype(np.float32)
        self.y = rng.integers(0, 10, size=count)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return {{"x": self.x[index]}}, self.y[index]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear({features}, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
        )

    def forward(self, x):
        return self.layers(x)


class Metric:
    def update(self, outputs, targets):
        pass

    def result(self):
        return {{"nothing": 0.0}}


class Bench:
    outputs = ("y",)

    def model(self):
        return Model()

    def train_data(self):
        return Rows({rows})

    def validation_data(self):
        return Rows(8)

    def test_data(self):
        return Rows(8)

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs["y"], targets, reduction="none")

    def metric(self):
        return Metric()
"""


def job(folder: Path, *, width: int, features: int, rows: int, **config: Any) -> Path:
    """A recipe and a job file for it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.py").write_text(RECIPE.format(width=width, features=features, rows=rows))
    for name in ("output", "work"):
        (folder / name).mkdir(exist_ok=True)
    written = {
        "recipe": f"{folder / 'recipe.py'}:Bench",
        "inputs": {"x": {"dtype": "float32", "shape": ["batch", features]}},
        "output": str(folder / "output"),
        "work": str(folder / "work"),
        "config": {"max_epochs": 10**6, "batch_size": 64, "seed": 0, "threads": 1, **config},
    }
    file = folder / "job.json"
    file.write_text(json.dumps(written))
    return file


def torchrun(*argv: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen([*command, *argv], env=environment, cwd=ROOT, text=True, **options)


def as_worker(kind: str, job_file: Path) -> None:
    """One of the two ranks of `speed` and `checkpoint`."""
    sys.path.insert(0, str(ROOT))
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from tasks.programs import train
    from tasks.programs.beats import Beats
    from tasks.programs.notes import Notes
    from tasks.programs.preemption import Notice
    from tasks.programs.recipe_loading import load_recipe
    from tasks.programs.world import joined

    read = json.loads(job_file.read_text())
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with Notice() as notice, joined(read["config"]) as world:
        beats = Beats(Path(read["work"]), world.rank)
        recipe = load_recipe(read["recipe"])
        training = train.prepare(recipe, read, world, Notes(), beats, notice)
        training.resume()
        training.pace.start()
        training.progress._silent = True

        def ours() -> int:
            before = training.at.step
            training.at.done = 0
            training.train_epoch()
            return training.at.step - before

        model = DistributedDataParallel(recipe.model(["x"]))
        optimizer = torch.optim.AdamW(model.parameters())
        data = recipe.data("train", ["x"])
        sampler = torch.utils.data.DistributedSampler(data)  # type: ignore[arg-type]
        loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)  # type: ignore[arg-type]

        def bare() -> int:
            model.train()
            for inputs, targets in loader:
                loss = torch.nn.functional.cross_entropy(model(inputs["x"]), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return len(loader)

        def rate(loop: Any) -> float:
            world.barrier()
            began = time.perf_counter()
            steps = loop()
            return float(steps / (time.perf_counter() - began))

        if kind == "speed":
            rate(ours), rate(bare)  # warm up
            pairs = [(rate(ours), rate(bare)) if n % 2 else (rate(bare), rate(ours))[::-1] for n in range(ROUNDS)]
            found = {
                "ours_steps_per_second": round(statistics.median(mine for mine, _ in pairs), 2),
                "bare_steps_per_second": round(statistics.median(theirs for _, theirs in pairs), 2),
                "ratio": round(statistics.median(mine / theirs for mine, theirs in pairs), 4),
            }
        else:
            training.config["checkpoint"] = {"every_minutes": None}
            without = [rate(ours) for _ in range(3)]
            training.config["checkpoint"] = {"every_steps": 20, "every_minutes": None}
            with_them = [rate(ours) for _ in range(3)]
            training.checkpoints.finish()
            told = training.checkpoints.summary()
            stall, step = told["stall_seconds"] / told["saved"], 1 / statistics.median(without)
            found = {
                "step_seconds": round(step, 4),
                "stall_seconds_per_save": round(stall, 4),
                "stall_share": round(stall / (100 * step), 4),
                "write_seconds_per_save": round(told["write_seconds"] / told["saved"], 3),
                "steps_per_second_without": round(statistics.median(without), 2),
                "steps_per_second_with": round(statistics.median(with_them), 2),
            }
        if world.leads:
            (Path(read["output"]) / "found.json").write_text(json.dumps(found))
    os._exit(0)


def measured(kind: str, **shape: Any) -> Any:
    with tempfile.TemporaryDirectory() as name:
        file = job(Path(name), **shape)
        done = torchrun(str(Path(__file__)), "--worker", kind, str(file), stdout=subprocess.DEVNULL)
        if done.wait() != 0:
            sys.exit(f"{kind} failed")
        return json.loads((file.parent / "output" / "found.json").read_text())


def recovery() -> dict[str, float]:
    """Seconds from the kill of one worker to the next step of all."""
    with tempfile.TemporaryDirectory() as name:
        checkpoint = {"every_steps": 20}
        file = job(Path(name), width=256, features=64, rows=6400, checkpoint=checkpoint)
        bootstrap = ROOT / "tasks" / "programs" / "bootstrap.py"
        worker = [sys.executable, "-I", "-u", str(bootstrap), "train", str(file)]
        run = torchrun("--max-restarts", "1", "--no-python", "--", *worker, stdout=subprocess.DEVNULL, stderr=-3)
        beat_file = file.parent / "work" / "ranks" / "rank-1.json"

        def beat() -> Any:
            try:
                return json.loads(beat_file.read_text())
            except FileNotFoundError:
                return None

        def until(condition: Any) -> Any:
            deadline = time.monotonic() + 120
            while (found := beat()) is None or not condition(found):
                if time.monotonic() > deadline:
                    sys.exit("recovery took more than two minutes")
                time.sleep(0.02)
            return found

        first = until(lambda b: b["step"] >= 100)
        os.kill(first["pid"], signal.SIGKILL)
        began = time.monotonic()
        until(lambda b: b["attempt"] != first["attempt"] and b["phase"] not in ("starting", "loading data"))
        seconds = time.monotonic() - began
        run.terminate()
        run.wait()
        return {"recovery_seconds": round(seconds, 2)}


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        as_worker(sys.argv[2], Path(sys.argv[3]))
    wanted = sys.argv[1:] or ["speed", "checkpoint", "recovery"]
    found: dict[str, Any] = {}
    if "speed" in wanted:
        found["speed"] = measured("speed", width=1024, features=784, rows=1920)
    if "checkpoint" in wanted:
        # 3,400² weights and a little: 12.5 million parameters.
        found["checkpoint"] = measured("checkpoint", width=3400, features=256, rows=1280)
    if "recovery" in wanted:
        found["recovery"] = recovery()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
