"""Engine kind `tensorrt`: known to the pipeline file, and refused with the reason until its builder has landed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NoReturn

from tasks.config import EngineConfig, Pipeline
from tasks.errors import ToolMissing
from tasks.stage import KeyParts, Site, Step


class TensorRTConfig(EngineConfig):
    """A TensorRT plan, compiled by `trtexec` for one GPU."""

    kind: Literal["tensorrt"]
    precision: Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8"] = "fp32"
    """The lowest precision that layers may run in."""


class TensorRTEngine:
    """Refuses at the first question, before anything is trained for it."""

    Config: ClassVar[type[EngineConfig]] = TensorRTConfig
    platform: ClassVar[str] = "tensorrt_plan"
    model_file: ClassVar[str] = "model.plan"
    reproducible: ClassVar[bool] = False  # TensorRT chooses kernels by timing them

    @staticmethod
    def check(pipeline: Pipeline) -> NoReturn:
        """Raise `ToolMissing`."""
        raise ToolMissing(
            "trtexec",
            why="engine.kind: tensorrt needs TensorRT's builder, which this version of Enginehouse does not drive yet",
            mend="Use `engine: {kind: onnxruntime}`: Triton's onnxruntime backend serves the same graph.",
        )

    @staticmethod
    def parts(pipeline: Pipeline) -> KeyParts:
        """Raise `ToolMissing`."""
        TensorRTEngine.check(pipeline)

    @staticmethod
    def steps(site: Site) -> tuple[Step, ...]:
        """Raise `ToolMissing`."""
        TensorRTEngine.check(site.pipeline)

    @staticmethod
    def collect(site: Site) -> None:
        """Raise `ToolMissing`."""
        TensorRTEngine.check(site.pipeline)

    @staticmethod
    def evaluations(site: Site, job: Mapping[str, Any], *, timeout_seconds: float) -> tuple[Step, ...]:
        """Raise `ToolMissing`."""
        TensorRTEngine.check(site.pipeline)
