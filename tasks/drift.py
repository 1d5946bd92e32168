"""Whether recent data still looks like the training's, by a measure that the recipe gives."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks import evaluation
from tasks.config import Pipeline
from tasks.errors import ConfigError, Problem
from tasks.events import Listener, line_listener
from tasks.home import Home
from tasks.stage import Site, program_step, read_json, run_step

NAME = "drift"


@dataclass(frozen=True, kw_only=True)
class Drift:
    """What the recipe found."""

    drifted: bool
    scores: Mapping[str, float]
    """The numbers behind it, by names of the recipe's."""


def check(pipeline: Pipeline, recent: Path, *, home: Home, listener: Listener) -> Drift:
    """Ask the recipe's `drift(reference, recent)` in a child process.

    Raises `ConfigError` where there is no such data, or the recipe has no such method or answers something else.
    """
    if not recent.exists():
        raise ConfigError(Problem("there is no such file or folder", file=recent, field="recent"))
    home.runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        site = Site(pipeline=pipeline, materials={}, work=Path(work))
        job = {"recipe": evaluation.recipe_spec(pipeline), "inputs": list(pipeline.inputs), "recent": str(recent)}
        step = program_step(
            site, NAME, what="the drift check", job=job, timeout_seconds=evaluation.timeout_seconds(pipeline)
        )
        run_step(step, log=home.runs / f"{pipeline.name}-drift.log", on_line=line_listener(listener, NAME))
        report = read_json(step.output / "report.json")
    return Drift(drifted=report["drifted"], scores=report["scores"])
