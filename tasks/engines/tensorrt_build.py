"""How a TensorRT engine is built: the steps, planned anywhere, and the judgement of what they left."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.config import Pipeline
from tasks.engines.passport import layer_summary, make_passport, reproduce_script
from tasks.engines.tensorrt_config import (
    TensorRTConfig,
    config_of,
    converts,
    place_of,
    profiles_of,
    release_of,
)
from tasks.engines.tensorrt_version import version_of
from tasks.errors import CommandFailed, ConfigError, EnginehouseError, Problem
from tasks.home import find_home
from tasks.stage import Built, Site, Step, read_json
from tasks.toolchain import probe
from tasks.toolchain.triton_releases import described
from tasks.toolchain.trtexec import (
    BuildRequest,
    PlanHeader,
    TrtexecOutput,
    Version,
    read_output,
    read_plan_header,
    trtexec_command,
    version_text,
)
from tasks.toolchain.trtexec.failures import failure_of, judge
from tasks.toolchain.trtexec.options import V11
from tasks.toolchain.trtexec.place import NVIDIA_SMI, read_gpus

UNKNOWN = "unknown"
"""Stands in a key for what only the machine with the GPU can tell; nothing is ever built under it."""

MODEL = "model.plan"


def build_steps(site: Site) -> tuple[Step, ...]:
    """Ask the GPU, then build; both in the same place. Pure, and the same on a machine without a GPU."""
    pipeline, config = site.pipeline, config_of(site.pipeline)
    version, place = version_of(pipeline) or V11, place_of(site.pipeline)
    onnx, plan, cache = _onnx(site), site.work / "trtexec" / MODEL, timing_cache(pipeline)
    request = build_request(pipeline, version, onnx, plan, cache, site.work / "trtexec" / "layers.json")
    folders = {onnx.parent: False, plan.parent: True, cache.parent: True}
    folders |= {plugin_file(pipeline, path).parent: False for path in config.plugins}
    lock = cache.with_suffix(".lock")

    def where(argv: Sequence[str], lock: Path | None = None, folders: Mapping[Path, bool] | None = None) -> list[str]:
        return place.command(argv, folders=folders or {}, lock=lock)

    return (
        _step(site, "gpu", "the question for the GPU", where(NVIDIA_SMI), timeout_seconds=600.0),
        _step(
            site,
            "trtexec",
            "the engine's build",
            where(trtexec_command(place.trtexec, request), lock, folders),
            timeout_seconds=60 * config.timeout_minutes,
            makes=cache.parent,
        ),
    )


def judge_build(site: Site) -> Built:
    """Judge what the builder left, keep the plan, and write its passport."""
    pipeline, config = site.pipeline, config_of(site.pipeline)
    build = build_steps(site)[1]
    lines = _lines(site, "trtexec")
    output = read_output(lines)
    failed = CommandFailed(
        build.what,
        argv=build.argv,
        ended="exit status 0, but without the line `&&&& PASSED`",
        log=_transcript(site, "trtexec"),
        last_lines=lines[-20:],
    )
    if (wrong := judge(output, lines, otherwise=failed)) is not None:
        raise wrong
    header = _header(site.work / "trtexec" / MODEL, config, output, failed)
    gpus = read_gpus(_lines(site, "gpu"))
    release, place, version = release_of(config), place_of(pipeline), version_of(pipeline)
    information = site.work / "trtexec" / "layers.json"
    passport = make_passport(
        header=header,
        output=output,
        gpu=gpus[0] if gpus else {},
        release=release,
        image=place.image,
        precision=config.precision,
        strongly_typed=converts(config, version),
        profiles=profiles_json([{"min": p.min, "opt": p.opt, "max": p.max} for p in profiles_of(pipeline)]),
        hardware_compatibility=config.hardware_compatibility,
        version_compatible=config.version_compatible,
        strip_weights=config.strip_weights,
        layers=layer_summary(read_json(information)) if information.exists() else None,
    )
    _check_built(passport, config, version)
    onnx, plan = _onnx(site), site.work / "trtexec" / MODEL
    what = f"{pipeline.name}'s engine with {described(version)}"
    script = reproduce_script(build.argv, onnx=onnx, plan=plan, timing=timing_cache(pipeline).parent, what=what)
    plan.rename(site.product / MODEL)
    shutil.copyfile(site.materials["export"] / "signature.json", site.product / "signature.json")
    return Built(
        metrics=dict(output.metrics),
        details={"passport": passport, "reproduce.sh": script},
        # Beside build.log, which every build keeps.
        byproducts={information.name: information} if information.exists() else {},
    )


def timing_cache(pipeline: Pipeline) -> Path:
    """Beside the store, since it changes: one per TensorRT version and GPU, each under a lock.

    Of a GPU that a launcher reaches only the generation is known.
    """
    version, capability = version_of(pipeline), capability_of(config_of(pipeline))
    here = () if place_of(pipeline).launcher else probe.gpus()
    model = next((gpu.name for gpu in here if gpu.compute_capability == capability), "")
    parts = ["tensorrt", UNKNOWN if version is None else version_text(version), f"sm{capability}", model]
    name = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part) for part in parts if part)
    return find_home(pipeline.folder).root / "timing" / f"{name}.cache"


def _step(
    site: Site, name: str, what: str, argv: Sequence[str], *, timeout_seconds: float, makes: Path | None = None
) -> Step:
    transcript = _transcript(site, name)

    def explain(failure: CommandFailed) -> EnginehouseError:
        return failure_of(failure, _read(transcript))

    return Step(
        name=name,
        what=what,
        argv=tuple(argv),
        timeout_seconds=timeout_seconds,
        output=site.work / name,
        job={},
        job_file=site.work / f"{name}.json",
        transcript=transcript,
        explain=explain,
        makes=() if makes is None else (makes,),
    )


def _transcript(site: Site, name: str) -> Path:
    return site.work / name / "output.log"


def _read(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _lines(site: Site, name: str) -> list[str]:
    return _read(_transcript(site, name))


def _onnx(site: Site) -> Path:
    """The graph that is built: the converted one where there is one."""
    return site.materials.get("precision", site.materials["export"]) / "model.onnx"


def build_request(
    pipeline: Pipeline, version: Version, onnx: Path, plan: Path, cache: Path, layers: Path
) -> BuildRequest:
    config = config_of(pipeline)
    return BuildRequest(
        version=version,
        onnx=onnx,
        plan=plan,
        precision=config.precision,
        strongly_typed=converts(config, version),
        profiles=profiles_of(pipeline),
        memory_pools={str(name): size for name, size in config.memory_pools.items()},
        builder_optimization_level=config.builder_optimization_level,
        hardware_compatibility=config.hardware_compatibility,
        version_compatible=config.version_compatible,
        strip_weights=config.strip_weights,
        sparsity=config.sparsity,
        plugins=[plugin_file(pipeline, path) for path in config.plugins],
        timing_cache=cache,
        layer_info=layers,
        measure=config.measure,
        extra_flags=config.extra_flags,
    )


def plugin_file(pipeline: Pipeline, path: str) -> Path:
    file = (pipeline.folder / path).resolve()
    if not file.is_file():
        raise ConfigError(Problem(f"there is no plugin {file}", field="engine.plugins"))
    return file


def capability_of(config: TensorRTConfig) -> str:
    if config.compute_capability is not None:
        return config.compute_capability
    found = probe.gpus()
    return found[0].compute_capability if found else UNKNOWN


def _header(plan: Path, config: TensorRTConfig, output: TrtexecOutput, failed: CommandFailed) -> PlanHeader | None:
    mend = "see whether the disk is full, and whether engine.builder.trtexec is NVIDIA's own"
    try:
        header = read_plan_header(plan)
    except ValueError as error:
        if config.version_compatible and plan.exists() and plan.stat().st_size > 1 << 20:
            return None  # it begins with a lean runtime, whose header we do not know
        raise _no_plan(failed, f"trtexec said that it passed, and yet {error}: {plan}\n{mend}") from error
    if header.kind != "tensorrt":
        cause = "the plan is one of TensorRT-RTX, which Triton does not load: the wrong builder ran"
        raise _no_plan(failed, f"{cause}\nname NVIDIA TensorRT's own trtexec as engine.builder.trtexec")
    said = output.metrics.get("engine_mib", 0.0) * (1 << 20)
    if header.size < 0.99 * said:  # the log rounds
        cut = f"the plan is cut off: {header.size} bytes, and trtexec made about {said:.0f}: {plan}"
        raise _no_plan(failed, f"{cut}\n{mend}")
    return header


def _no_plan(failed: CommandFailed, cause: str) -> CommandFailed:
    return CommandFailed(
        failed.what,
        argv=failed.argv,
        ended="exit status 0, but without a valid plan",
        log=failed.log,
        last_lines=failed.last_lines,
        cause=cause,
    )


def _check_built(passport: Mapping[str, Any], config: TensorRTConfig, version: Version | None) -> None:
    """What was built must be what the key says."""
    problems = []
    if version is not None and passport["tensorrt"] not in (None, version_text(version)):
        problems.append(
            Problem(
                f"the engine was built by TensorRT {passport['tensorrt']}, and {version_text(version)} was asked for",
                field="engine.target",
                hint="see which trtexec ran: engine.builder",
            )
        )
    built, asked = passport["compute_capability"], capability_of(config)
    if built is not None and asked not in (UNKNOWN, built):
        problems.append(
            Problem(
                f"the engine was built on a GPU of compute capability {built}, and {asked} was asked for",
                field="engine.compute_capability",
                hint="build on a GPU of the kind that serves",
            )
        )
    if problems:
        raise ConfigError(*problems)


def profiles_json(profiles: Sequence[Mapping[str, Mapping[str, Sequence[int]]]]) -> list[dict[str, Any]]:
    return [{end: {name: list(shape) for name, shape in at.items()} for end, at in p.items()} for p in profiles]
