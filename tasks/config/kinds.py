"""The groups whose fields depend on their `kind`, found through entry points: a new kind is a new module elsewhere.

An entry point of the group `enginehouse.engines` or `enginehouse.deploy_targets` is named like its kind and loads a
class whose attribute `Config` is the subclass of `EngineConfig` or `DeployConfig` with that kind's fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from tasks.config.fields import Keyed, Settings
from tasks.config.yaml_text import Place

if TYPE_CHECKING:
    from tasks.config.pipeline import Pipeline

ENGINES = "enginehouse.engines"
DEPLOY_TARGETS = "enginehouse.deploy_targets"


class EngineConfig(Settings):
    """What turns the ONNX model into the file that is served."""

    kind: Keyed[str]
    """Which engine."""

    def contradictions(self, pipeline: Pipeline) -> Iterator[tuple[Place, str]]:  # noqa: ARG002 - for other kinds
        """Fields that do not fit each other or the rest of the file: the place below `engine`, and what is wrong."""
        yield from ()


class DeployConfig(Settings):
    """Where the model is served."""

    kind: Keyed[str]
    """Which deploy target."""


C = TypeVar("C", EngineConfig, DeployConfig)


class UnknownKindError(LookupError):
    """No installed distribution brings the kind, or it cannot be loaded."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.hint = hint
        super().__init__(message)


def kinds(group: str) -> tuple[str, ...]:
    """The names of the kinds that are installed, sorted."""
    return tuple(sorted({entry.name for entry in metadata.entry_points(group=group)}))


def load_kind(group: str, kind: str) -> Any:
    """The class that the entry point loads: the engine or deploy target itself. `UnknownKindError` if there is none."""
    found = {entry.value: entry for entry in metadata.entry_points(group=group, name=kind)}
    if not found:
        known = kinds(group)
        near = difflib.get_close_matches(kind, known, n=1, cutoff=0.5)
        raise UnknownKindError(
            f"there is no kind {kind!r}, expected {' or '.join(known) or 'none: none is installed'}",
            f"did you mean {near[0]}?" if near else None,
        )
    if len(found) > 1:
        raise UnknownKindError(
            f"kind {kind!r} is claimed by several installed distributions: {', '.join(sorted(found))}"
        )
    (entry,) = found.values()
    try:
        return entry.load()
    except ImportError as error:
        raise UnknownKindError(f"kind {kind!r} ({entry.value}) is installed but cannot be imported: {error}") from error


def of_kind(group: str, base: type[C]) -> Callable[[Any], C]:
    """A validator that turns a mapping with `kind` into that kind's `Config`.

    The problems of the inner model travel in the error's context, for `tasks.pipeline_file` to show each at its line.
    """

    def validate(value: Any) -> C:
        if isinstance(value, base):
            return value
        if not isinstance(value, Mapping):
            raise PydanticCustomError("model_type", "expected a mapping with kind")
        kind = value.get("kind")
        if not isinstance(kind, str):
            message = f"expected the kind: {' or '.join(kinds(group))}"
            raise nested(base, [_wrong_kind(message)])
        try:
            config: type[C] = load_kind(group, kind).Config
        except UnknownKindError as error:
            raise nested(base, [_wrong_kind(str(error), error.hint)]) from error
        try:
            return config.model_validate(dict(value))
        except ValidationError as error:
            raise nested(config, error.errors(include_url=False)) from error

    return validate


def _wrong_kind(message: str, hint: str | None = None) -> dict[str, Any]:
    return {"type": "stated", "loc": ("kind",), "msg": message, "ctx": {"hint": hint}}


def nested(model: type[Settings], errors: Any) -> PydanticCustomError:
    """One pydantic error that carries others; `errors` as of `ValidationError.errors()`, places relative to `model`."""
    text = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in errors)
    return PydanticCustomError("nested", "{text}", {"text": text, "errors": errors, "model": model})
