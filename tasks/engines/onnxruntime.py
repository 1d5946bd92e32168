"""Engine kind `onnxruntime`: the exported graph itself, run by Triton's onnxruntime backend."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from tasks.config import EngineConfig, Pipeline
from tasks.stage import KeyParts, Site, Step


class OnnxRuntimeConfig(EngineConfig):
    """The exported graph is served as it is."""

    kind: Literal["onnxruntime"]


class OnnxRuntimeEngine:
    """Serves the bytes that the export stage checked; there is nothing to compile."""

    Config: ClassVar[type[EngineConfig]] = OnnxRuntimeConfig
    platform: ClassVar[str] = "onnxruntime_onnx"
    model_file: ClassVar[str] = "model.onnx"
    reproducible: ClassVar[bool] = True

    @staticmethod
    def check(pipeline: Pipeline) -> None:
        """Nothing is needed beside what the export needed."""

    @staticmethod
    def parts(pipeline: Pipeline) -> KeyParts:
        """The graph decides alone."""
        return KeyParts(config={"kind": pipeline.engine.kind})

    @staticmethod
    def steps(site: Site) -> tuple[Step, ...]:
        """No child process."""
        return ()

    @staticmethod
    def collect(site: Site) -> None:
        """Copy; equal bytes are stored once, so the store does not grow."""
        shutil.copytree(site.materials["export"], site.product, dirs_exist_ok=True, copy_function=shutil.copyfile)

    @staticmethod
    def evaluations(site: Site, job: Mapping[str, Any], *, timeout_seconds: float) -> tuple[Step, ...]:
        """None: these bytes are measured as ONNX already."""
        return ()
