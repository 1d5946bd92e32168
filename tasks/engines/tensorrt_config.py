"""The fields of `engine: {kind: tensorrt}`, and what follows from them: profiles, precision, place."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tasks.config import (
    BATCH,
    AxisRange,
    EngineConfig,
    Keyed,
    Listed,
    Parity,
    PathText,
    Pipeline,
    Placement,
    PositiveInt,
    Settings,
    Text,
)
from tasks.toolchain.triton_releases import TritonRelease, find_release, release_text
from tasks.toolchain.trtexec import (
    OptimizationProfile,
    Precision,
    Version,
    carried_by_graph,
    flag_problems,
    generation_problem,
    parse_version,
    profile_of,
    version_text,
)
from tasks.toolchain.trtexec.options import V11
from tasks.toolchain.trtexec.place import IMAGE_TRTEXEC, Place

TOLERANCE: Mapping[str, Parity] = {
    "tf32": Parity(atol=1e-2, rtol=1e-2),
    "fp16": Parity(atol=1e-2, rtol=1e-2),
    "bf16": Parity(atol=5e-2, rtol=5e-2),
    "int8": Parity(atol=0.25, rtol=0.1),
    "fp8": Parity(atol=0.25, rtol=0.1),
}
"""How far an answer in lower precision may lie from PyTorch's where the pipeline file says nothing: what the format's
rounding alone costs in a network of usual depth. Whether it is good enough is the metric gates' to say."""


def _version(value: str) -> str:
    version = parse_version(value)
    if (problem := generation_problem(version)) is not None:
        raise ValueError(problem)
    return version_text(version)


def _capability(value: object) -> object:
    text = f"{value:.1f}" if isinstance(value, float) else value
    if isinstance(text, str) and not re.fullmatch(r"\d+\.\d", text):
        raise ValueError(f"expected a compute capability such as 9.0, got {text!r}")
    return text


class Builder(Settings):
    """Where `trtexec` runs."""

    kind: Placement[Literal["auto", "local", "docker"]] = "auto"
    """`local`: the program on this machine; `docker`: inside NVIDIA's image; `auto`: local where trtexec is found."""
    trtexec: Placement[PathText | None] = None
    """The program; the one on the PATH if left out."""
    image: Placement[Text | None] = None
    """The image; that of the Triton release `target` if left out, so that the engine matches the server."""
    gpus: Placement[Text] = "device=0"
    """The GPU for the container, as `docker run --gpus` takes it."""
    launcher: Placement[Listed[Text]] = ()
    """A command that stands before the whole, such as `[srun, --gpus=1]`, to build on another machine that sees the
    same folders."""


