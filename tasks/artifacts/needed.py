"""What must stay: everything that something living reaches."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from tasks.artifacts.content import Content
from tasks.artifacts.digest import Digest
from tasks.artifacts.graph import Graph
from tasks.artifacts.layout import digests_in
from tasks.artifacts.lease import Contender, last_holder
from tasks.artifacts.ledger import Lost
from tasks.artifacts.pins import all_pins
from tasks.artifacts.record import RELEASE_STAGE, ArtifactRef
from tasks.artifacts.vault import Vault
from tasks.errors import ArtifactCorrupt


@dataclass(kw_only=True)
class Needed:
    """What a gc keeps."""

    records: set[Digest] = field(default_factory=set)
    contents: set[Digest] = field(default_factory=set)
    objects: set[Digest] = field(default_factory=set)
    retiring: tuple[ArtifactRef, ...] = ()
    """The names of what is not kept."""


def needed(vault: Vault, graph: Graph, keep: int) -> Needed:
    """What aliases, releases, the `keep` last of each stage, pins and live claims need, with all its materials."""
    kept = Needed()
    promised = {ref.record for ref in graph.aliases.values()}
    retired = {n.ref.record for n in graph.names if n.retired is not None}
    retired -= {n.ref.record for n in graph.names if n.retired is None}
    promised |= {i for i, record in graph.records.items() if record.stage == RELEASE_STAGE and i not in retired}
    # Those whose record is lost are known by their names only.
    promised |= {n.ref.record for n in graph.names if n.retired is None and n.ref.stage == RELEASE_STAGE}
    _reach(graph, kept, promised)
    _insist(graph, kept, promised)
    for ref in graph.aliases.values():
        kept.contents.add(ref.content)
    _reach(graph, kept, _latest(graph, keep))
    _reach(graph, kept, _unnamed(vault, graph))
    _keep_pinned(vault, graph, kept)
    _keep_claimed(vault, graph, kept)
    for digest in kept.contents:
        content = _content(vault, graph, digest)
        if content is not None:
            kept.objects.update(entry.digest for entry in content.files)
    for digest in kept.records:
        if digest in graph.records:
            kept.objects.update(graph.records[digest].byproducts.values())
    kept.retiring = tuple(
        name.ref for name in graph.names if name.retired is None and name.ref.record not in kept.records
    )
    return kept


def _reach(graph: Graph, kept: Needed, roots: Iterable[Digest]) -> None:
    pending = list(roots)
    while pending:
        digest = pending.pop()
        record = graph.records.get(digest)
        if digest in kept.records or record is None:
            continue
        kept.records.add(digest)
        kept.contents.add(record.content)
        for material in record.materials.values():
            kept.contents.add(material.content)
            pending.append(material.record)


def _insist(graph: Graph, kept: Needed, promised: set[Digest]) -> None:
    """Nothing is removed while it cannot be known what a release or an alias needs."""
    wanted = promised | {m.record for d in kept.records for m in graph.records[d].materials.values()}
    lost = [fault for fault in graph.faults if fault.subject in wanted | kept.contents or fault.kind == "alias"]
    if lost:
        lines = "\n".join(str(fault) for fault in lost)
        dependents = sorted({name for fault in lost for name in graph.dependents(fault)})
        raise ArtifactCorrupt(
            f"{lines}\nnothing was removed, because it cannot be known what depends on it; "
            "build it anew, restore it from a backup, or give up the alias or release that needs it",
            dependents=dependents,
        )


def _latest(graph: Graph, keep: int) -> list[Digest]:
    stages: dict[tuple[str, str], list[Digest]] = {}
    for name in graph.names:  # in the order of their numbers
        if name.retired is None and name.ref.record in graph.records:
            stages.setdefault((name.ref.pipeline, name.ref.stage), []).append(name.ref.record)
    return [record for records in stages.values() for record in records[-keep:]]


def _unnamed(vault: Vault, graph: Graph) -> list[Digest]:
    """The records whose commit ended between the key's pointer and the name: the next lookup names them."""
    named = {name.ref.record for name in graph.names}
    found = []
    for digest, record in graph.records.items():
        if digest not in named and record.key is not None:
            try:
                pointer = vault.ledger.keyed(record.key.digest)
            except Lost:
                continue
            if pointer is not None and pointer.record == digest:
                found.append(digest)
    return found


def _keep_pinned(vault: Vault, graph: Graph, kept: Needed) -> None:
    for pin in all_pins(vault.layout):
        if not pin.alive:
            continue
        if pin.kind == "record":
            _reach(graph, kept, [pin.digest])
            kept.records.add(pin.digest)  # also one that is being written at this moment
        else:
            kept.contents.add(pin.digest)
            kept.objects.update(pin.objects)


def _keep_claimed(vault: Vault, graph: Graph, kept: Needed) -> None:
    for key in digests_in(vault.layout.claims):
        folder = vault.layout.claim(key)
        holder = last_holder(folder)
        if holder is None or Contender(folder, vault.scratch).gone(holder):
            continue
        try:
            pointer = vault.ledger.keyed(key)
        except Lost:
            pointer = None
        if pointer is not None:
            _reach(graph, kept, [pointer.record])
        try:
            materials = json.loads((folder / "key.json").read_bytes())["materials"]
        except FileNotFoundError:
            continue  # it has its lease only just now; what it goes on to use it pins, and waits for this gc to end
        kept.contents.update(Digest.parse(text) for text in materials.values())


def _content(vault: Vault, graph: Graph, digest: Digest) -> Content | None:
    if digest in graph.contents:
        return graph.contents[digest]
    try:
        return vault.ledger.content(digest)
    except Lost:
        return None
