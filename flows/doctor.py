"""Is every tool there, and do the versions fit each other and the target? Facts, each with what to do about it.

Reads distributions' metadata, asks `nvidia-smi`, and looks for programs; imports nothing heavy and starts no server.
"""

import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from flows.chain import KEYED
from tasks.config import Pipeline
from tasks.engines import kind_of
from tasks.errors import ConfigError, EnginehouseError, ToolMissing
from tasks.toolchain import probe
from tasks.toolchain.triton_installation import find_installation
from tasks.toolchain.triton_releases import (
    MINIMUM_COMPUTE_CAPABILITY,
    TritonRelease,
    described,
    find_release,
    release_of_server,
)

State = Literal["ok", "note", "warning", "error"]

NEEDED = ("torch", "onnx", "onnxscript", "prefect", "tritonclient", "numpy")
"""Distributions without which no pipeline runs, whatever it serves with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    found: str
    state: State = "ok"
    mend: str = ""
    """What to do; empty where nothing is wrong."""

    def to_json(self) -> dict[str, Any]:
        """A flat dictionary for `--json`."""
        return asdict(self)


def examine(pipeline: Pipeline | None = None) -> list[Finding]:
    """Look at this environment, and at what a pipeline asks of it and of its target."""
    findings = [*_interpreter(), *_distributions(), *_onnxruntime(), *_gpus(), *_triton()]
    if pipeline is not None:
        findings += [*_target(pipeline), *_stages(pipeline)]
    return findings


def worst(findings: list[Finding]) -> State:
    """The gravest state among them."""
    order: tuple[State, ...] = ("ok", "note", "warning", "error")
    return max((finding.state for finding in findings), key=order.index, default="ok")


def _interpreter() -> Iterator[Finding]:
    supported = sys.platform == "linux" and platform.machine() == "x86_64"
    yield Finding(
        subject="Python",
        found=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        state="ok" if supported else "error",
        mend="" if supported else "Linux on x86_64 is needed.",
    )


def _distributions() -> Iterator[Finding]:
    for name in NEEDED:
        version = probe.distribution_version(name)
        if version is None:
            yield Finding(subject=name, found="not installed", state="error", mend=f"pip install {name}")
        elif name == "torch":
            yield Finding(subject=name, found=f"{version}, {_torch_build(version)}")
        else:
            yield Finding(subject=name, found=version)


def _torch_build(version: str) -> str:
    """What a build of torch computes on, by its version's local part; PyPI's builds bring CUDA as distributions."""
    local = version.partition("+")[2]
    if local == "cpu":
        return "a CPU build"
    if found := re.fullmatch(r"cu(\d+)(\d)", local):
        return f"for CUDA {found[1]}.{found[2]}"
    runtime = next(
        (v for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12") if (v := probe.distribution_version(name))),
        None,
    )
    return f"for CUDA {runtime}" if runtime else "its build says no more"


def _onnxruntime() -> Iterator[Finding]:
    cpu, gpu = probe.distribution_version("onnxruntime"), probe.distribution_version("onnxruntime-gpu")
    again = "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install 'enginehouse[cpu]' or 'enginehouse[gpu]'"
    if cpu and gpu:
        yield Finding(
            subject="onnxruntime",
            found=f"onnxruntime {cpu} and onnxruntime-gpu {gpu}: they install the same module over each other",
            state="error",
            mend=again,
        )
    elif gpu:
        if probe.gpus():
            yield Finding(subject="onnxruntime", found=f"onnxruntime-gpu {gpu}")
        else:
            yield Finding(
                subject="onnxruntime",
                found=f"onnxruntime-gpu {gpu}, which computes on the CPU without a word: there is no GPU",
                state="warning",
                mend="pip install 'enginehouse[cpu]' in an environment of its own, or use a machine with a GPU",
            )
    elif cpu:
        yield Finding(subject="onnxruntime", found=cpu)
    else:
        mend = "pip install 'enginehouse[cpu]', or 'enginehouse[gpu]' on a machine with a GPU"
        yield Finding(subject="onnxruntime", found="not installed", state="error", mend=mend)


def _gpus() -> Iterator[Finding]:
    gpus = probe.gpus()
    if not gpus:
        mend = "Only a TensorRT engine needs one."
        yield Finding(subject="GPU", found="none that nvidia-smi names", state="note", mend=mend)
    for gpu in gpus:
        old = _numbers(gpu.compute_capability) < _numbers(MINIMUM_COMPUTE_CAPABILITY)
        yield Finding(
            subject="GPU",
            found=f"{gpu.name}, compute capability {gpu.compute_capability}, driver {gpu.driver}",
            state="error" if old else "ok",
            mend=f"Triton's images need compute capability {MINIMUM_COMPUTE_CAPABILITY}." if old else "",
        )


def _triton() -> Iterator[Finding]:
    try:
        installation = find_installation()
    except ToolMissing as missing:
        yield Finding(subject="Triton", found=missing.why, state="error", mend=missing.mend)
        return
    found = f"{installation.version} ({installation.backends}): {installation.tritonserver}"
    yield Finding(subject="Triton", found=found)


def _target(pipeline: Pipeline) -> Iterator[Finding]:
    """What the Triton release that shall serve carries, against what is here."""
    name = getattr(pipeline.engine, "target", None)
    if name is None:
        mend = "name the Triton release that serves as engine.target, and its versions are checked"
        yield Finding(subject="target", found="no Triton release is named", state="note", mend=mend)
        return
    release = find_release(name)
    carries = f"Triton {release.server or 'of unknown version'}, {described(release.tensorrt)}"
    runtime = f"ONNX Runtime {release.onnxruntime or 'of a version that our table does not know'}"
    yield Finding(
        subject=f"target {release.name}", found=f"{carries}, {runtime}, CUDA {release.cuda} ({release.image})"
    )
    yield from _target_driver(release)
    yield from _target_runtime(release)
    yield from _target_server(release)
    try:
        kind_of(pipeline).check_graph(pipeline, opset=pipeline.export.opset_version, ir_version=0)
    except ConfigError as error:
        for problem in error.problems:
            yield Finding(
                subject=problem.field or "graph", found=problem.message, state="error", mend=problem.hint or ""
            )
    else:
        yield Finding(
            subject="opset", found=f"{pipeline.export.opset_version}, which the target reads as far as we know"
        )


def _target_driver(release: TritonRelease) -> Iterator[Finding]:
    needed = release.minimum_driver
    for gpu in probe.gpus() if needed else ():
        old = _numbers(gpu.driver) < _numbers(needed or "")
        yield Finding(
            subject="driver",
            found=f"{gpu.driver}; CUDA {release.cuda} came with {needed}",
            state="warning" if old else "ok",
            mend=(
                f"Update the driver to {needed}; data centre GPUs may also run on some older branches by CUDA's "
                "forward compatibility. Or choose an older engine.target."
                if old
                else ""
            ),
        )


def _target_runtime(release: TritonRelease) -> Iterator[Finding]:
    here = probe.distribution_version("onnxruntime") or probe.distribution_version("onnxruntime-gpu")
    if here is None or release.onnxruntime is None:
        return
    newer = _numbers(here)[:2] > _numbers(release.onnxruntime)[:2]
    yield Finding(
        subject="onnxruntime",
        found=f"the graph is tried here on {here}, and served by {release.onnxruntime}",
        state="note" if newer else "ok",
        mend="The staging server tries it before it is released." if newer else "",
    )


def _target_server(release: TritonRelease) -> Iterator[Finding]:
    try:
        version = find_installation().version
    except ToolMissing:
        return  # said already
    here = release_of_server(version)
    if version != release.server and release.server is not None:
        named = f" (release {here.name})" if here is not None else ""
        yield Finding(
            subject="Triton",
            found=f"the one here is {version}{named}, and the target {release.name} is {release.server}",
            state="note",
            mend="Fine for trying out; what serves in the end should be what was verified.",
        )


def _stages(pipeline: Pipeline) -> Iterator[Finding]:
    """What the pipeline's own stages need, in the words in which a run would refuse."""
    for stage in KEYED:
        if not stage.applies(pipeline):
            continue
        try:
            stage.check(pipeline)
        except ToolMissing as missing:
            yield Finding(subject=stage.name, found=f"{missing.tool}: {missing.why}", state="error", mend=missing.mend)
        except ConfigError as error:
            for problem in error.problems:
                yield Finding(
                    subject=stage.name,
                    found=f"{problem.field}: {problem.message}" if problem.field else problem.message,
                    state="error",
                    mend=problem.hint or "",
                )
        except EnginehouseError as error:
            yield Finding(subject=stage.name, found=str(error), state="error")
        else:
            # Most stages need nothing but what was looked at above.
            if stage.name in ("precision", "preflight", "engine"):
                yield Finding(subject=stage.name, found="has what it needs")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
