"""What an artifact was made of, up to the first materials, and what was made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.artifacts.digest import Digest
from tasks.artifacts.graph import Graph
from tasks.artifacts.record import ArtifactRef, BuildRecord


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """One build in a tree of builds. The root has both directions, every other node goes on in its own."""

    names: tuple[str, ...]
    """What it is called, in the pipeline of the question first; empty when gc removed it or it was never named."""
    record_id: Digest
    content: Digest
    record: BuildRecord | None
    """None when gc removed it or it is lost."""
    materials: Mapping[str, Lineage] = field(default_factory=dict)
    """By role."""
    dependents: tuple[Lineage, ...] = ()

    @property
    def label(self) -> str:
        """One short text for people."""
        if self.names:
            return self.names[0]
        return f"{self.record.stage if self.record else 'removed'} {self.record_id.short}"

    def to_json(self) -> dict[str, Any]:
        """For machines; the records themselves are left out."""
        return {
            "names": list(self.names),
            "record": str(self.record_id),
            "content": str(self.content),
            "stage": self.record.stage if self.record else None,
            "materials": {role: node.to_json() for role, node in self.materials.items()},
            "dependents": [node.to_json() for node in self.dependents],
        }


def lineage(graph: Graph, ref: ArtifactRef) -> Lineage:
    """The tree around `ref`."""
    return Lineage(
        names=_names(graph, ref.record, ref.pipeline),
        record_id=ref.record,
        content=ref.content,
        record=graph.records.get(ref.record),
        materials=_materials(graph, ref.record, ref.pipeline),
        dependents=_dependents(graph, ref.record, ref.pipeline),
    )


def _materials(graph: Graph, record: Digest, pipeline: str) -> dict[str, Lineage]:
    found = graph.records.get(record)
    if found is None:
        return {}
    return {
        role: Lineage(
            names=_names(graph, material.record, pipeline),
            record_id=material.record,
            content=material.content,
            record=graph.records.get(material.record),
            materials=_materials(graph, material.record, pipeline),
        )
        for role, material in sorted(found.materials.items())
    }


def _dependents(graph: Graph, record: Digest, pipeline: str) -> tuple[Lineage, ...]:
    nodes = [
        Lineage(
            names=_names(graph, digest, pipeline),
            record_id=digest,
            content=found.content,
            record=found,
            dependents=_dependents(graph, digest, pipeline),
        )
        for digest, found in graph.records.items()
        if any(material.record == record for material in found.materials.values())
    ]
    return tuple(sorted(nodes, key=lambda node: node.label))


def _names(graph: Graph, record: Digest, pipeline: str) -> tuple[str, ...]:
    return tuple(sorted(graph.called(record), key=lambda name: not name.startswith(f"{pipeline}/")))
