"""The header of a serialized engine, which tells without a GPU whether it is one, and which TensorRT wrote it.

Layout, as observed (NVIDIA documents none):

    bytes 0-3     `ftrt`, or `vtrt` for TensorRT-RTX
    bytes 4-7     version of the serialisation, little endian
    bytes 24-27   version of TensorRT: major, minor, patch, build
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.toolchain.trtexec.options import Version

MAGIC: dict[bytes, Literal["tensorrt", "tensorrt-rtx"]] = {b"ftrt": "tensorrt", b"vtrt": "tensorrt-rtx"}
HEADER_BYTES = 28
SMALLEST = 1024
"""Bytes; the smallest engine of one identity layer takes several kB, so that less is a file that was cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHeader:
    """What the first bytes of a plan say."""

    kind: Literal["tensorrt", "tensorrt-rtx"]
    serialization_version: int
    tensorrt: Version
    build: int
    """The fourth number of the version."""
    size: int
    """Bytes of the whole file."""

    def to_json(self) -> dict[str, Any]:
        """For a build record."""
        return {
            "kind": self.kind,
            "serialization_version": self.serialization_version,
            "tensorrt": ".".join(map(str, (*self.tensorrt, self.build))),
            "size": self.size,
        }


def read_plan_header(path: Path) -> PlanHeader:
    """Read the header of a plan.

    Raises `ValueError` with what is wrong: no such file, too short, or another kind of file.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
        size = path.stat().st_size
    except FileNotFoundError:
        raise ValueError("there is no plan") from None
    if size == 0:
        raise ValueError("the plan is empty")
    kind = MAGIC.get(head[:4])
    if kind is None:
        raise ValueError(f"it is no TensorRT plan: it begins with {head[:4]!r}, expected {b'ftrt'!r}")
    if size < SMALLEST:
        raise ValueError(f"the plan is cut off: {size} bytes")
    (serialization_version,) = struct.unpack_from("<I", head, 4)
    major, minor, patch, build = head[24:28]
    return PlanHeader(
        kind=kind,
        serialization_version=serialization_version,
        tensorrt=(major, minor, patch),
        build=build,
        size=size,
    )
