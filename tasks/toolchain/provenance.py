"""The provenance.json inside every version folder that we place: what the version is and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.artifacts.digest import Digest
from tasks.artifacts.record import ArtifactRef

FORMAT = 1
"""Written into the file; raised when a reader of the former format would misread it."""

PROVENANCE = "provenance.json"
"""Inside the version's folder: beside it, it would make Triton reload every version of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """An artifact that a version was made from."""

    name: str
    """Such as `digits/engine@3`."""
    content: Digest
    record: Digest

    @classmethod
    def of(cls, ref: ArtifactRef) -> Origin:
        return cls(name=str(ref), content=ref.content, record=ref.record)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Origin:
        return cls(name=value["name"], content=Digest.parse(value["content"]), record=Digest.parse(value["record"]))

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "content": str(self.content), "record": str(self.record)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFile:
    """A file of a version, as it was when the version was placed."""

    path: str
    """Relative to the version's folder, with `/`."""
    size: int
    """In bytes."""
    digest: Digest
    mtime_ns: int
    """While size and time are these, the bytes are taken for the placed ones; else they are hashed again."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PlacedFile:
        digest = Digest.parse(value["digest"])
        return cls(path=value["path"], size=value["size"], digest=digest, mtime_ns=value["mtime_ns"])

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "size": self.size, "digest": str(self.digest), "mtime_ns": self.mtime_ns}


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a version comes from. `Provenance.from_json(p.to_json()) == p`."""

    pipeline: str
    model: str
    version: int
    engine: Origin
    """The version's files are files of its content."""
    config: Origin
    """The config that it was first published with; a later release may serve it with another."""
    files: tuple[PlacedFile, ...]
    """All files of the version, but for this one."""
    created: str
    """ISO 8601, UTC."""
    actor: str
    """user@host."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Provenance:
        """Raises ValueError, TypeError or KeyError where `value` is not what `to_json` gives."""
        if value["format"] != FORMAT:
            raise ValueError(f"its provenance has format {value['format']}, this enginehouse reads {FORMAT}")
        return cls(
            pipeline=value["pipeline"],
            model=value["model"],
            version=value["version"],
            engine=Origin.from_json(value["materials"]["engine"]),
            config=Origin.from_json(value["materials"]["config"]),
            files=tuple(map(PlacedFile.from_json, value["files"])),
            created=value["created"],
            actor=value["actor"],
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "pipeline": self.pipeline,
            "model": self.model,
            "version": self.version,
            "materials": {"engine": self.engine.to_json(), "config": self.config.to_json()},
            "files": [file.to_json() for file in self.files],
            "created": self.created,
            "actor": self.actor,
        }
