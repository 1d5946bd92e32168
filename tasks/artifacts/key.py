"""The stage key: what was asked of a stage. Equal keys mean that the product that exists can be reused.

StageKey.from_json(k.to_json()) == k
differences(old, new) == []   exactly when   old.digest == new.digest
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tasks.artifacts.digest import JSON, Digest, canonical_json, digest_of, plain
from tasks.errors import StoreUnusable

KEY_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class StageKey:
    """Everything that decides a stage's product, and nothing else (no paths, no placement, no timeouts)."""

    stage: str
    """The stage's name, such as `export`."""
    version: int
    """Raised when equal inputs must give a new product."""
    materials: Mapping[str, Digest] = field(default_factory=dict)
    """Content digests of the artifacts that the stage reads, by their role, such as `train`."""
    config: JSON = field(default_factory=dict)
    """The part of the configuration that changes the product."""
    code: JSON = field(default_factory=dict)
    """The recipe's code: digests by file and versions by distribution."""
    data: JSON = field(default_factory=dict)
    """The data sets' identities."""
    environment: JSON = field(default_factory=dict)
    """The declared execution environment, such as torch's version and build."""

    def __post_init__(self) -> None:
        # Deep copies: a key must not change with the dictionaries that it was made of.
        object.__setattr__(self, "materials", dict(self.materials))
        for name in ("config", "code", "data", "environment"):
            object.__setattr__(self, name, plain(getattr(self, name), name))

    @cached_property
    def digest(self) -> Digest:
        """What names the key: the digest of `to_json()` as canonical JSON."""
        return digest_of(self.to_json())

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StageKey) and self.digest == other.digest

    def to_json(self) -> dict[str, Any]:
        """The whole key with its format version."""
        return {
            "format": KEY_FORMAT,
            "stage": self.stage,
            "version": self.version,
            "materials": {name: str(digest) for name, digest in self.materials.items()},
            "config": self.config,
            "code": self.code,
            "data": self.data,
            "environment": self.environment,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StageKey:
        """The inverse of `to_json`. Raises StoreUnusable for another format, ValueError or KeyError for nonsense."""
        if value["format"] != KEY_FORMAT:
            raise StoreUnusable(
                f"a stage key has format {value['format']}, this version of enginehouse reads {KEY_FORMAT}\n"
                "install the version of enginehouse that wrote the store, or a newer one"
            )
        return cls(
            stage=value["stage"],
            version=value["version"],
            materials={name: Digest.parse(text) for name, text in value["materials"].items()},
            config=value["config"],
            code=value["code"],
            data=value["data"],
            environment=value["environment"],
        )


def differences(old: StageKey, new: StageKey) -> list[str]:
    """What changed between two keys, a line for each part, in the key's own order.

    Such as `config.max_epochs: 20 -> 30`, `code.recipe.py changed`, `materials.train changed`,
    `environment.cuda: added "12.8"`. Values that are digests are not shown: they say nothing to a person.
    """
    before, after = old.to_json(), new.to_json()
    lines: list[str] = []
    for part in ("stage", "version", "materials", "config", "code", "data", "environment"):
        name = "stage version" if part == "version" else part
        lines.extend(_changes(name, before[part], after[part]))
    return lines


_ABSENT = object()


def _changes(name: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _changes(f"{name}.{key}", old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif old is _ABSENT:
        yield f"{name}: added" + ("" if _is_digest(new) else f" {_shown(new)}")
    elif new is _ABSENT:
        yield f"{name}: removed" + ("" if _is_digest(old) else f" {_shown(old)}")
    elif canonical_json(old) != canonical_json(new):  # 1, 1.0 and True are equal in Python and different here
        yield f"{name} changed" if _is_digest(old) or _is_digest(new) else f"{name}: {_shown(old)} -> {_shown(new)}"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("sha256:")


def _shown(value: Any) -> str:
    text = canonical_json(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."
