"""Reads every stored byte again, and says what is not what was stored and who needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tasks.artifacts.digest import Digest
from tasks.artifacts.graph import Graph
from tasks.artifacts.layout import digests_in
from tasks.artifacts.ledger import Lost
from tasks.artifacts.objects import Fault
from tasks.artifacts.record import ArtifactRef
from tasks.artifacts.vault import Vault

Progress = Callable[[int, int], None]
"""Told the bytes read so far and the bytes to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt:
    """One thing that is damaged or missing."""

    what: str
    """Such as `object sha256:…`."""
    problem: str
    """Such as `is missing`."""
    dependents: tuple[str, ...]
    """The artifacts, releases and aliases that need it, such as `digits/engine@3` and `digits@champion`."""

    def __str__(self) -> str:
        needed = f" (needed by {', '.join(self.dependents)})" if self.dependents else ""
        return f"{self.what} {self.problem}{needed}"


def verify(vault: Vault, refs: Iterable[ArtifactRef] | None, on_progress: Progress | None) -> tuple[Corrupt, ...]:
    """Checks the whole store, or what `refs` consist of. Damaged objects are put aside, so that a run builds them."""
    graph = Graph.read(vault)
    if refs is None:
        sizes = {entry.digest: entry.size for content in graph.contents.values() for entry in content.files}
        objects: dict[Digest, int | None] = dict.fromkeys(digests_in(vault.layout.objects)) | sizes
        faults = [*graph.faults, *_pointer_faults(vault)]
    else:
        objects, faults = _of(vault, refs)
    faults += _object_faults(vault, objects, on_progress)
    if faults:
        graph = Graph.read(vault)  # what was removed by a gc since is no damage
    return tuple(_corrupt(graph, fault) for fault in faults if _matters(vault, graph, fault))


def _of(vault: Vault, refs: Iterable[ArtifactRef]) -> tuple[dict[Digest, int | None], list[Fault]]:
    objects: dict[Digest, int | None] = {}
    faults = []
    for ref in refs:
        for read, digest in ((vault.ledger.record, ref.record), (vault.ledger.content, ref.content)):
            try:
                read(digest)
            except Lost as lost:
                faults.append(lost.fault)
            else:
                if digest == ref.content:
                    objects |= {entry.digest: entry.size for entry in vault.ledger.content(digest).files}
    return objects, faults


def _object_faults(vault: Vault, objects: dict[Digest, int | None], on_progress: Progress | None) -> list[Fault]:
    there = {}
    for digest in objects:
        path = vault.layout.object(digest)
        there[digest] = path.stat().st_size if path.exists() else 0
    total, done = sum(there.values()), 0
    faults = []
    for digest, size in sorted(objects.items()):
        if (fault := vault.objects.fault(digest, size, thorough=True)) is not None:
            faults.append(fault)
        done += there[digest]
        if on_progress is not None:
            on_progress(done, total)
    return faults


def _pointer_faults(vault: Vault) -> list[Fault]:
    faults = []
    for key in digests_in(vault.layout.keys, ".json"):
        try:
            vault.ledger.keyed(key)
        except Lost as lost:
            faults.append(lost.fault)
    return faults


def _matters(vault: Vault, graph: Graph, fault: Fault) -> bool:
    if fault.problem != "is missing" or not isinstance(fault.subject, Digest):
        return True
    match fault.kind:
        case "object":
            needed = any(entry.digest == fault.subject for c in graph.contents.values() for entry in c.files)
            return needed and not vault.layout.object(fault.subject).exists()
        case "content list":
            return any(record.content == fault.subject for record in graph.records.values())
        case _:
            return any(fault == other for other in graph.faults)


def _corrupt(graph: Graph, fault: Fault) -> Corrupt:
    dependents = graph.dependents(fault)
    if not dependents and isinstance(fault.subject, Digest) and (of := graph.with_byproduct(fault.subject)):
        return Corrupt(what=fault.what, problem=f"{fault.problem}; a byproduct of {', '.join(of)}", dependents=())
    return Corrupt(what=fault.what, problem=fault.problem, dependents=dependents)
