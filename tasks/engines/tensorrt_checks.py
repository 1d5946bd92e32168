"""What can be known of a TensorRT engine before an hour of training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NoReturn

from tasks.config import Pipeline
from tasks.engines.tensorrt_build import MODEL, build_request
from tasks.engines.tensorrt_config import (
    TensorRTConfig,
    config_of,
    declared_version,
    place_of,
    profiles_of,
    release_of,
)
from tasks.engines.tensorrt_version import installed_version, version_hint
from tasks.errors import ConfigError, Problem, ToolMissing
from tasks.toolchain import probe
from tasks.toolchain.triton_releases import highest_tensorrt_opset
from tasks.toolchain.trtexec import Version, trtexec_command, version_text
from tasks.toolchain.trtexec.place import Place


def check(pipeline: Pipeline) -> None:
    """Everything that can be known before an hour of training: the version, the graph's opset, the tools, a GPU."""
    config, place = config_of(pipeline), place_of(pipeline)
    profiles_of(pipeline)
    declared, installed = declared_version(config), installed_version(place)
    version = declared or installed
    if version is None:
        if config.builder.trtexec is not None:
            _check_place(place)  # it would have told
        _version_unknown(config, place)
    check_opset(version, pipeline.export.opset_version)
    trtexec_command(
        "trtexec", build_request(pipeline, version, Path("model.onnx"), Path(MODEL), Path("cache"), Path("l"))
    )
    _check_place(place)
    if installed is not None and installed != version:
        raise ConfigError(
            Problem(
                f"TensorRT {version_text(version)} shall build, and {shutil.which(place.trtexec)} is of "
                f"{version_text(installed)}",
                field="engine.target" if config.tensorrt is None else "engine.tensorrt",
                hint="name the trtexec of that version as engine.builder.trtexec, build in the image with "
                "engine.builder.kind: docker, or name the Triton release that carries this one",
            )
        )
    _check_gpu(config, place)


def _check_gpu(config: TensorRTConfig, place: Place) -> None:
    if place.launcher:
        if config.compute_capability is None:
            raise ConfigError(
                Problem(
                    "is not given, and engine.builder.launcher reaches a machine that cannot be asked beforehand",
                    field="engine.compute_capability",
                    hint="say that of the serving GPU, such as 9.0 for an H200; the build is held against it",
                )
            )
        return
    here = [gpu.compute_capability for gpu in probe.gpus()]
    if not here:
        raise ToolMissing(
            "an NVIDIA GPU",
            why="an engine is built on a GPU of the kind that serves, and nvidia-smi names none here",
            mend=(
                "Run this on the GPU machine, or name an engine.builder.launcher that reaches one and "
                "engine.compute_capability. `enginehouse run --until preflight` with engine.preflight: tensorrt-rtx "
                "checks the graph without a GPU; `enginehouse plan` shows the commands."
            ),
        )
    if config.compute_capability not in (None, *here):
        raise ConfigError(
            Problem(
                f"{config.compute_capability} is asked for, and the GPUs here have {', '.join(here)}",
                field="engine.compute_capability",
                hint="build on a GPU of the kind that serves: run this there, or name an engine.builder.launcher",
            )
        )


def _check_place(place: Place) -> None:
    if not place.launcher and shutil.which("flock") is None:
        raise ToolMissing(
            "flock",
            why="it keeps two builds off one GPU and one timing cache",
            mend="Install util-linux, which every Linux distribution has.",
        )
    if place.launcher and shutil.which(place.launcher[0]) is None:
        raise ToolMissing(
            place.launcher[0],
            why="engine.builder.launcher begins with it, and it is no program here",
            mend="Run this where it is, such as a login node of the cluster, or name another launcher.",
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
        found = "is not executable" if Path(place.trtexec).is_file() else "is no program here"
        raise ToolMissing(
            "trtexec",
            why=f"engine.kind: tensorrt builds with it, and {place.trtexec} {found}",
            mend=(
                "Name the Triton release as engine.target to build inside its image with Docker, name the program "
                "as engine.builder.trtexec, or serve the graph itself: `engine: {kind: onnxruntime}`."
            ),
        )


def _version_unknown(config: TensorRTConfig, place: Place) -> NoReturn:
    release = release_of(config)
    if release is not None:
        raise ConfigError(
            Problem(
                f"our table does not know which TensorRT Triton {release.name} carries",
                field="engine.target",
                hint=version_hint(release, place),
            )
        )
    raise ConfigError(
        Problem(
            "names no TensorRT to build with, and a plan loads in no other",
            field="engine",
            hint="name the Triton release that serves as engine.target, or TensorRT's version as engine.tensorrt; that "
            "of a trtexec on this machine is found by itself",
        )
    )


def check_opset(version: Version, opset: int) -> None:
    highest = highest_tensorrt_opset(version)
    if highest is not None and opset > highest:
        raise ConfigError(
            Problem(
                f"opset {opset} is newer than TensorRT {version_text(version)} reads, which is {highest}",
                field="export.opset_version",
                hint=f"set export.opset_version to {highest} or less, or choose a later engine.target",
            )
        )
