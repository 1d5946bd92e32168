"""Draws the curves of a training's metrics: `output/curves.png`; job `jobs.CurvesJob`. Needs matplotlib."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .jobs import CurvesJob


def main(job: CurvesJob) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    file = Path(job["metrics"])
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    epochs = [line for line in lines if line.get("ends_epoch")]
    windows = [line for line in lines if not line.get("ends_epoch")]
    if not lines:
        return
    figure, (loss, metric) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    drawn: list[tuple[list[dict[str, Any]], str, dict[str, Any]]] = [
        (windows, "train_loss", {"color": "#9db8d9", "linewidth": 1, "label": "training, by steps"}),
        (epochs, "train_loss", {"color": "#1f5fa8", "marker": ".", "label": "training"}),
        (epochs, "validation_loss", {"color": "#c4572b", "marker": ".", "label": "validation"}),
    ]
    for source, name, style in drawn:
        points = [(line["step"], line[name]) for line in source if line.get(name) is not None]
        if points:
            loss.plot(*zip(*points, strict=True), **style)
    known = {"validation_loss", "train_loss"}
    for name in sorted({name for line in epochs for name in line if name.startswith("validation_")} - known):
        points = [(line["step"], line[name]) for line in epochs if line.get(name) is not None]
        metric.plot(*zip(*points, strict=True), marker=".", label=name.removeprefix("validation_"))
    for axes, title in ((loss, "loss"), (metric, "metric on the validation data")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(Path(job["output"]) / "curves.png", dpi=110)
