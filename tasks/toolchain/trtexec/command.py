"""What shall be built, typed; and the command line that says so to the target's `trtexec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal, Protocol

from tasks.errors import ConfigError, Problem
from tasks.toolchain.trtexec.extra_flags import flag_problems
from tasks.toolchain.trtexec.options import V11, Version, flag_problem

Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8"]

Shape = tuple[int, ...]


class Range(Protocol):
    """The sizes of one axis, as the pipeline file's `shapes` declares them."""

    @property
    def min(self) -> int: ...
    @property
    def opt(self) -> int: ...
    @property
    def max(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationProfile:
    """The shapes that an engine is built for: every dynamic input's smallest, usual and largest.

    TensorRT tunes for `opt` and answers between `min` and `max`, both included.
    """

    min: Mapping[str, Shape]
    opt: Mapping[str, Shape]
    max: Mapping[str, Shape]

    def problems(self) -> list[str]:
        """What TensorRT would refuse: other inputs in one of the three, other ranks, sizes out of order."""
        found = []
        if not self.min.keys() == self.opt.keys() == self.max.keys():
            found.append("min, opt and max name different inputs")
        for name in self.opt:
            shapes = [self.min.get(name, ()), self.opt[name], self.max.get(name, ())]
            if len({len(shape) for shape in shapes}) != 1:
                found.append(f"{name}: min, opt and max have different numbers of axes")
            elif not all(0 <= a <= b <= c for a, b, c in zip(*shapes, strict=True)):
                found.append(f"{name}: expected min <= opt <= max on every axis, got {' / '.join(map(_dims, shapes))}")
        return found


def profile_of(inputs: Mapping[str, Sequence[int | str]], shapes: Mapping[str, Range]) -> OptimizationProfile:
    """The profile that declared shapes ask for. Inputs without a dynamic axis are left out: the graph has their shape.

    >>> from types import SimpleNamespace as R
    >>> profile_of({"image": ["batch", 3], "scale": [1]}, {"batch": R(min=1, opt=8, max=32)}).opt
    {'image': (8, 3)}
    """
    dynamic = {name: axes for name, axes in inputs.items() if any(isinstance(axis, str) for axis in axes)}

    def at(end: Literal["min", "opt", "max"]) -> dict[str, Shape]:
        return {
            name: tuple(int(getattr(shapes[axis], end)) if isinstance(axis, str) else axis for axis in axes)
            for name, axes in dynamic.items()
        }

    return OptimizationProfile(min=at("min"), opt=at("opt"), max=at("max"))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """One engine to be built."""

    version: Version
    """Of the TensorRT that builds it."""
    onnx: PurePath
    plan: PurePath
    """Where the engine goes."""
    precision: Precision = "fp32"
    """The lowest precision that layers may run in. `tf32`: fp32 values, products rounded to TF32 from Ampere on."""
    strongly_typed: bool = False
    """Whether the graph itself carries the precision (always so on 11): then no precision flag is given."""
    profiles: Sequence[OptimizationProfile] = ()
    """Empty profiles, or none at all, for a graph without dynamic inputs."""
    memory_pools: Mapping[str, int] = field(default_factory=dict)
    """By `trtexec`'s name (`workspace`, `tacticSharedMem`…), MiB (KiB for `tacticSharedMem`, as trtexec counts it)."""
    builder_optimization_level: int | None = None
    hardware_compatibility: Literal["none", "ampere+", "sameComputeCapability"] = "none"
    version_compatible: bool = False
    strip_weights: bool = False
    sparsity: Literal["disable", "enable", "force"] = "disable"
    plugins: Sequence[PurePath] = ()
    timing_cache: PurePath | None = None
    layer_info: PurePath | None = None
    """Where the layers are written as JSON; the engine then carries their names and types."""
    measure: bool = True
    """Whether the engine is run after it was built, for the performance summary."""
    extra_flags: Sequence[str] = ()
    """Further arguments, checked against the table of the target's version."""


def carried_by_graph(precision: Precision, version: Version, *, asked: bool = False) -> bool:
    """Whether the ONNX file has to carry the precision.

    Always on 11, whose networks are strongly typed. On 10 int8 and fp8 come as QuantizeLinear nodes too (implicit
    quantisation by a calibration cache is deprecated there); fp16 and bf16 are flags unless `asked` for in the graph.
    """
    if precision in ("fp32", "tf32"):
        return False
    return version >= V11 or precision in ("int8", "fp8") or asked


def trtexec_command(trtexec: str, request: BuildRequest) -> tuple[str, ...]:
    """The command line. Never holds an option that `request.version` lacks.

    Raises:
        ConfigError: for an inverted profile, for an extra flag that the version does not have, that does nothing in it,
            or that contradicts a field.
    """
    problems = [
        Problem(text, field=f"engine.profiles.{index}")
        for index, profile in enumerate(request.profiles)
        for text in profile.problems()
    ]
    problems += [
        Problem(text, field=f"engine.extra_flags.{index}")
        for index, text in flag_problems(request.extra_flags, request.version)
    ]
    if problems:
        raise ConfigError(*problems)
    arguments = [
        f"--onnx={request.onnx}",
        f"--saveEngine={request.plan}",
        *_shapes(request.profiles),
        *_precision(request),
        *_builder(request),
        *request.extra_flags,
    ]
    for argument in arguments:
        wrong = flag_problem(argument, request.version)
        assert wrong is None, wrong
    return (trtexec, *arguments)


def _dims(shape: Shape) -> str:
    return "x".join(map(str, shape))


def shapes_text(shapes: Mapping[str, Shape]) -> str:
    """As trtexec, and ONNX Runtime's TensorRT provider, take the shapes of several inputs.

    >>> shapes_text({"image": (8, 3), "mask": (8,)})
    'image:8x3,mask:8'
    """
    return ",".join(f"{name}:{_dims(shape)}" for name, shape in shapes.items())


def _shapes(profiles: Sequence[OptimizationProfile]) -> list[str]:
    # trtexec reads every shape option after a `--profile=N` as that profile's.
    dynamic = [profile for profile in profiles if profile.opt]
    arguments = []
    for index, profile in enumerate(dynamic):
        if len(dynamic) > 1:
            arguments.append(f"--profile={index}")
        for option, end in (("--minShapes", profile.min), ("--optShapes", profile.opt), ("--maxShapes", profile.max)):
            arguments.append(f"{option}={shapes_text(end)}")
    return arguments


def _precision(request: BuildRequest) -> list[str]:
    if request.strongly_typed or request.version >= V11:
        typed = ["--stronglyTyped"] if request.version < V11 else []
        # A typed fp32 product may still be rounded to TF32 unless that is forbidden.
        return [*typed, "--noTF32"] if request.precision == "fp32" else typed
    match request.precision:
        case "fp32":
            return ["--noTF32"]
        case "tf32":
            return []
        case precision:
            return [f"--{precision}"]


def _builder(request: BuildRequest) -> list[str]:
    arguments = []
    if request.memory_pools:
        sizes = ",".join(f"{name}:{size}" for name, size in request.memory_pools.items())
        arguments.append(f"--memPoolSize={sizes}")
    if request.builder_optimization_level is not None:
        arguments.append(f"--builderOptimizationLevel={request.builder_optimization_level}")
    if request.hardware_compatibility != "none":
        arguments.append(f"--hardwareCompatibilityLevel={request.hardware_compatibility}")
    if request.version_compatible:
        arguments.append("--versionCompatible")
    if request.strip_weights:
        arguments.append("--stripWeights")
    if request.sparsity != "disable":
        arguments.append(f"--sparsity={request.sparsity}")
    arguments += [f"--staticPlugins={plugin}" for plugin in request.plugins]
    if request.timing_cache is not None:
        arguments.append(f"--timingCacheFile={request.timing_cache}")
    if request.layer_info is not None:
        arguments += ["--profilingVerbosity=detailed", f"--exportLayerInfo={request.layer_info}"]
    if not request.measure or request.strip_weights:
        # An engine without its weights cannot answer; trtexec would try and fail.
        arguments.append("--skipInference")
    return arguments
