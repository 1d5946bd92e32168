"""Asks the recipe whether recent data has drifted from the training's; job and product are `jobs.DriftJob`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .failures import ProgramFailed
from .jobs import DriftJob, DriftReport
from .notes import Notes, write_json
from .recipe import Recipe, definition, described
from .recipe_loading import load_recipe


def main(job: DriftJob) -> None:
    notes = Notes()
    torch.manual_seed(0)
    with notes.timed("load"):
        recipe = load_recipe(job["recipe"])
        if not recipe.has("drift"):
            raise ProgramFailed(
                "configuration",
                f"{recipe.name} has no method drift(reference, recent)",
                hint="it gets the training data and the path of recent data, and returns "
                '{"drifted": True or False, and numbers by name}',
                place=definition(type(recipe.user)),
            )
        reference = recipe.data("train", job["inputs"])
    with notes.timed("drift"):
        found = recipe.call("drift", reference, Path(job["recent"]))
    write_json(Path(job["output"]) / "report.json", report_of(recipe, found))
    notes.write(Path(job["work"]))


def report_of(recipe: Recipe, found: Any) -> DriftReport:
    """What the recipe's method returned, checked."""
    # numpy's booleans and numbers have `item`.
    values = {k: getattr(v, "item", lambda v=v: v)() for k, v in found.items()} if isinstance(found, Mapping) else {}
    drifted = values.pop("drifted", None)
    if not isinstance(drifted, bool):
        raise recipe.wrong(
            "drift", f'() gave {described(found)}; expected a dict with "drifted": True or False, and numbers by name'
        )
    for name, value in values.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise recipe.wrong("drift", f"() gave {value!r} as {name}; expected a finite number")
    return {"drifted": drifted, "scores": {name: float(value) for name, value in values.items()}}
