"""What is on this machine: distributions, GPUs, processor, interpreter; found without importing anything heavy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU as the driver names it."""

    name: str
    compute_capability: str
    """Such as `9.0`."""
    memory_mib: int
    driver: str


def distribution_version(name: str) -> str | None:
    """The installed version of a distribution (such as `torch`), read from its metadata; None where it is not installed."""
    raise NotImplementedError


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that `nvidia-smi` reports; none where there is no driver."""
    raise NotImplementedError


def environment(names: Iterable[str]) -> dict[str, str]:
    """For a build record: `python`, `platform`, `cpu`, `cpus`, `gpus`, and `<name>` for each distribution named
    ("not installed" where it is not). Values are text."""
    raise NotImplementedError
