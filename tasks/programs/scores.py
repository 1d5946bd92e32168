"""The recipe's metric on answers of another environment to rows of the validation split; see `jobs.ScoresJob`."""

from __future__ import annotations

from pathlib import Path

import torch

from .batches import map_tensors, to_array
from .jobs import ScoresJob
from .notes import Notes, write_json
from .recipe_loading import load_recipe
from .rows import read_batches
from .samples import drawn


def main(job: ScoresJob) -> None:
    notes = Notes()
    torch.manual_seed(0)
    recipe = load_recipe(job["recipe"])
    targets = [targets for _, targets in drawn(recipe, "validation", job["check_rows"], job)]
    scores = {}
    for name, path in job["answers"].items():
        metric = recipe.metric()
        for outputs, wanted in zip(read_batches(Path(path)), targets, strict=True):
            recipe.update(metric, outputs, map_tensors(to_array, wanted))
        scores[name] = recipe.result(metric)
    write_json(Path(job["output"]) / "report.json", scores)
    notes.write(Path(job["work"]))
