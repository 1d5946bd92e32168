"""Engine kinds: what a server runs the model with. One module per kind, found by `engine.kind` through entry points.

A kind is a class with the attributes of `EngineKind`, named in the entry point group `enginehouse.engines`; nothing
else has to know of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, cast

from tasks.config import ENGINES, EngineConfig, Pipeline, load_kind
from tasks.stage import KeyParts, Site, Step


class EngineKind(Protocol):
    """What a kind of engine provides."""

    Config: ClassVar[type[EngineConfig]]
    """The fields of the pipeline file's `engine`."""
    platform: ClassVar[str]
    """Triton's `platform` for it."""
    model_file: ClassVar[str]
    """The file's name in a version folder, as Triton's backend expects it."""
    reproducible: ClassVar[bool]

    @staticmethod
    def check(pipeline: Pipeline) -> None:
        """Raise `ToolMissing` or `ConfigError` when this engine cannot be built; called before anything is."""

    @staticmethod
    def parts(pipeline: Pipeline) -> KeyParts:
        """What the engine's key holds beside the exported graph."""

    @staticmethod
    def steps(site: Site) -> tuple[Step, ...]:
        """The child processes that build it."""

    @staticmethod
    def collect(site: Site) -> None:
        """Leave `model_file`, what belongs to it, and `signature.json` in `site.product`."""

    @staticmethod
    def evaluations(site: Site, job: Mapping[str, Any], *, timeout_seconds: float) -> tuple[Step, ...]:
        """Steps that measure the engine as `job` (an `EvaluateJob` without its runtime) asks; none where the engine is
        the very graph that was measured already. The step's name is `engine`."""


def kind_of(pipeline: Pipeline) -> type[EngineKind]:
    """Return the class behind `engine.kind`."""
    return cast("type[EngineKind]", load_kind(ENGINES, pipeline.engine.kind))
