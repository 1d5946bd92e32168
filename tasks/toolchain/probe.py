"""What is on this machine: distributions, GPUs, processor, interpreter; found without importing anything heavy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU as the driver names it."""

    name: str
    compute_capability: str
    """Such as `9.0`."""
    memory_mib: int
    driver: str


def distribution_version(name: str) -> str | None:
    """The installed version of a distribution (such as `torch`), from its metadata; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs that `nvidia-smi` reports; none where there is no driver. Asked once per process."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    fields = "name,compute_cap,memory.total,driver_version"
    try:
        told = subprocess.run(
            [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()  # a driver that hangs or cannot be executed is no GPU that we could use
    return parse_gpus(told.stdout) if told.returncode == 0 else ()


@cache
def help_of(program: str) -> tuple[str, ...]:
    """The lines that a program prints on `--help`, stdout and stderr together. Asked once per process.

    Raises `OSError` for one that cannot be executed, and `TimeoutError` for one that does not end.
    """
    try:
        told = subprocess.run(
            [program, "--help"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"`{program} --help` did not end within a minute") from None
    return tuple(told.stdout.splitlines())


def parse_gpus(csv: str) -> tuple[Gpu, ...]:
    """`nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version --format=csv,noheader,nounits`."""
    rows = [[cell.strip() for cell in line.rsplit(",", 3)] for line in csv.splitlines() if line.strip()]
    return tuple(
        Gpu(name=name, compute_capability=capability, memory_mib=int(memory), driver=driver)
        for name, capability, memory, driver in rows
    )


def processor() -> str:
    """The processor's model as the kernel names it, such as `AMD EPYC 7763`."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def versions(names: Iterable[str]) -> dict[str, str]:
    """For a stage's key: Python's version without its last part, and each distribution's (`not installed` where it is
    not). Nothing of the machine: another one, or another kernel, changes no product of ours."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: distribution_version(name) or "not installed" for name in names},
    }


def environment(names: Iterable[str]) -> dict[str, str]:
    """For a build record: `python`, `platform`, `cpu`, `cpus` (those that we may use), `gpus`, and each distribution
    named (`not installed` where it is not). Values are text."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": processor(),
        "cpus": str(len(os.sched_getaffinity(0))),
        "gpus": ", ".join(f"{gpu.name} ({gpu.compute_capability})" for gpu in gpus()) or "none",
        **{name: distribution_version(name) or "not installed" for name in names},
    }
