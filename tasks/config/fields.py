"""What every group of fields shares: strict, frozen, no unknown names, and each field marked as keyed or placement."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict

T = TypeVar("T")


class Role(Enum):
    """Whether a field changes a stage's product."""

    KEYED = "keyed"
    """A part of the stage's key: another value gives another product."""
    PLACEMENT = "placement"
    """Where and how patiently the work is done; another value reuses what is built."""


Keyed = Annotated[T, Role.KEYED]
Placement = Annotated[T, Role.PLACEMENT]
Listed = Annotated[tuple[T, ...], Strict(False)]
"""A YAML list, kept as a tuple. Strict pydantic takes no list for a tuple; the items stay strict."""

PositiveInt = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Settings(BaseModel):
    """A group of fields of the pipeline file.

    Each field has a role, but for those that hold a group: its fields have theirs. No role counts as keyed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def role(group: type[Settings], field: str) -> Role | None:
    """The role of a field, `None` where none is given: the field holds a group of fields, or counts as keyed."""
    return next((m for m in group.model_fields[field].metadata if isinstance(m, Role)), None)


def keyed(group: Settings) -> dict[str, Any]:
    """The part of a group that belongs into a stage's key, as JSON; defaults are written out.

    Law: two groups that differ in placement fields only give equal results.
    """
    kept = (f for f in type(group).model_fields if role(type(group), f) is not Role.PLACEMENT)
    return {field: as_json(getattr(group, field)) for field in kept}


def as_json(value: object) -> Any:
    """A field's value as JSON; of groups inside it, the keyed part."""
    if isinstance(value, Settings):
        return keyed(value)
    if isinstance(value, Mapping):
        return {name: as_json(v) for name, v in value.items()}
    if isinstance(value, tuple):
        return [as_json(v) for v in value]
    return value
