"""Engine kind `onnxruntime`: the exported graph itself, run by Triton's onnxruntime backend."""

from __future__ import annotations

import shutil
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, model_validator

from tasks.config import EngineConfig, Keyed, Parity, Pipeline, Placement, PositiveInt, Settings, Text
from tasks.engines import EngineBase
from tasks.errors import ConfigError, Problem
from tasks.stage import Built, KeyParts, Site, Step
from tasks.toolchain.config_pbtxt import Accelerator
from tasks.toolchain.triton_releases import TritonRelease, described, find_release, release_text
from tasks.toolchain.trtexec import Precision, profile_of, shapes_text
from tasks.toolchain.trtexec.options import V11


class Gpu(Settings):
    """How ONNX Runtime uses the GPU inside Triton."""

    execution_provider: Keyed[Literal["cuda", "tensorrt"]] = "cuda"
    """`cuda`: ONNX Runtime's own kernels; `tensorrt`: it compiles the graph with TensorRT when the model is loaded, and
    falls back to CUDA for what TensorRT does not take."""
    precision: Keyed[Literal["fp32", "tf32", "fp16"]] = "fp32"
    """`tf32`: products of fp32 values are rounded to TF32, from Ampere on faster. `fp16` is of the TensorRT provider
    alone, and needs a release whose TensorRT still has it as a flag (10.x). The TensorRT provider rounds fp32 to TF32
    without being asked, so that its answers are held against the tolerance of tf32."""
    memory_limit_mib: Keyed[PositiveInt | None] = None
    """Of the CUDA provider: the most memory that its arena takes; all of the GPU's if left out."""
    max_workspace_size_mib: Keyed[PositiveInt | None] = None
    """Of the TensorRT provider: memory for its kernels; its own default (1 GiB) if left out."""
    engine_cache: Keyed[Text | None] = None
    """Of the TensorRT provider: a folder on the server where compiled engines stay, so that only the first load takes
    minutes."""

    @model_validator(mode="after")
    def _fits(self) -> Gpu:
        if self.execution_provider == "cuda":
            given = [name for name in ("max_workspace_size_mib", "engine_cache") if getattr(self, name) is not None]
            given += ["precision: fp16"] if self.precision == "fp16" else []
            if given:
                raise ValueError(f"{given[0]} belongs to execution_provider: tensorrt, got cuda")
        elif self.memory_limit_mib is not None:
            raise ValueError("memory_limit_mib belongs to execution_provider: cuda, got tensorrt")
        return self


class OnnxRuntimeConfig(EngineConfig):
    """The exported graph is served as it is."""

    kind: Literal["onnxruntime"]
    target: Placement[Annotated[str, BeforeValidator(release_text)] | None] = None
    """The Triton release that serves, such as 26.08: its ONNX Runtime must be able to read the graph's opset."""
    gpu: Gpu | None = None
    """How the GPU is used. Triton's defaults if left out: the CUDA kernels where the server has a GPU."""


def _config(pipeline: Pipeline) -> OnnxRuntimeConfig:
    assert isinstance(pipeline.engine, OnnxRuntimeConfig)
    return pipeline.engine


