"""Engine kind `tensorrt`: the exported graph compiled by `trtexec`, for one TensorRT version and one GPU generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tasks.artifacts.digest import hash_file
from tasks.config import EngineConfig, Parity, Pipeline, keyed
from tasks.engines import Conversion, EngineBase, Preflight
from tasks.engines.passport import ServerFacts, mismatches
from tasks.engines.tensorrt_build import (
    MODEL,
    UNKNOWN,
    build_steps,
    capability_of,
    judge_build,
    plugin_file,
    profiles_json,
    timing_cache,
)
from tasks.engines.tensorrt_checks import check, check_opset
from tasks.engines.tensorrt_config import (
    TensorRTConfig,
    config_of,
    converts,
    place_of,
    profiles_of,
    release_of,
    tolerance_of,
)
from tasks.engines.tensorrt_version import version_hint, version_of
from tasks.stage import Built, KeyParts, Site, Step
from tasks.toolchain.triton_releases import described
from tasks.toolchain.trtexec import Precision, version_text

_NOT_AS_WRITTEN = (
    # In the key as what they mean: derived shapes, and the libraries' bytes.
    *("profiles", "plugins"),
    # Of the stage `precision`, whose product is a material: a conversion that gives the same bytes rebuilds nothing.
    *("keep_fp32", "quantizer", "calibration_samples", "parity"),
)


class TensorRTEngine(EngineBase):
    """Built where a GPU of the serving kind is; planned, and checked as far as that goes, anywhere."""

    Config: ClassVar[type[EngineConfig]] = TensorRTConfig
    platform: ClassVar[str] = "tensorrt_plan"
    model_file: ClassVar[str] = MODEL
    reproducible: ClassVar[bool] = False  # TensorRT chooses kernels by timing them

    @staticmethod
    def check(pipeline: Pipeline) -> None:
        """Everything that can be known before an hour of training: the version, the graph's opset, the tools, a GPU."""
        check(pipeline)

    @staticmethod
    def parts(pipeline: Pipeline) -> KeyParts:
        """The fields that change the plan; TensorRT's version and the compute capability as the environment."""
        config = config_of(pipeline)
        version = version_of(pipeline)
        shapes = [{"min": p.min, "opt": p.opt, "max": p.max} for p in profiles_of(pipeline)]
        plugins = [str(hash_file(plugin_file(pipeline, path))) for path in config.plugins]
        own = {name: value for name, value in keyed(config).items() if name not in _NOT_AS_WRITTEN}
        return KeyParts(
            config={**own, "profiles": profiles_json(shapes), "plugins": plugins},
            environment={
                "tensorrt": UNKNOWN if version is None else version_text(version),
                "compute_capability": capability_of(config),
            },
        )

    @staticmethod
    def steps(site: Site) -> tuple[Step, ...]:
        """Ask the GPU, then build; both in the same place. Pure, and the same on a machine without a GPU."""
        return build_steps(site)

    @staticmethod
    def collect(site: Site) -> Built:
        """Judge what the builder left, keep the plan, and write its passport."""
        return judge_build(site)

    @staticmethod
    def tolerance(pipeline: Pipeline) -> Parity:
        """Wider than `gates.parity` for a lower precision."""
        return tolerance_of(pipeline)

    @staticmethod
    def precision(pipeline: Pipeline) -> Precision:
        """As asked for."""
        return config_of(pipeline).precision

    @staticmethod
    def check_graph(pipeline: Pipeline, *, opset: int, ir_version: int) -> None:
        """Raise `ConfigError` for an opset that the target's parser does not take. It takes every IR version."""
        version = version_of(pipeline)
        if version is not None:
            check_opset(version, opset)

    @staticmethod
    def preview(pipeline: Pipeline) -> tuple[str, ...]:
        """For `plan`: the target, what it carries, and where it is built."""
        config, place, release = config_of(pipeline), place_of(pipeline), release_of(config_of(pipeline))
        version = version_of(pipeline)
        target = f" for Triton {release.name}" if release is not None else ""
        lines = [f"builds{target} with {described(version)}, for compute capability {capability_of(config)}"]
        if version is None:
            assumed = "the commands are those of TensorRT 11"
            told = "name engine.target or engine.tensorrt" if release is None else version_hint(release, place)
            lines.append(f"a run refuses, and {assumed}: {told}")
        if capability_of(config) == UNKNOWN:
            lines.append("a run refuses without a GPU of the serving kind, or engine.compute_capability and a launcher")
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
        if config.precision == "fp32" or config.precision == "tf32" or not converts(config, version_of(pipeline)):  # noqa: PLR1714 - mypy narrows by `==` alone
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
    def expected(pipeline: Pipeline) -> Mapping[str, Any] | None:
        """The passport that the pipeline file, and this machine's GPU, promise."""
        config = config_of(pipeline)
        version, capability = version_of(pipeline), capability_of(config)
        return {
            "passport": {
                "tensorrt": None if version is None else version_text(version),
                "compute_capability": None if capability == UNKNOWN else capability,
                "gpu": "",
                "hardware_compatibility": config.hardware_compatibility,
                "version_compatible": config.version_compatible,
                "strip_weights": config.strip_weights,
            }
        }

    @staticmethod
    def unfit(details: Mapping[str, Any], server: ServerFacts) -> list[str]:
        """By the passport: another TensorRT, or another generation of GPUs."""
        return mismatches(details["passport"], server)
