"""Where `trtexec` runs: a program on this machine, or one inside NVIDIA's image, behind a launcher if there is one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

IMAGE_TRTEXEC = "/usr/src/tensorrt/bin/trtexec"
"""Where NVIDIA's Triton and TensorRT images have it."""

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
"""One line per GPU: `NVIDIA H200, 9.0, 580.95.05`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A way to run a program where TensorRT is."""

    trtexec: str
    launcher: tuple[str, ...] = ()
    """Stands before everything: `srun --gpus=1` on a cluster."""
    image: str | None = None
    """The container image; `None` runs on the machine itself."""
    gpus: str = "device=0"
    """As `docker run --gpus` takes it."""
    docker: str = "docker"

    def command(self, argv: Sequence[str], *, folders: Mapping[Path, bool], lock: Path | None) -> list[str]:
        """The whole command line for `argv`.

        `folders` are mounted at their own paths, so that the command reads the same inside and outside; the value says
        whether it may write there. `lock` is a file that keeps two builds off one GPU and one timing cache: whoever
        comes second waits. `flock` and the lock end with the process, however it ends.
        """
        # Without a fork, so that a signal that ends the builder is still seen as one.
        locked = ["flock", "--no-fork", str(lock)] if lock is not None else []
        if self.image is None:
            return [*self.launcher, *locked, *argv]
        mounts = [
            f"--volume={folder}:{folder}{'' if writable else ':ro'}" for folder, writable in sorted(folders.items())
        ]
        return [
            *self.launcher,
            *locked,
            self.docker,
            "run",
            "--rm",
            # An init passes our SIGTERM on; without it the builder, as process 1, would not hear it.
            "--init",
            f"--gpus={self.gpus}",
            # Building needs nothing from outside.
            "--network=none",
            f"--user={os.getuid()}:{os.getgid()}",
            "--env=HOME=/tmp",
            "--workdir=/tmp",
            *mounts,
            # The image's own entry point stays: it makes CUDA's forward compatibility work on older drivers.
            self.image,
            *argv,
        ]


def read_gpus(lines: Sequence[str]) -> list[dict[str, str]]:
    """What `NVIDIA_SMI` printed: `gpu`, `compute_capability` and `driver` of each GPU; other lines are passed over."""
    found = []
    for line in lines:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == len(("gpu", "compute_capability", "driver")) and parts[1].replace(".", "").isdigit():
            found.append({"gpu": parts[0], "compute_capability": parts[1], "driver": parts[2]})
    return found
