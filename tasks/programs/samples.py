"""Rows of the recipe's data as plain arrays, for tools that live where there is no PyTorch; see `jobs.SamplesJob`.

Ranges are measured on training data and checked on validation data; the test split is for gates alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from .batches import check_inputs, to_arrays
from .jobs import RowsJob, SamplesJob
from .notes import Notes
from .recipe import Arrays, Recipe, Targets
from .recipe_loading import load_recipe
from .rows import write_batches


def main(job: SamplesJob) -> None:
    notes = Notes()
    torch.manual_seed(0)
    recipe = load_recipe(job["recipe"])
    output = Path(job["output"])
    for split, rows, name in (
        ("train", job["calibration_rows"], "calibration"),
        ("validation", job["check_rows"], "check"),
    ):
        with notes.timed(name):
            write_batches(output / f"{name}.npz", (inputs for inputs, _ in drawn(recipe, split, rows, job)))
    notes.write(Path(job["work"]))


def drawn(recipe: Recipe, split: str, rows: int, job: RowsJob) -> Iterator[tuple[Arrays, Targets]]:
    """Batches of `rows` rows, evenly over the whole split, since data sets are often sorted by class.

    The same arguments draw the same rows in the same order.
    """
    data = recipe.data(split, list(job["inputs"]))
    count = min(rows, len(data))
    chosen = [index * len(data) // count for index in range(count)]
    size = job["batch_size"]
    for start in range(0, count, size):
        part = chosen[start : start + size]
        if job["whole_batches"] and len(part) < size:
            return
        inputs, targets = recipe.batch([data[index] for index in part])
        check_inputs(recipe, split, inputs, job["inputs"])
        yield to_arrays({name: inputs[name] for name in job["inputs"]}), targets
