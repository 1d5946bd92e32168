"""The metrics of a training, written once as JSON lines, and handed on to trackers.

{"step": 50, "epoch": 2, "train_loss": 0.41, "learning_rate": 0.002, "samples_per_second": 12400.0, "time": …}
{"step": 80, "epoch": 2, "ends_epoch": true, "train_loss": 0.39, "validation_loss": 0.35, "validation_accuracy": …}
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .jobs import TrackerConfig
from .trackers import Tracker, open_trackers


class MetricsLog:
    """One line per call of `write`; only the leading rank's is not silent."""

    def __init__(self, file: Path, trackers: list[TrackerConfig], *, silent: bool) -> None:
        self._file, self._silent = file, silent
        self._trackers: list[Tracker] = [] if silent else open_trackers(trackers, file.parent)

    def set_back(self, step: int) -> None:
        """Forget what was written after a step: training goes on from there, and will write it again."""
        if self._silent or not self._file.exists():
            return
        kept = []
        for line in self._file.read_text().splitlines():
            try:
                values = json.loads(line)
            except json.JSONDecodeError:
                break  # cut by a crash
            if values["step"] <= step:
                kept.append(line + "\n")
        self._file.write_text("".join(kept))

    def write(self, step: int, epoch: int, metrics: Mapping[str, float | None], *, ends_epoch: bool = False) -> None:
        if self._silent:
            return
        line: dict[str, Any] = {"step": step, "epoch": epoch, **metrics, "time": round(time.time(), 3)}
        if ends_epoch:
            line["ends_epoch"] = True
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        known = {name: value for name, value in metrics.items() if value is not None}
        for tracker in self._trackers:
            tracker.log(step, known)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
