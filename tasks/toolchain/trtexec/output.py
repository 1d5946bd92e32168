"""What a log of `trtexec` says. Pure; the format is NVIDIA's, as samples/common/sampleReporting.cpp writes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tasks.toolchain.trtexec.options import Version

_BANNER = re.compile(r"&&&& (RUNNING|PASSED|FAILED) TensorRT\.trtexec(?: \[TensorRT v(\d+)\])?")
_PREFIX = re.compile(r"^\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] (?:\[([VIWEF])\] )?(?:\[TRT\] )?(?:\[([VIWEF])\] )?")
_NUMBER = r"([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
_SINGLE = {
    "throughput_qps": re.compile(rf"^Throughput: {_NUMBER} qps"),
    "engine_mib": re.compile(rf"^Created engine with size: {_NUMBER} MiB"),
    "build_seconds": re.compile(rf"^Engine built in {_NUMBER} sec"),
    "parse_seconds": re.compile(rf"^Finished parsing network model\. Parse time: {_NUMBER}"),
    "load_seconds": re.compile(rf"^Engine deserialized in {_NUMBER} sec"),
}
_TIMES = {
    "latency_ms": "Latency",
    "enqueue_ms": "Enqueue Time",
    "gpu_compute_ms": "GPU Compute Time",
    "h2d_ms": "H2D Latency",
    "d2h_ms": "D2H Latency",
}
_PART = re.compile(rf"(min|max|mean|median|percentile\((\d+(?:\.\d+)?)%\)) = {_NUMBER} ms")
_DEVICE = {
    "gpu": re.compile(r"^Selected Device: (.+)$"),
    "compute_capability": re.compile(r"^Compute Capability: (\d+\.\d+)$"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtexecOutput:
    """One run of `trtexec`."""

    version: Version | None = None
    """From the first line; `None` where it did not come that far."""
    outcome: Literal["passed", "failed", "neither"] = "neither"
    """What the last line says. A run that could not parse its options, or found no GPU, ends with `neither`: that no
    FAILED stands there is no success."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Flat: `throughput_qps`, `latency_ms_mean`, `latency_ms_p99`, `engine_mib`, `build_seconds`…"""
    device: Mapping[str, str] = field(default_factory=dict)
    """`gpu` and `compute_capability` of the device that was used."""
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    """In order, without time and level."""


def version_of_banner(digits: str) -> Version:
    """The number in `[TensorRT v101303]`: major * 10000 + minor * 100 + patch (8.x: major * 1000).

    >>> version_of_banner("101303"), version_of_banner("110100"), version_of_banner("8601")
    ((10, 13, 3), (11, 1, 0), (8, 6, 1))
    """
    number = int(digits)
    if number < 10_000:
        return number // 1000, number // 100 % 10, number % 100
    return number // 10_000, number // 100 % 100, number % 100


def read_output(lines: Iterable[str]) -> TrtexecOutput:
    """Read a log, whatever stands before and after it."""
    version: Version | None = None
    outcome: Literal["passed", "failed", "neither"] = "neither"
    metrics: dict[str, float] = {}
    device: dict[str, str] = {}
    warnings: list[str] = []
    errors: list[str] = []
    for line in lines:
        if banner := _BANNER.search(line):
            version = version_of_banner(banner[2]) if banner[2] else version
            match banner[1]:
                case "RUNNING":  # a log that another run was appended to: only the last one counts
                    outcome, metrics, device, warnings, errors = "neither", {}, {}, [], []
                case "PASSED":
                    outcome = "passed"
                case _:
                    outcome = "failed"
            continue
        prefix = _PREFIX.match(line)
        text = line[prefix.end() :] if prefix else line
        match (prefix[2] or prefix[1]) if prefix else None:
            case "W":
                warnings.append(text)
            case "E" | "F":
                errors.append(text)
            case _:
                metrics.update(_metrics(text))
                for name, pattern in _DEVICE.items():
                    if found := pattern.match(text):
                        device[name] = found[1]
    return TrtexecOutput(
        version=version,
        outcome=outcome,
        metrics=metrics,
        device=device,
        warnings=tuple(warnings),
        errors=tuple(errors),
    )


def _metrics(text: str) -> dict[str, float]:
    for name, pattern in _SINGLE.items():
        if found := pattern.match(text):
            return {name: float(found[1])}
    for name, title in _TIMES.items():
        if text.startswith(f"{title}: "):
            return {f"{name}_{'p' + part[2] if part[2] else part[1]}": float(part[3]) for part in _PART.finditer(text)}
    return {}
