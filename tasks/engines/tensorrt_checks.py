"""What can be known of a TensorRT engine before an hour of training."""

from __future__ import annotations

import shutil
from pathlib import Path

from tasks.config import Pipeline
from tasks.engines.tensorrt_build import MODEL, UNKNOWN, build_request, capability_of
from tasks.engines.tensorrt_config import (
    TensorRTConfig,
    config_of,
    declared_version,
    place_of,
    profiles_of,
    release_of,
)
from tasks.errors import ConfigError, Problem, ToolMissing
from tasks.toolchain.triton_releases import highest_tensorrt_opset
from tasks.toolchain.trtexec import Version, trtexec_command, version_text


def check(pipeline: Pipeline) -> None:
    """Everything that can be known before an hour of training: the version, the graph's opset, the tools, a GPU."""
    config, place = config_of(pipeline), place_of(pipeline)
    profiles_of(pipeline)
    version = declared_version(config) or _version_unknown(config)
    check_opset(version, pipeline.export.opset_version)
    trtexec_command(
        "trtexec", build_request(pipeline, version, Path("model.onnx"), Path(MODEL), Path("cache"), Path("l"))
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
    if capability_of(config) == UNKNOWN:
        raise ToolMissing(
            "an NVIDIA GPU",
            why="an engine is built on a GPU of the kind that serves, and nvidia-smi names none here",
            mend=(
                "Run this on the GPU machine, or name engine.compute_capability and an engine.builder.launcher "
                "that reaches one. `enginehouse run --until preflight` with engine.preflight: tensorrt-rtx checks "
                "the graph without a GPU; `enginehouse plan` shows the commands."
            ),
        )


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