class TensorRTConfig(EngineConfig):
    """A TensorRT plan, compiled by `trtexec` for one TensorRT version and one generation of GPUs."""

    kind: Literal["tensorrt"]
    target: Placement[Annotated[str, BeforeValidator(release_text)] | None] = None
    """The Triton release that serves, such as 26.08: it decides TensorRT's version and the image."""
    tensorrt: Placement[Annotated[str, AfterValidator(_version)] | None] = None
    """TensorRT's version, where there is no `target` or its version is not known; that of the `trtexec` on this machine
    if neither tells. Keyed as the environment."""
    compute_capability: Placement[Annotated[str, BeforeValidator(_capability)] | None] = None
    """Of the GPU that serves, such as 9.0; that of this machine's GPU if left out. Keyed as the environment."""
    precision: Keyed[Precision] = "fp32"
    """The lowest precision that layers may run in."""
    strongly_typed: Keyed[bool] = False
    """On TensorRT 10: put fp16 and bf16 into the graph too, as 11 always needs it, instead of giving a flag."""
    keep_fp32: Keyed[Literal["auto"] | Listed[Text]] = ()
    """Nodes of the graph that stay in fp32; `auto` finds a smallest list with which the parity gate passes."""
    quantizer: Keyed[Literal["modelopt", "onnxruntime"]] = "modelopt"
    """What inserts the QuantizeLinear nodes for int8: NVIDIA's ModelOpt in an environment of its own, or the lighter
    static quantisation of ONNX Runtime."""
    calibration_samples: Keyed[PositiveInt] = 256
    """Rows of the training data that ranges are measured on."""
    parity: Parity | None = None
    """How far the answers may lie from PyTorch's in this precision; wider than gates.parity if left out."""
    profiles: Keyed[Listed[Mapping[str, AxisRange]]] = ()
    """Optimization profiles by axis, each within `shapes`; one over the whole of `shapes` if left out."""
    memory_pools: Keyed[
        Mapping[Literal["workspace", "tacticSharedMem", "dlaSRAM", "dlaLocalDRAM", "dlaGlobalDRAM"], PositiveInt]
    ] = Field(default_factory=dict)
    """Limits in MiB (`tacticSharedMem`: KiB). TensorRT may use the whole GPU if left out."""
    builder_optimization_level: Keyed[Annotated[int, Field(ge=0, le=5)] | None] = None
    """0 builds fastest, 5 looks longest for fast kernels; TensorRT's own default (3) if left out."""
    hardware_compatibility: Keyed[Literal["none", "ampere+", "sameComputeCapability"]] = "none"
    """`ampere+`: the plan runs on every generation from Ampere on, somewhat slower."""
    version_compatible: Keyed[bool] = False
    """The plan also loads in later versions of the same major version, with a lean runtime inside."""
    strip_weights: Keyed[bool] = False
    """Leave the weights out of the plan. It has to be refitted before it can answer, which Triton does not do."""
    sparsity: Keyed[Literal["disable", "enable", "force"]] = "disable"
    """`enable`: use sparse kernels for weights that have the 2:4 pattern."""
    plugins: Keyed[Listed[PathText]] = ()
    """Shared libraries with plugins, relative to the pipeline file. Their bytes are part of the key."""
    extra_flags: Keyed[Listed[Text]] = ()
    """Further arguments of trtexec, each checked against what the target's version has."""
    measure: Placement[bool] = True
    """Run the engine after it was built, for the performance summary."""
    preflight: Placement[Literal["none", "tensorrt-rtx"]] = "none"
    """`tensorrt-rtx`: first compile the graph with TensorRT-RTX on the CPU, so that what TensorRT would refuse comes
    out without a GPU."""
    builder: Builder = Builder()
    """Where trtexec runs."""
    timeout_minutes: Placement[Annotated[float, Field(gt=0)]] = 120.0
    """The build is stopped after this long."""

    @model_validator(mode="after")
    def _fits(self) -> TensorRTConfig:
        if self.keep_fp32 and self.precision in ("fp32", "tf32"):
            raise ValueError(f"keep_fp32 says what stays out of a lower precision, but precision is {self.precision}")
        if self.quantizer == "onnxruntime" and self.precision == "fp8":
            raise ValueError("quantizer onnxruntime makes int8 only: expected quantizer: modelopt for precision fp8")
        if self.version_compatible and self.strip_weights:
            raise ValueError("version_compatible and strip_weights exclude each other in TensorRT")
        return self

    def contradictions(self, pipeline: Pipeline) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """A version that the server could not load, profiles outside `shapes`, flags that the version lacks."""
        release, version = release_of(self), declared_version(self)
        carried = None if release is None else release.tensorrt
        if release is not None and carried not in (None, version) and not self.version_compatible:
            yield (
                ("tensorrt",),
                f"{self.tensorrt} is not what Triton {release.name} carries, {version_text(carried)}: its server could "
                "not load the plan. Leave engine.tensorrt out, or name the release that carries it as engine.target",
            )
        yield from self._profile_contradictions(pipeline)
        if version is not None:
            for index, text in flag_problems(self.extra_flags, version):
                yield ("extra_flags", index), text

    def _profile_contradictions(self, pipeline: Pipeline) -> Iterator[tuple[tuple[str | int, ...], str]]:
        for index, profile in enumerate(self.profiles):
            for axis, sizes in profile.items():
                declared = pipeline.shapes.get(axis)
                if declared is None:
                    known = ", ".join(pipeline.shapes) or "none"
                    yield ("profiles", index, axis), f"shapes declares no axis {axis} (it declares {known})"
                elif sizes.min < declared.min or sizes.max > declared.max:
                    yield (
                        ("profiles", index, axis),
                        f"{sizes.min} to {sizes.max} leaves shapes.{axis}, {declared.min} to {declared.max}: the "
                        "export checked no other sizes",
                    )
        largest = max((profile[BATCH].max for profile in self.profiles if BATCH in profile), default=0)
        everywhere = all(BATCH in profile for profile in self.profiles)
        if self.profiles and everywhere and largest < pipeline.serve.max_batch_size:
            yield (
                ("profiles",),
                f"no profile reaches serve.max_batch_size, {pipeline.serve.max_batch_size}: "
                f"the largest batch is {largest}",
            )


def config_of(pipeline: Pipeline) -> TensorRTConfig:
    """The engine's fields of a pipeline of this kind."""
    assert isinstance(pipeline.engine, TensorRTConfig)
    return pipeline.engine


def release_of(config: TensorRTConfig) -> TritonRelease | None:
    """The Triton release that shall serve."""
    return None if config.target is None else find_release(config.target)


def declared_version(config: TensorRTConfig) -> Version | None:
    """TensorRT's version as far as the pipeline file tells it."""
    if config.tensorrt is not None:
        return parse_version(config.tensorrt)
    release = release_of(config)
    return None if release is None else release.tensorrt


def place_of(pipeline: Pipeline) -> Place:
    """Where the pipeline's engine is built; asks the PATH, and no process."""
    config = config_of(pipeline)
    builder, release = config.builder, release_of(config)
    named = None if builder.trtexec is None else str((pipeline.folder / builder.trtexec).resolve())
    found = named or shutil.which("trtexec")
    inside = builder.kind == "docker" or (builder.kind == "auto" and not found and (release or builder.image))
    if inside:
        image = builder.image or (release.image if release is not None else None)
        return Place(
            trtexec=builder.trtexec or IMAGE_TRTEXEC, image=image or "", gpus=builder.gpus, launcher=builder.launcher
        )
    return Place(trtexec=found or "trtexec", launcher=builder.launcher)


def converts(config: TensorRTConfig, version: Version | None) -> bool:
    """Whether the graph is converted before it is built; for a version that is not known, as on 11."""
    asked = config.strongly_typed or bool(config.keep_fp32)
    return carried_by_graph(config.precision, version or V11, asked=asked)


def tolerance_of(pipeline: Pipeline) -> Parity:
    """What the engine's answers are held against."""
    config = config_of(pipeline)
    return config.parity or TOLERANCE.get(config.precision, pipeline.gates.parity)


def profiles_of(pipeline: Pipeline) -> tuple[OptimizationProfile, ...]:
    """The optimization profiles: the explicit ones, or the one that `shapes` declares."""
    config = config_of(pipeline)
    inputs = {name: spec.shape for name, spec in pipeline.inputs.items()}
    chosen: list[dict[str, Any]] = [{**pipeline.shapes, **profile} for profile in config.profiles] or [
        dict(pipeline.shapes)
    ]
    return tuple(profile_of(inputs, shapes) for shapes in chosen)
