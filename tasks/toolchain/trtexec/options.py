"""Which options `trtexec` has in which version: data, and the questions that a command line asks of it.

Sources, as each option names them:

    PARSER   samples/common/sampleOptions.cpp of github.com/NVIDIA/TensorRT, a 10.x parser (read 2026-11-30)
    TO_11    docs.nvidia.com/deeplearning/tensorrt/11.4.1/api/migration/tensorrt-10x-to-11x-trtexec.html (read
             2026-11-30), and the option parser of 11.1, compiled and run
    TO_10    docs.nvidia.com/deeplearning/tensorrt/11.4.1/api/migration/tensorrt-8x-to-10x-trtexec.html (read
             2026-11-30)
    NOTES_11_5  github.com/NVIDIA/TensorRT, notes of release 11.5 (2026-11-18)

An option that `trtexec` does not have ends it with status 1 and `[E] Unknown option: --fp16`, minutes after a GPU was
rented: so it is refused here instead. An option without a known first version counts as there since 10.0, which the
planner relies on only for those that 10.0 had (all that `command.py` emits).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

Version = tuple[int, int, int]
"""Major, minor, patch, such as `(10, 13, 3)`; a build number such as `.9` does not matter to anything here."""

PARSER = "the option parser of 10.x"
TO_11 = "NVIDIA's guide from 10.x to 11.x, and the option parser of 11.1"
TO_10 = "NVIDIA's guide from 8.x to 10.x"
NOTES_11_5 = "the release notes of 11.5"

V10, V11, V11_5 = (10, 0, 0), (11, 0, 0), (11, 5, 0)

Value = Literal["none", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option, and in which versions it means something."""

    name: str
    """With its dashes: `--saveEngine`."""
    value: Value = "required"
    """Whether it is written `--name` or `--name=value`."""
    since: Version = V10
    removed: Version | None = None
    """The first version that refuses it."""
    no_effect: Version | None = None
    """The first version that takes it, warns, and does nothing."""
    instead: str | None = None
    """What to use in its place: another option, or another way."""
    source: str = PARSER


def parse_version(text: str) -> Version:
    """`10.13.3.9`, `10.16.1` or `11.2` as major, minor, patch. Raises `ValueError` for anything else.

    >>> parse_version("10.13.3.9"), parse_version("11.2")
    ((10, 13, 3), (11, 2, 0))
    """
    found = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.\d+)?(?:\.post\d+)?", text.strip())
    if not found:
        raise ValueError(f"expected a version such as 10.13.3, got {text!r}")
    return int(found[1]), int(found[2]), int(found[3] or 0)


def generation_problem(version: Version) -> str | None:
    """Why nothing can be planned for a version; `None` for the generations that the table knows."""
    if V10 <= version < (12, 0, 0):
        return None
    return f"TensorRT {version_text(version)} is none that we know the options of: expected 10.x or 11.x"


def version_text(version: Version) -> str:
    """`10.13.3`. Law: `parse_version(version_text(v)) == v`."""
    return ".".join(map(str, version))


def _flags(names: str, **rest: object) -> Iterator[Option]:
    for name in names.split():
        yield Option(name=f"--{name}", value="none", **rest)  # type: ignore[arg-type]


def _valued(names: str, **rest: object) -> Iterator[Option]:
    for name in names.split():
        yield Option(name=f"--{name}", **rest)  # type: ignore[arg-type]


_TYPED = "the network's own types: 11 builds strongly typed networks only, so the precision is put into the ONNX file"
_QDQ = "QuantizeLinear and DequantizeLinear nodes in the ONNX file"

