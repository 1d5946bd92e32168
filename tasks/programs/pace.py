"""How fast training goes, and whether the ranks wait for one of them."""

from __future__ import annotations

import time

from .notes import Notes

WAITING = 0.2
"""Share of the time that the others wait from which on a rank counts as slow."""
PERSISTENT = 20
"""Meetings in a row at which the same rank was slow before it is named."""


class Pace:
    """Counts of this rank, between two meetings and over the whole run."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """The clock starts when the first step does, not when the data is read."""
        now = time.monotonic()
        self._saved = self._began = self._met = now
        self.own_seconds = 0.0
        """Loading and forward since the last meeting: what waits for nobody."""
        self._steps = self._rows = self._all_rows = 0
        self.seconds_per_step = 0.0
        self.rows_per_second = 0.0
        self.window_seconds = 0.0

    def work(self, seconds: float) -> None:
        self.own_seconds += seconds

    def step(self, rows: int) -> None:
        self._steps += 1
        self._rows += rows

    @property
    def stepped(self) -> bool:
        """Whether there was a step since the last meeting."""
        return self._steps > 0

    def look(self) -> None:
        """Before a meeting: what was since the last one."""
        self.window_seconds = time.monotonic() - self._met
        if self._steps:
            self.seconds_per_step = self.window_seconds / self._steps
            self.rows_per_second = self._rows / max(self.window_seconds, 1e-9)

    def met(self) -> None:
        self._all_rows += self._rows
        self._met, self._steps, self._rows, self.own_seconds = time.monotonic(), 0, 0, 0.0

    def saved(self) -> None:
        self._saved = time.monotonic()

    def since_save(self) -> float:
        """Seconds since the last checkpoint, or the start."""
        return time.monotonic() - self._saved

    def overall(self) -> float:
        """Rows of all ranks per second, validation and all else included."""
        return self._all_rows / max(time.monotonic() - self._began, 1e-9)


class Slowness:
    """Names a rank that the others persistently wait for.

    Compared is what each rank did alone (loading data, forward); in the backward pass and after it all wait for the
    slowest, so that their times there are equal.
    """

    def __init__(self, size: int, notes: Notes, *, silent: bool) -> None:
        self._notes, self._silent = notes, silent
        self._own = [0.0] * size
        self._seconds = 0.0
        self._slowest, self._in_a_row = -1, 0
        self._named: set[int] = set()

    def look(self, own: list[float], seconds: float) -> None:
        """At each meeting: what each rank needed for itself in the last `seconds`."""
        self._own = [total + part for total, part in zip(self._own, own, strict=True)]
        self._seconds += seconds
        slowest = max(range(len(own)), key=own.__getitem__)
        slow = waiting(own, seconds) > WAITING
        self._in_a_row = self._in_a_row + 1 if slow and slowest == self._slowest else int(slow)
        self._slowest = slowest
        if self._in_a_row >= PERSISTENT and slowest not in self._named and not self._silent:
            self._named.add(slowest)
            self._notes.warn(
                f"rank {slowest} is slower than the others: they wait for it {waiting(own, seconds):.0%} of the time "
                "(look at what else runs on its machine, and at where its data comes from)"
            )

    def summary(self) -> dict[str, object]:
        """For the record."""
        slowest = max(range(len(self._own)), key=self._own.__getitem__)
        return {
            "own_seconds": [round(seconds, 3) for seconds in self._own],
            "seconds": round(self._seconds, 3),
            "slowest": slowest,
            "share_waited": round(waiting(self._own, self._seconds), 4),
        }


def waiting(own: list[float], seconds: float) -> float:
    """The share of the time that the median of the others waits for the slowest.

    >>> waiting([1.0, 3.0, 1.2], 4.0)
    0.475
    """
    if len(own) < 2 or seconds <= 0:
        return 0.0
    *others, slowest = sorted(own)
    middle = len(others) // 2
    median = others[middle] if len(others) % 2 else (others[middle - 1] + others[middle]) / 2
    return (slowest - median) / seconds
