"""The build record: how a content came to be. in-toto's words: materials, product, byproducts, environment.

BuildRecord.from_json(r.to_json()) == r, and the two have the same id
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tasks.artifacts.digest import JSON, Digest, canonical_json, plain
from tasks.artifacts.key import StageKey
from tasks.errors import StoreUnusable

RECORD_FORMAT = 1
RELEASE_STAGE = "release"
"""The stage name of the records that say what was published; gc keeps them and all that they were made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRef:
    """A named artifact: what stages hand to each other. `str(ref)` is `pipeline/stage@number`."""

    pipeline: str
    stage: str
    number: int
    """Counts from 1 for each pipeline and stage; never given twice."""
    record: Digest
    """The build record's id."""
    content: Digest

    def __str__(self) -> str:
        return f"{self.pipeline}/{self.stage}@{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a build read: the bytes, and the build that they came from."""

    content: Digest
    record: Digest

    @classmethod
    def of(cls, ref: ArtifactRef) -> Material:
        """The material that an artifact is to the builds that read it."""
        return cls(content=ref.content, record=ref.record)


@dataclass(frozen=True, kw_only=True)
class BuildRecord:
    """How one content came to be. Immutable; several records may have the same content."""

    pipeline: str
    """The pipeline that built it first; others may have names of their own for it."""
    stage: str
    key: StageKey | None
    """What was asked; None for what is no keyed build, such as a release."""
    content: Digest
    materials: Mapping[str, Material] = field(default_factory=dict)
    """By role, such as `train`."""
    environment: Mapping[str, JSON] = field(default_factory=dict)
    """Where it was built: versions, devices, what is worth knowing and not only what is keyed."""
    commands: tuple[tuple[str, ...], ...] = ()
    """The argument lists of the programs that ran, in order."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, JSON] = field(default_factory=dict)
    """What the stage has to say; free JSON."""
    byproducts: Mapping[str, Digest] = field(default_factory=dict)
    """Logs and the like, by name: kept with the record, no part of the content."""
    started: str
    """ISO 8601 in UTC, such as `2025-01-31T12:00:00.000000+00:00`."""
    finished: str
    actor: str
    """Who built it: `user@host`."""

    def __post_init__(self) -> None:
        for name in ("materials", "byproducts"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        for name in ("environment", "metrics", "details"):
            object.__setattr__(self, name, plain(getattr(self, name), name))

    @cached_property
    def id(self) -> Digest:
        """What names the record: the digest of `to_json()` as canonical JSON."""
        return Digest.of(self.to_bytes())

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BuildRecord) and self.id == other.id

    def to_json(self) -> dict[str, Any]:
        """The whole record with its format version; not its id, which is derived from this."""
        return {
            "format": RECORD_FORMAT,
            "pipeline": self.pipeline,
            "stage": self.stage,
            "key": None if self.key is None else self.key.to_json(),
            "content": str(self.content),
            "materials": {
                name: {"content": str(material.content), "record": str(material.record)}
                for name, material in self.materials.items()
            },
            "environment": self.environment,
            "commands": [list(command) for command in self.commands],
            "metrics": self.metrics,
            "details": self.details,
            "byproducts": {name: str(digest) for name, digest in self.byproducts.items()},
            "started": self.started,
            "finished": self.finished,
            "actor": self.actor,
        }

    def to_bytes(self) -> bytes:
        """What is stored: the canonical JSON."""
        return canonical_json(self.to_json())

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BuildRecord:
        """The inverse of `to_json`. Raises StoreUnusable for another format, ValueError or KeyError for nonsense."""
        if value["format"] != RECORD_FORMAT:
            raise StoreUnusable(
                f"a build record has format {value['format']}, this version of enginehouse reads {RECORD_FORMAT}\n"
                "install the version of enginehouse that wrote the store, or a newer one"
            )
        return cls(
            pipeline=value["pipeline"],
            stage=value["stage"],
            key=None if value["key"] is None else StageKey.from_json(value["key"]),
            content=Digest.parse(value["content"]),
            materials={
                name: Material(content=Digest.parse(m["content"]), record=Digest.parse(m["record"]))
                for name, m in value["materials"].items()
            },
            environment=value["environment"],
            commands=tuple(tuple(command) for command in value["commands"]),
            metrics=value["metrics"],
            details=value["details"],
            byproducts={name: Digest.parse(text) for name, text in value["byproducts"].items()},
            started=value["started"],
            finished=value["finished"],
            actor=value["actor"],
        )
