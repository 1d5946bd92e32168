"""What a program tells while it runs (`::progress` lines) and notes beside its products (`work/notes.json`)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .jobs import Notes as NotesJson

BETWEEN_LINES = 0.1
"""Seconds: a terminal shows no more, and a log of a long run stays readable."""


class Progress:
    """Prints how far the work is, no two lines within `every` seconds; the first and the last are always printed."""

    def __init__(self, total: int, *, silent: bool = False, every: float = BETWEEN_LINES) -> None:
        self.total, self._silent, self._every, self._last = total, silent, every, -every

    def __call__(self, done: int, text: str, metrics: Mapping[str, float | None] | None = None, **more: float) -> None:
        now = time.monotonic()
        if self._silent or (done < self.total and now - self._last < self._every):
            return
        self._last = now
        known = {name: value for name, value in (metrics or {}).items() if value is not None}
        line = {"done": done, "total": self.total, "text": text, "metrics": known, **more}
        sys.stdout.write(f"::progress {json.dumps(line)}\n")
        sys.stdout.flush()


class Notes:
    """Times, warnings and what really ran; kept apart from the products, whose bytes depend on the job alone."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.warnings: list[str] = []
        self.environment: dict[str, str] = {}
        self.facts: dict[str, Any] = {}

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[step] = self.seconds.get(step, 0.0) + round(time.monotonic() - began, 3)

    def resumed(self, step: int, ranks: int) -> None:
        """Say that work goes on from a checkpoint."""
        self.facts["resumed_from_step"] = step
        sys.stdout.write(f"going on from the checkpoint of step {step} with {ranks} ranks\n")
        sys.stdout.flush()

    def warn(self, message: str) -> None:
        self.warnings.append(message)
        sys.stdout.write(f"warning: {message}\n")
        sys.stdout.flush()

    def write(self, folder: Path) -> None:
        seconds = {**self.seconds, "total": round(time.monotonic() - self._began, 3)}
        notes: NotesJson = {
            "seconds": seconds,
            "warnings": self.warnings,
            "environment": self.environment,
            "facts": self.facts,
        }
        write_json(folder / "notes.json", notes)


def write_json(path: Path, value: object) -> None:
    """Sorted and indented, so that equal values are equal bytes that a person can read; refuses NaN and infinity."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
