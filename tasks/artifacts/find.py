"""Finding what was built for a key, whole and safe from gc: three small files, and the sizes and times of objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.artifacts.content import Content
from tasks.artifacts.digest import Digest
from tasks.artifacts.graph import corruption
from tasks.artifacts.key import StageKey
from tasks.artifacts.ledger import Lost, Pointer
from tasks.artifacts.objects import Fault
from tasks.artifacts.record import ArtifactRef, BuildRecord
from tasks.artifacts.vault import Vault


@dataclass(frozen=True, slots=True)
class Found:
    """What a key points to."""

    pointer: Pointer
    record: BuildRecord
    content: Content


def find(vault: Vault, key: StageKey, pipeline: str) -> ArtifactRef | None:
    """The artifact built for `key`, named under `pipeline` and pinned, or None; damage is told and makes it None."""
    found = usable(vault, key)
    return None if found is None else vault.names.give(pipeline, key.stage, found.pointer)


def peek(vault: Vault, key: StageKey, pipeline: str) -> ArtifactRef | None:
    """As `find`, but neither pins nor names: the number is 0 where the pipeline has no name for it yet."""
    try:
        pointer = vault.ledger.keyed(key.digest)
        if pointer is None:
            return None
        vault.ledger.record(pointer.record)
        content = vault.ledger.content(pointer.content)
    except Lost:
        return None
    if vault.objects.faults(content):
        return None
    return vault.names.find(pipeline, key.stage, pointer.record) or ArtifactRef(
        pipeline=pipeline, stage=key.stage, number=0, record=pointer.record, content=pointer.content
    )


def usable(vault: Vault, key: StageKey) -> Found | None:
    """What a key points to, when all of it is there and sound; pinned. Says why when it is not."""
    try:
        pointer = vault.ledger.keyed(key.digest)
        if pointer is None:
            return None
        vault.pins.pin("record", pointer.record)
        # Only now: a gc that ran meanwhile may have removed it.
        record = vault.ledger.record(pointer.record)
        content = vault.ledger.content(pointer.content)
    except Lost as lost:
        if lost.fault.kind == "key pointer" or vault.layout.key(key.digest).exists():
            _say(vault, key, [lost.fault])
        return None
    if faults := vault.objects.faults(content):
        _say(vault, key, faults)
        return None
    return Found(pointer, record, content)


def whole(vault: Vault, digest: Digest) -> Content:
    """A content that is there and sound; pinned. Raises ArtifactCorrupt with all that depends on it."""
    vault.pins.pin("content", digest)
    try:
        content = vault.ledger.content(digest)
    except Lost as lost:
        raise corruption(vault, [lost.fault]) from None
    if faults := vault.objects.faults(content):
        raise corruption(vault, faults)
    return content


def _say(vault: Vault, key: StageKey, faults: Sequence[Fault]) -> None:
    error = corruption(vault, faults)
    what = "; ".join(str(fault) for fault in faults)
    needed = f" (needed by {', '.join(error.dependents)})" if error.dependents else ""
    vault.warn(f"{key.stage} is built anew: {what}{needed}")
