"""The notice that this machine is about to be taken away: a signal, noted here, acted upon between two steps."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

from .failures import ProgramFailed


class Notice:
    """Set by SIGTERM, and by one more signal if the job names it, within its `with` block."""

    def __init__(self, name: str | None = None) -> None:
        self.given: str | None = None
        self._numbers = {signal.SIGTERM, signal.Signals[f"SIG{name or 'TERM'}"]}
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._take) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: FrameType | None) -> None:
        self.given = signal.Signals(number).name


class Preempted(ProgramFailed):
    """The notice came and a checkpoint is written; whoever started the training may start it again at any time."""

    def __init__(self, step: int) -> None:
        super().__init__("preempted", f"asked to stop; a checkpoint of step {step} is written", hint=None)
