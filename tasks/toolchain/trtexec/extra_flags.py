"""The checked escape hatch: which further arguments of trtexec a pipeline file may give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tasks.toolchain.trtexec.options import Version, flag_problem

_FIELDS = {
    "profiles": "minShapes optShapes maxShapes profile",
    "precision": "fp16 bf16 int8 int4 fp8 best noTF32",
    "strongly_typed": "stronglyTyped",
    "memory_pools": "memPoolSize",
    "builder_optimization_level": "builderOptimizationLevel",
    "hardware_compatibility": "hardwareCompatibilityLevel",
    "version_compatible": "versionCompatible vc",
    "strip_weights": "stripWeights stripAllWeights weightless",
    "sparsity": "sparsity",
    "plugins": "plugins staticPlugins",
    "measure": "skipInference",
}
"""Which field of the pipeline file's `engine` says what an option says; as an extra flag it would contradict it."""

_OWN = ["onnx", "saveEngine", "saveEngineSo", "timingCacheFile", "exportLayerInfo", "profilingVerbosity"]
"""What the stage itself decides."""

_NO_BUILD = ["help", "getPlanVersionOnly", "loadEngine", "loadEngineSo", "refit"]
"""What makes trtexec do something else than build, or build what nobody can serve as it is."""

_REPEATED = frozenset(["--dynamicPlugins", "--setPluginsToSerialize", "--safetyPlugins"])
"""Options that may stand there several times."""


def flag_problems(flags: Sequence[str], version: Version) -> Iterator[tuple[int, str]]:
    """What is wrong with extra flags on `version`: the index of each, and why."""
    seen: set[str] = set()
    for index, flag in enumerate(flags):
        name = flag.partition("=")[0]
        if (problem := _flag_problem(flag, name, version)) is not None:
            yield index, problem
        elif name in seen and name not in _REPEATED:
            yield index, f"{name} is given twice"
        seen.add(name)


def _flag_problem(flag: str, name: str, version: Version) -> str | None:
    if any(character.isspace() for character in flag):
        return f"{flag!r} holds a space: expected one argument of trtexec per entry of the list"
    if (problem := flag_problem(flag, version)) is not None:
        return problem
    for field_name, options in _FIELDS.items():
        if name.removeprefix("--") in options.split():
            return f"{name} has a field of its own: expected engine.{field_name} instead"
    if name.removeprefix("--") in _OWN:
        return f"{name} is given by the stage itself"
    if name.removeprefix("--") in _NO_BUILD:
        return f"with {name} trtexec builds no engine that could be served"
    return None
