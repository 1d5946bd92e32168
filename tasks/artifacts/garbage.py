"""What nothing needs any more, and its removal; safe while others build (see pins.py for why).

Kept, with all that it was made of: what an alias or a release names, the last records of each pipeline and stage,
what a running process has in its hands, and what a live claim is about.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from tasks.artifacts.claim import clear
from tasks.artifacts.digest import Digest
from tasks.artifacts.durable import remove_tree
from tasks.artifacts.graph import Graph
from tasks.artifacts.layout import digests_in
from tasks.artifacts.lease import Contender, Lease, last_holder
from tasks.artifacts.ledger import Lost
from tasks.artifacts.needed import Needed, needed
from tasks.artifacts.owner import Owner
from tasks.artifacts.pins import all_pins
from tasks.artifacts.record import ArtifactRef
from tasks.artifacts.vault import Vault
from tasks.errors import Refused

_UNSEEN_SCRATCH_LASTS_S = 24 * 3600.0
"""A temporary file of a process that cannot be seen (another machine) is left over after a day without a write."""
_DATA_DIGEST_LASTS_S = 90 * 24 * 3600.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """What a gc removes, or would remove."""

    names: tuple[ArtifactRef, ...]
    """They stand for nothing afterwards; their numbers stay taken."""
    records: tuple[Digest, ...]
    contents: tuple[Digest, ...]
    objects: tuple[Digest, ...]
    works: tuple[Path, ...]
    """Working folders of keys that are built, or that nobody has worked on for long."""
    leftovers: tuple[Path, ...]
    """What dead processes left, damaged bytes in quarantine, folders of links, old digests of data."""
    bytes: int
    """Of the objects, working folders and leftovers."""

    def __bool__(self) -> bool:
        return any((self.names, self.records, self.contents, self.objects, self.works, self.leftovers))


def collect(vault: Vault, *, dry_run: bool, keep: int, abandoned_after: timedelta) -> Garbage:
    """Removes the garbage, or with `dry_run` only says what it is. Raises Refused while another gc runs.

    Raises ArtifactCorrupt, and removes nothing, when the record or the content list of something that a release or
    an alias needs is lost: then it cannot be known what else they need.
    """
    if keep < 1:
        raise ValueError("keep is 1 or more: the last number of each stage must stay, or it would be given again")
    if dry_run:
        return _garbage(vault, needed(vault, Graph.read(vault), keep), abandoned_after)
    lease = Contender(vault.layout.gc, vault.scratch).attempt()
    if not isinstance(lease, Lease):
        raise Refused(f"another gc is at work: {lease}\nlet it end, then run again if need be")
    try:
        garbage = _garbage(vault, needed(vault, Graph.read(vault), keep), abandoned_after)
        _sweep(vault, garbage, lease)
    finally:
        lease.remove()
    return garbage


def _garbage(vault: Vault, keep: Needed, abandoned_after: timedelta) -> Garbage:
    layout = vault.layout
    objects = tuple(d for d in digests_in(layout.objects) if d not in keep.objects)
    works = tuple(_works(vault, abandoned_after))
    leftovers = tuple(_leftovers(vault))
    trees = tuple(layout.tree(d) for d in digests_in(layout.trees) if d not in keep.contents)
    size = sum(_size(layout.object(d)) for d in objects) + sum(map(_size, works)) + sum(map(_size, leftovers))
    return Garbage(
        names=keep.retiring,
        records=tuple(d for d in digests_in(layout.records, ".json") if d not in keep.records),
        contents=tuple(d for d in digests_in(layout.contents, ".json") if d not in keep.contents),
        objects=objects,
        works=works,
        leftovers=leftovers + trees,  # the links of a tree hold no bytes of their own
        bytes=size,
    )


def _sweep(vault: Vault, garbage: Garbage, lease: Lease) -> None:
    """In the reverse of the order in which a commit writes, so that nothing ever points to what is gone."""
    layout = vault.layout
    for digest in _while_held(lease, garbage.records):
        _forget_key(vault, digest)
    when = vault.now()
    for ref in _while_held(lease, garbage.names):
        vault.names.retire(ref, when)
    for digest in _while_held(lease, garbage.records):
        layout.record(digest).unlink(missing_ok=True)
    for path in _while_held(lease, garbage.leftovers):
        _remove(path)
    for digest in _while_held(lease, garbage.contents):
        layout.content(digest).unlink(missing_ok=True)
    for digest in _while_held(lease, garbage.objects):
        layout.object(digest).unlink(missing_ok=True)
    for work in _while_held(lease, garbage.works):
        claim = Contender(work, vault.scratch).attempt()
        if isinstance(claim, Lease):  # otherwise someone goes on with it since it was looked at
            clear(claim)


def _while_held(lease: Lease, items: Iterable[T]) -> Iterator[T]:
    for item in items:
        if not lease.held():
            raise Refused("another gc took over, because this one seemed dead; what is left is for that one")
        yield item


def _forget_key(vault: Vault, record: Digest) -> None:
    try:
        key = vault.ledger.record(record).key
        pointer = None if key is None else vault.ledger.keyed(key.digest)
    except Lost:
        return  # the pointer of a record that cannot be read leads nowhere, and a lookup misses
    if key is not None and pointer is not None and pointer.record == record:
        vault.ledger.forget_key(key.digest)


def _works(vault: Vault, abandoned_after: timedelta) -> Iterator[Path]:
    for key in digests_in(vault.layout.claims):
        folder = vault.layout.claim(key)
        holder = last_holder(folder)
        if holder is not None and not Contender(folder, vault.scratch).gone(holder):
            continue
        try:
            touched = folder.stat().st_mtime if holder is None else holder.renewed_ns / 1e9
        except FileNotFoundError:
            continue  # it has just been committed
        try:
            built = vault.ledger.keyed(key) is not None
        except Lost:
            built = False
        if built or time.time() - touched > abandoned_after.total_seconds():
            yield folder


def _leftovers(vault: Vault) -> Iterator[Path]:
    layout = vault.layout
    for path in sorted(layout.scratch.iterdir()):
        owner = Owner.from_token(path.name.partition(".")[0])
        if owner is None or not _writing(owner, path):
            yield path
    yield from (pin.path for pin in all_pins(layout) if not pin.alive)
    yield from sorted(layout.quarantine.iterdir())
    for digest in digests_in(layout.data_digests, ".json"):
        path = layout.data_digest(digest)
        with suppress(FileNotFoundError):  # replaced or removed by another
            if time.time() - path.stat().st_mtime > _DATA_DIGEST_LASTS_S:
                yield path


def _writing(owner: Owner, path: Path) -> bool:
    alive = owner.alive()
    try:
        return alive if alive is not None else time.time() - path.stat().st_mtime < _UNSEEN_SCRATCH_LASTS_S
    except FileNotFoundError:
        return True  # it has just been put to its place


def _remove(path: Path) -> None:
    if path.is_dir():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_dir():
        return sum(_size(Path(folder, name)) for folder, _, names in os.walk(path) for name in names)
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