class OnnxRuntimeEngine(EngineBase):
    """Serves the bytes that the export stage checked; there is nothing to compile."""

    Config: ClassVar[type[EngineConfig]] = OnnxRuntimeConfig
    platform: ClassVar[str] = "onnxruntime_onnx"
    model_file: ClassVar[str] = "model.onnx"
    reproducible: ClassVar[bool] = True

    @staticmethod
    def check(pipeline: Pipeline) -> None:
        """Nothing is needed beside what the export needed; the target must read the opset, and have the precision."""
        config = _config(pipeline)
        if config.target is None:
            return
        release = find_release(config.target)
        _check(release, opset=pipeline.export.opset_version, ir_version=0)
        asks_for_flag = config.gpu is not None and config.gpu.precision == "fp16"
        if asks_for_flag and release.tensorrt is not None and release.tensorrt >= V11:
            raise ConfigError(
                Problem(
                    f"fp16 was a flag of TensorRT 10, and Triton {release.name} carries {described(release.tensorrt)}, "
                    "whose networks are strongly typed",
                    field="engine.gpu.precision",
                    hint="choose an engine.target with TensorRT 10, or engine.kind: tensorrt, which puts fp16 into the "
                    "graph",
                )
            )

    @staticmethod
    def parts(pipeline: Pipeline) -> KeyParts:
        """The graph decides alone: how it is run stands in Triton's config."""
        return KeyParts(config={"kind": pipeline.engine.kind})

    @staticmethod
    def steps(site: Site) -> tuple[Step, ...]:
        """No child process."""
        return ()

    @staticmethod
    def collect(site: Site) -> Built:
        """Copy; equal bytes are stored once, so the store does not grow."""
        shutil.copytree(site.materials["export"], site.product, dirs_exist_ok=True, copy_function=shutil.copyfile)
        return Built()

    @staticmethod
    def tolerance(pipeline: Pipeline) -> Parity:
        """`gates.parity`, but where the GPU computes in less than fp32."""
        rounded = OnnxRuntimeEngine.precision(pipeline) != "fp32"
        return Parity(atol=1e-2, rtol=1e-2) if rounded else pipeline.gates.parity

    @staticmethod
    def precision(pipeline: Pipeline) -> Precision:
        """What the execution provider computes in: never more than TF32 with TensorRT."""
        gpu = _config(pipeline).gpu
        if gpu is None:
            return "fp32"
        return "tf32" if gpu.execution_provider == "tensorrt" and gpu.precision == "fp32" else gpu.precision

    @staticmethod
    def check_graph(pipeline: Pipeline, *, opset: int, ir_version: int) -> None:
        """Raise `ConfigError` for an opset or IR version that the target's ONNX Runtime does not load."""
        config = _config(pipeline)
        if config.target is not None:
            _check(find_release(config.target), opset=opset, ir_version=ir_version)

    @staticmethod
    def accelerator(pipeline: Pipeline) -> Accelerator | None:
        """What Triton's config says of the GPU, in the words of its onnxruntime backend; nothing without `gpu`."""
        gpu = _config(pipeline).gpu
        if gpu is None:
            return None
        if gpu.execution_provider == "cuda":
            # ONNX Runtime's own default is to round to TF32, which gates.parity would not pass.
            parameters = {"use_tf32": "1" if gpu.precision == "tf32" else "0"}
            if gpu.memory_limit_mib is not None:
                parameters["gpu_mem_limit"] = str(gpu.memory_limit_mib << 20)
            return Accelerator(name="cuda", parameters=parameters)
        parameters = {"precision_mode": "FP16" if gpu.precision == "fp16" else "FP32"}
        profile = profile_of({name: spec.shape for name, spec in pipeline.inputs.items()}, pipeline.shapes)
        for end, shapes in (("min", profile.min), ("opt", profile.opt), ("max", profile.max)):
            # Without them TensorRT builds anew, for minutes, at the first request of every new size.
            if shapes:
                parameters[f"trt_profile_{end}_shapes"] = shapes_text(shapes)
        if gpu.max_workspace_size_mib is not None:
            parameters["max_workspace_size_bytes"] = str(gpu.max_workspace_size_mib << 20)
        if gpu.engine_cache is not None:
            parameters |= {"trt_engine_cache_enable": "true", "trt_engine_cache_path": gpu.engine_cache}
        return Accelerator(name="tensorrt", parameters=parameters)


def _check(release: TritonRelease, *, opset: int, ir_version: int) -> None:
    limits = release.onnxruntime_limits
    if limits is None:
        return
    problems = []
    if opset > limits[0]:
        problems.append(
            Problem(
                f"opset {opset} is newer than Triton {release.name} reads: its ONNX Runtime "
                f"{release.onnxruntime} loads up to {limits[0]}",
                field="export.opset_version",
                hint=f"set export.opset_version to {limits[0]} or less, or choose a later engine.target",
            )
        )
    if ir_version > limits[1]:
        problems.append(
            Problem(
                f"the graph's IR version {ir_version} is newer than Triton {release.name} reads: its ONNX Runtime "
                f"{release.onnxruntime} loads up to {limits[1]}",
                field="engine.target",
                hint="export with a lower opset_version, or choose a later engine.target",
            )
        )
    if problems:
        raise ConfigError(*problems)
