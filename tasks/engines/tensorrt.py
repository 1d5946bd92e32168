"""Engine kind `tensorrt`: the exported graph compiled by `trtexec`, for one TensorRT version and one GPU generation."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tasks.artifacts.digest import hash_file
from tasks.config import EngineConfig, Parity, Pipeline, keyed
from tasks.engines import Conversion, EngineBase, Preflight
from tasks.engines.passport import ServerFacts, layer_summary, make_passport, mismatches, reproduce_script
from tasks.engines.tensorrt_config import (
    TensorRTConfig,
    config_of,
    converts,
    declared_version,
    place_of,
    profiles_of,
    release_of,
    tolerance_of,
)
from tasks.errors import CommandFailed, ConfigError, EnginehouseError, Problem, ToolMissing
from tasks.home import find_home
from tasks.stage import Built, KeyParts, Site, Step, read_json
from tasks.toolchain import probe
from tasks.toolchain.triton_releases import described, highest_tensorrt_opset
from tasks.toolchain.trtexec import (
    BuildRequest,
    PlanHeader,
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


class TensorRTEngine(EngineBase):
    """Built where a GPU of the serving kind is; planned, and checked as far as that goes, anywhere."""

    Config: ClassVar[type[EngineConfig]] = TensorRTConfig
    platform: ClassVar[str] = "tensorrt_plan"
    model_file: ClassVar[str] = MODEL
    reproducible: ClassVar[bool] = False  # TensorRT chooses kernels by timing them

    @staticmethod
    def check(pipeline: Pipeline) -> None:
        """Everything that can be known before an hour of training: the version, the graph's opset, the tools, a GPU."""
        config, place = config_of(pipeline), place_of(pipeline)
        profiles_of(pipeline)
        version = declared_version(config) or _version_unknown(config)
        _check_opset(version, pipeline.export.opset_version)
        trtexec_command(
            "trtexec", _request(pipeline, version, Path("model.onnx"), Path(MODEL), Path("cache"), Path("l"))
        )
        if place.image is not None:
            if not place.image:
                raise ConfigError(
                    Problem(
                        "docker needs an image",
                        field="engine.builder.image",
                        hint="name the Triton release as engine.target, and its image is taken",
                    )
                )
            if not place.launcher and shutil.which(place.docker) is None:
                raise ToolMissing(
                    "docker",
                    why="engine.builder builds inside NVIDIA's image",
                    mend="Install Docker and the NVIDIA Container Toolkit, or put trtexec on the PATH.",
                )
        elif not place.launcher and shutil.which(place.trtexec) is None:
            raise ToolMissing(
                "trtexec",
                why=f"engine.kind: tensorrt builds with it, and {place.trtexec} is no program here",
                mend=(
                    "Name the Triton release as engine.target to build inside its image with Docker, name the program "
                    "as engine.builder.trtexec, or serve the graph itself: `engine: {kind: onnxruntime}`."
                ),
            )
        if _capability(config) == UNKNOWN:
            raise ToolMissing(
                "an NVIDIA GPU",
                why="an engine is built on a GPU of the kind that serves, and nvidia-smi names none here",
                mend=(
                    "Run this on the GPU machine, or name engine.compute_capability and an engine.builder.launcher "
                    "that reaches one. `enginehouse run --until preflight` with engine.preflight: tensorrt-rtx checks "
                    "the graph without a GPU; `enginehouse plan` shows the commands."
                ),
            )

    @staticmethod
    def parts(pipeline: Pipeline) -> KeyParts:
        """The fields that change the plan; TensorRT's version and the compute capability as the environment."""
        config = config_of(pipeline)
        version = declared_version(config)
        shapes = [{"min": p.min, "opt": p.opt, "max": p.max} for p in profiles_of(pipeline)]
        plugins = [str(hash_file(_plugin(pipeline, path))) for path in config.plugins]
        own = {name: value for name, value in keyed(config).items() if name not in ("profiles", "plugins")}
        return KeyParts(
            config={**own, "profiles": _json(shapes), "plugins": plugins},
            environment={
                "tensorrt": UNKNOWN if version is None else version_text(version),
                "compute_capability": _capability(config),
            },
        )

    @staticmethod
    def steps(site: Site) -> tuple[Step, ...]:
        """Ask the GPU, then build; both in the same place. Pure, and the same on a machine without a GPU."""
        pipeline, config = site.pipeline, config_of(site.pipeline)
        version, place = declared_version(config) or V11, place_of(site.pipeline)
        onnx, plan, cache = _onnx(site), site.work / "trtexec" / MODEL, timing_cache(pipeline)
        request = _request(pipeline, version, onnx, plan, cache, site.work / "trtexec" / "layers.json")
        folders = {onnx.parent: False, plan.parent: True, cache.parent: True}
        folders |= {_plugin(pipeline, path).parent: False for path in config.plugins}
        lock = cache.with_suffix(".lock")

        def where(
            argv: Sequence[str], lock: Path | None = None, folders: Mapping[Path, bool] | None = None
        ) -> list[str]:
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

    @staticmethod
    def collect(site: Site) -> Built:
        """Judge what the builder left, keep the plan, and write its passport."""
        pipeline, config = site.pipeline, config_of(site.pipeline)
        build = TensorRTEngine.steps(site)[1]
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
        header = _header(site.work / "trtexec" / MODEL, config, failed)
        gpus = read_gpus(_lines(site, "gpu"))
        release, place, version = release_of(config), place_of(pipeline), declared_version(config)
        information = site.work / "trtexec" / "layers.json"
        passport = make_passport(
            header=header,
            output=output,
            gpu=gpus[0] if gpus else {},
            release=release,
            image=place.image,
            precision=config.precision,
            strongly_typed=converts(config, version),
            profiles=_json([{"min": p.min, "opt": p.opt, "max": p.max} for p in profiles_of(pipeline)]),
            hardware_compatibility=config.hardware_compatibility,
            version_compatible=config.version_compatible,
            layers=layer_summary(read_json(information)) if information.exists() else None,
        )
        _check_built(passport, config, version)
        onnx, plan = _onnx(site), site.work / "trtexec" / MODEL
        what = f"{pipeline.name}'s engine with {described(version)}"
        script = reproduce_script(build.argv, onnx=onnx, plan=plan, what=what)
        plan.rename(site.product / MODEL)
        shutil.copyfile(site.materials["export"] / "signature.json", site.product / "signature.json")
        return Built(metrics=dict(output.metrics), details={"passport": passport, "reproduce.sh": script})

    @staticmethod
    def tolerance(pipeline: Pipeline) -> Parity:
        """Wider than `gates.parity` for a lower precision."""
        return tolerance_of(pipeline)

    @staticmethod
    def check_graph(pipeline: Pipeline, *, opset: int, ir_version: int) -> None:
        """Raise `ConfigError` for an opset that the target's parser does not take. It takes every IR version."""
        version = declared_version(config_of(pipeline))
        if version is not None:
            _check_opset(version, opset)

    @staticmethod
    def preview(pipeline: Pipeline) -> tuple[str, ...]:
        """For `plan`: the target, what it carries, and where it is built."""
        config, place, release = config_of(pipeline), place_of(pipeline), release_of(config_of(pipeline))
        version = declared_version(config)
        target = f" for Triton {release.name}" if release is not None else ""
        lines = [f"builds{target} with {described(version)}, for compute capability {_capability(config)}"]
        lines.append(f"in the image {place.image}" if place.image else f"with the program {place.trtexec}")
        if release is not None and release.minimum_driver is not None:
            lines.append(f"needs a driver from {release.minimum_driver} on (CUDA {release.cuda})")
        if config.precision not in ("fp32", "tf32"):
            typed = converts(config, version)
            lines.append(f"{config.precision} comes {'with the graph' if typed else 'from a flag of trtexec'}")
        lines.append(f"timing cache {timing_cache(pipeline)}")
        return tuple(lines)

    @staticmethod
    def conversion(pipeline: Pipeline) -> Conversion | None:
        """Always on TensorRT 11 in a lower precision; on 10 for int8 and fp8, or where it is asked for."""
        config = config_of(pipeline)
        if config.precision == "fp32" or config.precision == "tf32" or not converts(config, declared_version(config)):  # noqa: PLR1714 - mypy narrows by `==` alone
            return None
        return Conversion(
            precision=config.precision,
            quantizer=config.quantizer,
            keep_fp32=config.keep_fp32,
            calibration_samples=config.calibration_samples,
            parity=tolerance_of(pipeline),
        )

    @staticmethod
    def preflight(pipeline: Pipeline) -> Preflight | None:
        """Where `engine.preflight` asks for it."""
        config = config_of(pipeline)
        if config.preflight == "none":
            return None
        return Preflight(profiles=profiles_of(pipeline), compute_capability=config.compute_capability)

    @staticmethod
    def profiles(pipeline: Pipeline) -> int:
        """As many as the engine is built with."""
        return len(profiles_of(pipeline))

    @staticmethod
    def unfit(details: Mapping[str, Any], server: ServerFacts) -> list[str]:
        """By the passport: another TensorRT, or another generation of GPUs."""
        return mismatches(details["passport"], server)