TABLE: tuple[Option, ...] = (
    # The model and the engine.
    *_valued("onnx saveEngine loadEngine"),
    *_flags("getPlanVersionOnly asyncFileReader"),
    *_valued("saveEngineSo loadEngineSo", since=V11_5, source=NOTES_11_5),
    # Shapes and profiles.
    *_valued("minShapes optShapes maxShapes shapes profile useProfile inputIOFormats outputIOFormats"),
    *_valued("minShapesCalib optShapesCalib maxShapesCalib calibProfile", removed=V11, instead=_QDQ, source=TO_11),
    # Precision.
    *_flags("noTF32"),
    *_flags("fp16 bf16 best", removed=V11, instead=_TYPED, source=TO_11),
    *_flags("int8 fp8 int4", removed=V11, instead=_QDQ, source=TO_11),
    *_flags("stronglyTyped", no_effect=V11, instead="nothing: every network is strongly typed", source=TO_11),
    *_valued("precisionConstraints layerPrecisions layerOutputTypes", removed=V11, instead=_TYPED, source=TO_11),
    *_valued("calib", removed=V11, instead=_QDQ, source=TO_11),
    # The builder.
    *_valued("memPoolSize avgTiming builderOptimizationLevel maxAuxStreams maxTactics tacticSources sparsity preview"),
    *_valued("tilingOptimizationLevel l2LimitForTiling decomposableAttentions remoteAutoTuningConfig"),
    *_valued("timingCacheFile hardwareCompatibilityLevel runtimePlatform profilingVerbosity tempdir tempfileControls"),
    *_valued("layerDeviceTypes markDebug useRuntime leanDLLPath"),
    *_flags("independentWeightLayouts", since=V11_5, source=NOTES_11_5),
    *_flags(
        "refit stripWeights stripAllWeights weightless versionCompatible vc excludeLeanRuntime pluginInstanceNorm pi"
    ),
    *_flags("noBuilderCache noCompilationCache errorOnTimingCacheMiss monitorMemory distributiveIndependence"),
    *_flags("markUnfusedTensorsAsDebugTensors allowWeightStreaming directIO skipInference"),
    *_flags("safe restricted consistency dumpKernelText buildDLAStandalone allowGPUFallback"),
    *_flags("uint8AsymmetricQuantizationDLA"),
    # The system.
    *_valued("device useDLACore staticPlugins dynamicPlugins setPluginsToSerialize safetyPlugins"),
    *_flags("ignoreParsedPluginLibs"),
    *_valued("plugins", removed=V11, instead="--staticPlugins", source=TO_11),
    # Inference.
    *_valued("infStreams iterations duration warmUp sleepTime idleTime persistentCacheRatio loadInputs"),
    *_valued("allocationStrategy weightStreamingBudget saveDebugTensors saveAllDebugTensors refitFromOnnx"),
    *_flags("exposeDMA useManagedMemory threads timeDeserialize timeRefit"),
    *_flags("useCudaGraph useSpinWait noDataTransfers separateProfileRun", no_effect=V11, source=TO_11),
    *_valued("streams", removed=V11, instead="--infStreams", source=TO_11),
    # Reporting.
    *_valued("avgRuns percentile exportTimes exportOutput exportProfile exportLayerInfo"),
    *_flags(
        "verbose dumpRefit dumpOutput dumpRawBindingsToFile dumpProfile dumpLayerInfo dumpOptimizationProfile help"
    ),
    # What 8.x had: still in many scripts, and refused since 10.
    *_valued("workspace", removed=V10, instead="--memPoolSize=workspace:MIB", source=TO_10),
    *_valued("minTiming", removed=V10, instead="--avgTiming", source=TO_10),
    *_flags("buildOnly", removed=V10, instead="--skipInference", source=TO_10),
    *_flags("heuristic", removed=V10, instead="--builderOptimizationLevel=2", source=TO_10),
    *_valued("nvtxMode", removed=V10, instead="--profilingVerbosity", source=TO_10),
    *_valued("batch maxBatch", removed=V10, instead="--shapes and --maxShapes", source=TO_10),
    *_flags("explicitBatch", removed=V10, instead="nothing: every batch is explicit", source=TO_10),
    *_valued("deploy output model uff uffInput", removed=V10, instead="--onnx", source=TO_10),
)
"""Every option known to us."""


@cache
def _by_name() -> dict[str, Option]:
    return {option.name: option for option in TABLE}


def find_option(name: str) -> Option | None:
    """The option called `--name`, in whatever version it exists."""
    return _by_name().get(name)


def options_of(version: Version) -> tuple[Option, ...]:
    """The options that `version` has and that do something, in the table's order."""
    return tuple(
        option
        for option in TABLE
        if option.since <= version
        and (option.removed is None or version < option.removed)
        and (option.no_effect is None or version < option.no_effect)
    )


def flag_problem(flag: str, version: Version) -> str | None:
    """What is wrong with one argument such as `--sparsity=enable` on `version`; `None` if nothing is."""
    name, equals, value = flag.partition("=")
    if not name.startswith("--"):
        return f"{flag!r} is no option: expected --name or --name=value"
    option = find_option(name)
    if option is None:
        near = difflib.get_close_matches(name, _by_name(), n=1, cutoff=0.6)
        return f"trtexec has no option {name}" + (f": did you mean {near[0]}?" if near else "")
    if (problem := _availability_problem(option, version)) is not None:
        return problem
    if option.value == "none" and equals:
        return f"{name} takes no value, got {value!r}"
    if option.value == "required" and not value:
        return f"{name} needs a value: expected {name}=…"
    return None


def _availability_problem(option: Option, version: Version) -> str | None:
    target = f"and the target has TensorRT {version_text(version)}"
    instead = f": use {option.instead}" if option.instead else ""
    if version < option.since:
        return f"{option.name} came with TensorRT {version_text(option.since)}, {target}"
    if option.removed is not None and version >= option.removed:
        return f"{option.name} is gone since TensorRT {version_text(option.removed)}, {target}{instead}"
    if option.no_effect is not None and version >= option.no_effect:
        return f"{option.name} does nothing since TensorRT {version_text(option.no_effect)}, {target}{instead}"
    return None
