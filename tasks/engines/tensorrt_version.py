"""Which TensorRT builds an engine: as the pipeline file says, or as the `trtexec` on this machine tells."""

from __future__ import annotations

import shutil

from tasks.config import Pipeline
from tasks.engines.tensorrt_config import config_of, declared_version, place_of
from tasks.errors import CommandFailed, ConfigError, EnginehouseError, Problem, ToolMissing
from tasks.toolchain import probe
from tasks.toolchain.triton_releases import TritonRelease
from tasks.toolchain.trtexec import Version, generation_problem, read_output
from tasks.toolchain.trtexec.failures import failure_of
from tasks.toolchain.trtexec.place import IMAGE_TRTEXEC, Place


def version_hint(release: TritonRelease, place: Place) -> str:
    """How to find out which TensorRT a release carries that our table does not know."""
    image = place.image or release.image
    return (
        f"say it as engine.tensorrt: `docker run --rm {image} {IMAGE_TRTEXEC} --help` prints it in its first line, "
        "such as v110201 for 11.2.1"
    )


def version_of(pipeline: Pipeline) -> Version | None:
    """The version that builds: as declared, else that of the `trtexec` that would run on this machine.

    `None` where nobody tells; why a `trtexec` that is there does not tell is for `installed_version` to say.
    """
    declared = declared_version(config_of(pipeline))
    if declared is not None:
        return declared
    try:
        return installed_version(place_of(pipeline))
    except EnginehouseError:
        return None


def installed_version(place: Place) -> Version | None:
    """What the `trtexec` on this machine says that it is, in the first line of its help; needs no GPU.

    `None` where it runs elsewhere (an image, a launcher) or is not there. Raises `ConfigError` for a program that is no
    `trtexec`, and the known failure of one that cannot start, such as a library that is missing.
    """
    program = None if place.image is not None or place.launcher else shutil.which(place.trtexec)
    if program is None:
        return None
    try:
        lines = probe.help_of(program)
    except (OSError, TimeoutError) as error:
        raise ToolMissing(
            "trtexec", why=f"{program} does not run: {error}", mend="Name another as engine.builder.trtexec."
        ) from error
    version = read_output(lines).version
    if version is not None:
        if (problem := generation_problem(version)) is not None:
            raise ConfigError(Problem(f"{program} is of it, and {problem}", field="engine.builder.trtexec"))
        return version
    failure = CommandFailed(
        "asking trtexec for its version", argv=[program, "--help"], ended="exit status", last_lines=lines[:20]
    )
    if (known := failure_of(failure, lines)) is not failure:
        raise known
    raise ConfigError(
        Problem(
            f"{program} is no trtexec: `{program} --help` does not begin with `&&&& RUNNING TensorRT.trtexec "
            f"[TensorRT v…]`, but with {lines[0] if lines else 'nothing'!r}",
            field="engine.builder.trtexec",
            hint="name NVIDIA's program, in its packages /usr/src/tensorrt/bin/trtexec",
        )
    )
