"""Engine kinds: what a server runs the model with. One module per kind, found by `engine.kind` through entry points.

A kind is a class with the attributes of `EngineKind`, named in the entry point group `enginehouse.engines`; nothing
else has to know of it. It may begin from `EngineBase`, which answers what most kinds need no answer of their own to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, cast

from tasks.config import ENGINES, EngineConfig, Parity, Pipeline, load_kind
from tasks.engines.passport import ServerFacts
from tasks.stage import Built, KeyParts, Site, Step
from tasks.toolchain.config_pbtxt import Accelerator
from tasks.toolchain.trtexec import OptimizationProfile, Precision


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """That the graph shall carry a lower precision before the engine is built from it (stage `precision`)."""

    precision: Literal["fp16", "bf16", "int8", "fp8"]
    quantizer: Literal["modelopt", "onnxruntime"]
    keep_fp32: Literal["auto"] | tuple[str, ...]
    calibration_samples: int
    parity: Parity
    """Against the graph in fp32."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """That the graph shall be compiled on the CPU before anything else is done with it (stage `preflight`)."""

    profiles: Sequence[OptimizationProfile]
    compute_capability: str | None


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
    def collect(site: Site) -> Built:
        """Leave `model_file`, what belongs to it, and `signature.json` in `site.product`."""

    @staticmethod
    def evaluations(site: Site, job: Mapping[str, Any], *, timeout_seconds: float) -> tuple[Step, ...]:
        """Steps that measure the engine as `job` (an `EvaluateJob` without its runtime) asks; none where the engine is
        the very graph that was measured already. The step's name is `engine`."""

    @staticmethod
    def tolerance(pipeline: Pipeline) -> Parity:
        """How far the engine's answers may lie from PyTorch's."""

    @staticmethod
    def precision(pipeline: Pipeline) -> Precision:
        """The lowest precision that the engine computes in; how far a metric may move on a server follows it."""

    @staticmethod
    def check_graph(pipeline: Pipeline, *, opset: int, ir_version: int) -> None:
        """Raise `ConfigError` when what serves this engine cannot read such a graph."""

    @staticmethod
    def preview(pipeline: Pipeline) -> tuple[str, ...]:
        """What a plan says of the engine beside its commands; a line each."""

    @staticmethod
    def conversion(pipeline: Pipeline) -> Conversion | None:
        """How the graph is converted first; `None` where it is taken as it was exported."""

    @staticmethod
    def preflight(pipeline: Pipeline) -> Preflight | None:
        """What is compiled on the CPU first; `None` for nothing."""

    @staticmethod
    def accelerator(pipeline: Pipeline) -> Accelerator | None:
        """What Triton's config says of execution providers."""

    @staticmethod
    def profiles(pipeline: Pipeline) -> int:
        """How many optimization profiles the engine has."""

    @staticmethod
    def expected(pipeline: Pipeline) -> Mapping[str, Any] | None:
        """What `unfit` reads of the build record's details, as far as it is known before the build."""

    @staticmethod
    def unfit(details: Mapping[str, Any], server: ServerFacts) -> list[str]:
        """Why a server cannot load the engine with these details of its build record; empty where nothing known speaks
        against it."""


class EngineBase:
    """Answers for a kind that serves the exported graph in fp32, anywhere."""

    @staticmethod
    def check(pipeline: Pipeline) -> None:
        """Nothing is needed."""

    @staticmethod
    def evaluations(site: Site, job: Mapping[str, Any], *, timeout_seconds: float) -> tuple[Step, ...]:
        """None."""
        return ()

    @staticmethod
    def tolerance(pipeline: Pipeline) -> Parity:
        """`gates.parity`."""
        return pipeline.gates.parity

    @staticmethod
    def precision(pipeline: Pipeline) -> Precision:
        """As exported."""
        return "fp32"

    @staticmethod
    def check_graph(pipeline: Pipeline, *, opset: int, ir_version: int) -> None:
        """Any graph will do."""

    @staticmethod
    def preview(pipeline: Pipeline) -> tuple[str, ...]:
        """Nothing to say."""
        return ()

    @staticmethod
    def conversion(pipeline: Pipeline) -> Conversion | None:
        """None."""
        return None

    @staticmethod
    def preflight(pipeline: Pipeline) -> Preflight | None:
        """None."""
        return None

    @staticmethod
    def accelerator(pipeline: Pipeline) -> Accelerator | None:
        """None."""
        return None

    @staticmethod
    def profiles(pipeline: Pipeline) -> int:
        """One, the range of `shapes`."""
        return 1

    @staticmethod
    def expected(pipeline: Pipeline) -> Mapping[str, Any] | None:
        """Nothing that could speak against a server."""
        return None

    @staticmethod
    def unfit(details: Mapping[str, Any], server: ServerFacts) -> list[str]:
        """Nothing known speaks against any server."""
        return []


def kind_of(pipeline: Pipeline) -> type[EngineKind]:
    """Return the class behind `engine.kind`."""
    return cast("type[EngineKind]", load_kind(ENGINES, pipeline.engine.kind))
