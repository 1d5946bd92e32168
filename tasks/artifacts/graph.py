"""All records, names and aliases of a store at once, and the questions that need them all: what depends on what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tasks.artifacts.content import Content
from tasks.artifacts.digest import Digest
from tasks.artifacts.layout import digests_in
from tasks.artifacts.ledger import Lost
from tasks.artifacts.names import Name
from tasks.artifacts.objects import Fault
from tasks.artifacts.record import ArtifactRef, BuildRecord
from tasks.artifacts.vault import Vault
from tasks.errors import ArtifactCorrupt


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A store's documents, as they were read."""

    records: Mapping[Digest, BuildRecord]
    names: tuple[Name, ...]
    """Also the retired ones."""
    aliases: Mapping[str, ArtifactRef]
    """By `pipeline@alias`."""
    contents: Mapping[Digest, Content]
    """The content lists that the records need."""
    faults: tuple[Fault, ...]
    """What could not be read, or is missing though something names it."""

    @classmethod
    def read(cls, vault: Vault) -> Graph:
        """Reads it all; damage is kept in `faults`."""
        names, faults = vault.names.all()
        aliases, alias_faults = vault.names.all_aliases()
        faults += alias_faults
        records: dict[Digest, BuildRecord] = {}
        # The named ones too, so that a missing one is noticed.
        named = {name.ref.record for name in names if name.retired is None}
        named |= {ref.record for ref in aliases.values()}
        for digest in sorted(named.union(digests_in(vault.layout.records, ".json"))):
            try:
                records[digest] = vault.ledger.record(digest)
            except Lost as lost:
                faults.append(lost.fault)
        contents: dict[Digest, Content] = {}
        for digest in sorted({record.content for record in records.values()}):
            try:
                contents[digest] = vault.ledger.content(digest)
            except Lost as lost:
                faults.append(lost.fault)
        return cls(records=records, names=tuple(names), aliases=aliases, contents=contents, faults=tuple(faults))

    def dependents(self, fault: Fault) -> tuple[str, ...]:
        """The names and aliases of all that cannot be had, or not be made again, because of a fault; sorted."""
        subject = fault.subject
        if not isinstance(subject, Digest):
            return ()
        match fault.kind:
            case "object":
                holding, direct = {c for c, content in self.contents.items() if _holds(content, subject)}, set[Digest]()
            case "content list":
                holding, direct = {subject}, set[Digest]()
            case "build record":
                holding, direct = set[Digest](), {subject}
            case _:
                return ()
        return tuple(sorted(self._called(self._downstream(holding, direct), holding)))

    def with_byproduct(self, digest: Digest) -> tuple[str, ...]:
        """The names of the records that have a byproduct; they do not depend on it."""
        return tuple(
            name for i, r in self.records.items() if digest in r.byproducts.values() for name in self.called(i)
        )

    def called(self, record: Digest) -> tuple[str, ...]:
        """The names of a record that are not retired, in order."""
        return tuple(str(name.ref) for name in self.names if name.ref.record == record and name.retired is None)

    def _downstream(self, contents: set[Digest], records: set[Digest]) -> set[Digest]:
        """The records that have one of the contents, are one of the records, or were made from such, at any remove."""
        found = set(records)
        grown = True
        while grown:
            grown = False
            for digest, record in self.records.items():
                if digest in found:
                    continue
                made_from = any(m.content in contents or m.record in found for m in record.materials.values())
                if record.content in contents or made_from:
                    found.add(digest)
                    grown = True
        return found

    def _called(self, records: set[Digest], contents: set[Digest]) -> Iterable[str]:
        for name in self.names:
            if name.retired is None and (name.ref.record in records or name.ref.content in contents):
                yield str(name.ref)
        for alias, ref in self.aliases.items():
            if ref.record in records or ref.content in contents:
                yield alias


def corruption(vault: Vault, faults: Iterable[Fault]) -> ArtifactCorrupt:
    """The error for damage that was found, with all that depends on it."""
    found = list(faults)
    graph = Graph.read(vault)
    dependents = sorted({name for fault in found for name in graph.dependents(fault)})
    lines = "\n".join(f"{fault.what} {fault.problem}" for fault in found)
    return ArtifactCorrupt(f"{lines}\nrun the pipeline again: what is missing is built anew", dependents=dependents)


def _holds(content: Content, digest: Digest) -> bool:
    return any(entry.digest == digest for entry in content.files)
