"""A trace of torch's profiler over some steps, kept beside the log; chrome://tracing and Perfetto show it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Tracer:
    """Profiles the steps from the first to the last of `steps`, both included; nothing without them."""

    def __init__(self, file: Path, steps: Sequence[int] | None) -> None:
        self._file, self._steps = file, steps
        self._running: profile | None = None

    def step(self, done: int) -> None:
        """Before the first step and after each, with how many are done."""
        if self._steps is None:
            return
        first, last = self._steps
        if self._running is None and first <= done + 1 <= last:
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
            self._running = profile(activities=activities, record_shapes=True)
            self._running.start()
        elif self._running is not None and done >= last:
            self.close()

    def close(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running.export_chrome_trace(str(self._file))
            self._running, self._steps = None, None