def timing_cache(pipeline: Pipeline) -> Path:
    """Beside the store, since it changes: one per TensorRT version and GPU generation, each under a lock."""
    config = config_of(pipeline)
    version = declared_version(config)
    name = f"tensorrt-{UNKNOWN if version is None else version_text(version)}-sm{_capability(config)}"
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


def _request(pipeline: Pipeline, version: Version, onnx: Path, plan: Path, cache: Path, layers: Path) -> BuildRequest:
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
        plugins=[_plugin(pipeline, path) for path in config.plugins],
        timing_cache=cache,
        layer_info=layers,
        measure=config.measure,
        extra_flags=config.extra_flags,
    )


def _plugin(pipeline: Pipeline, path: str) -> Path:
    file = (pipeline.folder / path).resolve()
    if not file.is_file():
        raise ConfigError(Problem(f"there is no plugin {file}", field="engine.plugins"))
    return file


def _capability(config: TensorRTConfig) -> str:
    if config.compute_capability is not None:
        return config.compute_capability
    found = probe.gpus()
    return found[0].compute_capability if found else UNKNOWN


def _version_unknown(config: TensorRTConfig) -> Version:
    release = release_of(config)
    if release is not None:
        raise ConfigError(
            Problem(
                f"our table does not know which TensorRT Triton {release.name} carries",
                field="engine.target",
                hint="say it as engine.tensorrt: `trtexec` inside the image prints it in its first line",
            )
        )
    raise ConfigError(
        Problem(
            "names no TensorRT to build with, and a plan loads in no other",
            field="engine",
            hint="name the Triton release that serves as engine.target, or TensorRT's version as engine.tensorrt",
        )
    )


