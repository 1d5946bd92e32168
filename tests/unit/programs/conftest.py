"""Fixtures of the programs' tests: recipes written for one test, and jobs run in this process: torch loads slowly."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.programs import evaluate, export, train
from tasks.programs.failures import ProgramFailed
from tasks.programs.recipe import Recipe
from tasks.programs.recipe_loading import load_recipe
from tasks.programs.weights import save_weights

HEADER = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
"""

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)
"""

DATA = """
def rows(count, seed):
    # Distinct rows of distinct scale; the target is whether the first value is positive.
    made = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return [({"x": row}, np.int64(row[0] > 0)) for row in made]
"""

METRIC = """
class Accuracy:
    def __init__(self):
        self.right = self.seen = 0

    def update(self, outputs, targets):
        self.right += int((outputs["y"].argmax(1) == targets).sum())
        self.seen += len(targets)

    def result(self):
        return {"accuracy": self.right / self.seen}
"""

CLASS = """
class User:
    outputs = ("y",)

    def model(self):
        return Model()

    def train_data(self):
        return rows(50, 1)

    def validation_data(self):
        return rows(23, 2)

    def test_data(self):
        return rows(21, 3)

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs["y"], targets, reduction="none")

    def metric(self):
        return Accuracy()
"""

INPUTS: dict[str, Any] = {"x": {"dtype": "float32", "shape": ["batch", 4]}}
SHAPES: dict[str, Any] = {"batch": {"min": 1, "opt": 4, "max": 8}}

_numbers = itertools.count()


@dataclass(frozen=True)
class Workbench:
    """A folder with one recipe, and the programs run on it."""

    folder: Path
    file: Path
    inputs: dict[str, Any]
    shapes: dict[str, Any]

    @property
    def reference(self) -> str:
        return f"{self.file}:User"

    def recipe(self) -> Recipe:
        return load_recipe(self.reference)

    def job(self, name: str, **more: object) -> dict[str, Any]:
        output, work = self.folder / name / "output", self.folder / name / "work"
        output.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        common = {"recipe": self.reference, "inputs": self.inputs, "shapes": self.shapes}
        return {**common, "output": str(output), "work": str(work), **more}

    def train(self, **config: object) -> Path:
        settings = {"max_epochs": 2, "batch_size": 8, "seed": 0, **config}
        job = self.job("train", config=settings)
        train.main(job)  # type: ignore[arg-type]
        return Path(job["output"])

    def weights(self) -> Path:
        """Untrained weights, saved as training saves them."""
        torch.manual_seed(0)
        path = self.folder / "model.safetensors"
        save_weights(self.recipe().model(list(self.inputs)), path)
        return path

    def export(self, weights: Path | None = None, **more: object) -> Path:
        job = self.job("export", weights=str(weights or self.weights()), parity={"atol": 1e-4}, **more)
        export.main(job)  # type: ignore[arg-type]
        return Path(job["output"])

    def evaluate(self, name: str = "evaluate", **more: object) -> Path:
        job = self.job(name, batch_size=4, **more)
        evaluate.main(job)  # type: ignore[arg-type]
        return Path(job["output"])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Workbench]]:
    """`bench(model=…, data=…, metric=…, user=…, extra=…)` writes a recipe whose parts are ours unless given.

    Imports and torch's settings are as before afterwards, so that recipes of several tests do not meet.
    """
    before = list(sys.path), list(sys.path_hooks), set(sys.modules)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()

    def make(
        *,
        source: str | None = None,
        model: str = MODEL,
        data: str = DATA,
        metric: str = METRIC,
        user: str = CLASS,
        inputs: dict[str, Any] | None = None,
        shapes: dict[str, Any] | None = None,
    ) -> Workbench:
        folder = tmp_path / f"user{next(_numbers)}"
        folder.mkdir()
        file = folder / f"recipe{next(_numbers)}.py"
        parts = [HEADER, model, data, metric, user] if source is None else [source]
        file.write_text("\n".join(textwrap.dedent(part) for part in parts))
        return Workbench(folder, file, INPUTS if inputs is None else inputs, SHAPES if shapes is None else shapes)

    yield make
    sys.path[:], sys.path_hooks[:] = before[0], before[1]
    for name in set(sys.modules) - before[2]:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def failure_of() -> Callable[..., ProgramFailed]:
    """Call something that must fail, and give the failure."""

    def call(function: Callable[..., object], *arguments: object, **named: object) -> ProgramFailed:
        with pytest.raises(ProgramFailed) as caught:
            function(*arguments, **named)
        return caught.value

    return call
