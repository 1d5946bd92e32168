"""Pins: what running processes hold in their hands, so that gc leaves it alone, without any lock.

    who uses something:  creates the pin, then waits while a gc runs, then looks whether the thing is there
    gc:                  takes its lease, then reads the pins, then removes what none of them needs

Each writes before it reads, so at least one of the two sees the other: either gc finds the pin, or the user finds
the gc, waits, and then sees what it left. A pin says whose it is; a dead process's pin counts for nothing.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.artifacts.digest import Digest, canonical_json
from tasks.artifacts.durable import Scratch, create, names_in
from tasks.artifacts.layout import Layout
from tasks.artifacts.lease import Contender, last_holder
from tasks.artifacts.owner import Owner

Kind = Literal["record", "content", "commit"]
"""`record`: it and all that it was made of; `content`: the bytes; `commit`: bytes that no record names yet."""

_POLL_S = 0.02
_UNSEEN_PIN_LASTS_S = 24 * 3600.0
"""A pin of a process that cannot be seen (another machine) holds for a day."""
_FILE = re.compile(
    r"(?P<token>[0-9a-f]{32}-\d+-\d+-\d+)\.[0-9a-f]+\.(?P<kind>record|content|commit)-(?P<hex>[0-9a-f]{64})"
)


@dataclass(frozen=True, slots=True)
class Pin:
    """One pin of one process."""

    path: Path
    kind: str
    digest: Digest
    objects: tuple[Digest, ...]
    """For a commit: all that it puts."""
    alive: bool


class Pins:
    """The pins of one process on one store."""

    def __init__(self, layout: Layout, scratch: Scratch, warn: Callable[[str], None]) -> None:
        self._layout = layout
        self._scratch = scratch
        self._warn = warn
        self._mine: set[Path] = set()
        self._lock = threading.Lock()
        self._label = secrets.token_hex(4)  # so that two open stores in one process have pins of their own
        self._at_end = weakref.finalize(self, _remove, self._mine)

    def pin(self, kind: Kind, digest: Digest, objects: Iterable[Digest] = ()) -> None:
        """Pins until `release`. After it returns, what is there stays there, and what is not can be put."""
        path = self._layout.pins / f"{Owner.current().token}.{self._label}.{kind}-{digest.hex}"
        with self._lock:
            if path in self._mine:
                return
            if kind == "commit":
                listed = canonical_json({"format": 1, "objects": sorted(str(o) for o in objects)})
                create(path, listed, self._scratch, durable=False)
            else:
                path.touch()
            self._await_gc()
            self._mine.add(path)

    def release(self) -> None:
        """Lets go of everything that this process pinned through this object."""
        with self._lock:
            _remove(self._mine)

    def _await_gc(self) -> None:
        contender: Contender | None = None
        while (holder := last_holder(self._layout.gc)) is not None:
            if contender is None:
                contender = Contender(self._layout.gc, self._scratch)
                if not contender.gone(holder):
                    self._warn(f"waiting for the store's gc, run by {holder}")
            if contender.gone(holder):
                return
            time.sleep(_POLL_S)


def all_pins(layout: Layout) -> list[Pin]:
    """The pins of all processes, also those of dead ones."""
    pins = []
    for file in names_in(layout.pins):
        match = _FILE.fullmatch(file)
        owner = Owner.from_token(match["token"]) if match else None
        if match is None or owner is None:
            continue
        path = layout.pins / file
        try:
            alive = _lasts(owner, path)
            objects = _objects(path) if match["kind"] == "commit" and alive else ()
        except FileNotFoundError:
            continue  # let go of since it was listed
        pins.append(Pin(path, match["kind"], Digest(match["hex"]), objects, alive))
    return pins


def _lasts(owner: Owner, path: Path) -> bool:
    alive = owner.alive()
    return alive if alive is not None else time.time() - path.stat().st_mtime < _UNSEEN_PIN_LASTS_S


def _objects(path: Path) -> tuple[Digest, ...]:
    return tuple(Digest.parse(text) for text in json.loads(path.read_bytes())["objects"])


def _remove(pins: set[Path]) -> None:
    # A forked child inherits this set, and must not let go of what its parent holds.
    mine = f"{Owner.current().token}."
    while pins:
        path = pins.pop()
        if path.name.startswith(mine):
            path.unlink(missing_ok=True)