def _check_opset(version: Version, opset: int) -> None:
    highest = highest_tensorrt_opset(version)
    if highest is not None and opset > highest:
        raise ConfigError(
            Problem(
                f"opset {opset} is newer than TensorRT {version_text(version)} reads, which is {highest}",
                field="export.opset_version",
                hint=f"set export.opset_version to {highest} or less, or choose a later engine.target",
            )
        )


def _header(plan: Path, config: TensorRTConfig, failed: CommandFailed) -> PlanHeader | None:
    try:
        header = read_plan_header(plan)
    except ValueError as error:
        if config.version_compatible and plan.exists() and plan.stat().st_size > 1 << 20:
            return None  # it begins with a lean runtime, whose header we do not know
        raise CommandFailed(
            failed.what,
            argv=failed.argv,
            ended="exit status 0, but without a valid plan",
            log=failed.log,
            last_lines=failed.last_lines,
            cause=f"trtexec said that it passed, and yet {error}: {plan}",
        ) from error
    if header.kind != "tensorrt":
        raise CommandFailed(
            failed.what,
            argv=failed.argv,
            ended="exit status 0",
            log=failed.log,
            cause="the plan is one of TensorRT-RTX, which Triton does not load: the wrong builder ran",
        )
    return header


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
    built, asked = passport["compute_capability"], _capability(config)
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


def _json(profiles: Sequence[Mapping[str, Mapping[str, Sequence[int]]]]) -> list[dict[str, Any]]:
    return [{end: {name: list(shape) for name, shape in at.items()} for end, at in p.items()} for p in profiles]
