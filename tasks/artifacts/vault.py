"""The parts of an open store that all operations on it share."""

from __future__ import annotations

import getpass
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tasks.artifacts.durable import Scratch
from tasks.artifacts.layout import Layout
from tasks.artifacts.ledger import Ledger
from tasks.artifacts.names import Names
from tasks.artifacts.objects import Objects
from tasks.artifacts.pins import Pins

_log = logging.getLogger("enginehouse.artifacts")


@dataclass(frozen=True, kw_only=True)
class Vault:
    """One open store."""

    layout: Layout
    scratch: Scratch
    objects: Objects
    ledger: Ledger
    names: Names
    pins: Pins
    actor: str
    clock: Callable[[], datetime]
    _warn: Callable[[str], None]
    _said: set[str] = field(default_factory=set)

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        warn: Callable[[str], None] | None = None,
        actor: str | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> Vault:
        """Opens or creates the store at `root`."""
        layout = Layout(root)
        layout.create()
        scratch = Scratch(layout.scratch)
        warn = warn or _log.warning
        return cls(
            layout=layout,
            scratch=scratch,
            objects=Objects(layout, scratch),
            ledger=Ledger(layout, scratch),
            names=Names(layout, scratch),
            pins=Pins(layout, scratch, warn),
            actor=actor or f"{_user()}@{platform.node()}",
            clock=clock or _utc_now,
            _warn=warn,
        )

    def warn(self, message: str) -> None:
        """Says something once."""
        if message not in self._said:
            self._said.add(message)
            self._warn(message)

    def now(self) -> str:
        """The time, as records hold it."""
        return self.clock().isoformat(timespec="microseconds")


def _utc_now() -> datetime:
    return datetime.now(UTC)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's arbitrary user id has no name
        return "unknown"
