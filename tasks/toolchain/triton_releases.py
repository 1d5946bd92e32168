"""What each monthly release of Triton's image carries: TensorRT, ONNX Runtime, CUDA, the driver it needs, and how new
an ONNX file it can read. Facts, each with its source; read on 2026-11-30.

Sources, as each release names them:

    SERVER   docs/introduction/compatibility.md of github.com/triton-inference-server/server, at 0f963c9 (26.08):
             ONNX Runtime; CUDA and driver of the images of that month
    NOTES    docs.nvidia.com/deeplearning/triton-inference-server/release-notes/rel-26-NN.html: CUDA, compute capability
    IMAGE    versions that users report from inside the image `nvcr.io/nvidia/tensorrt:YY.MM-py3` or
             `nvcr.io/nvidia/tritonserver:YY.MM-py3`: the matrix that NVIDIA publishes
             (docs.nvidia.com/deeplearning/frameworks/support-matrix) could not be read in full
    DYNAMO   the container matrix of github.com/ai-dynamo/dynamo, which builds on that image

What no source told stands as `None`, is never guessed, and has to be said in the pipeline file where it matters
(`engine.tensorrt`). `minimum_driver` is the driver that the release's CUDA was published with; NVIDIA's data centre
GPUs also run it on some older branches (CUDA forward compatibility), which `doctor` therefore only warns of.

ONNX Runtime's highest opset and IR version were measured by loading graphs with onnxruntime 1.22.0 to 1.28.0 from PyPI.
TensorRT's highest opset: its operators.md says 24 (10.15), the notes of 11.5 say 25. It names no IR version.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from tasks.toolchain.trtexec.options import Version, parse_version, version_text

REGISTRY = "nvcr.io/nvidia"


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonRelease:
    """One monthly release."""

    name: str
    """Year and month: `26.08`."""
    server: str | None
    """Triton's own version, such as `2.72.0`."""
    tensorrt: Version | None
    onnxruntime: str | None
    cuda: str
    minimum_driver: str | None
    source: str

    @property
    def image(self) -> str:
        """The image that serves."""
        return f"{REGISTRY}/tritonserver:{self.name}-py3"

    @property
    def tensorrt_opset(self) -> int | None:
        """The highest opset that its TensorRT parses; `None` where that is not known."""
        return None if self.tensorrt is None else highest_tensorrt_opset(self.tensorrt)

    @property
    def onnxruntime_limits(self) -> tuple[int, int] | None:
        """The highest opset and IR version that its ONNX Runtime loads; `None` where that was not measured."""
        return None if self.onnxruntime is None else onnxruntime_limits(self.onnxruntime)


MINIMUM_COMPUTE_CAPABILITY = "7.5"
"""Of every release in the table (NOTES)."""


def _release(
    name: str,
    server: str | None,
    tensorrt: str | None,
    onnxruntime: str | None,
    cuda: str,
    minimum_driver: str | None,
    source: str,
) -> TritonRelease:
    return TritonRelease(
        name=name,
        server=server,
        tensorrt=None if tensorrt is None else parse_version(tensorrt),
        onnxruntime=onnxruntime,
        cuda=cuda,
        minimum_driver=minimum_driver,
        source=source,
    )


RELEASES: tuple[TritonRelease, ...] = (
    _release("25.09", "2.61.0", None, "1.23.0", "13.0.1", "580.82.07", "SERVER"),
    _release("25.10", "2.62.0", "10.13.3", "1.23.1", "13.0.2", "580.95.05", "SERVER, IMAGE"),
    _release("25.11", "2.63.0", "10.14.1", "1.23.2", "13.0.2", "580.95.05", "SERVER, IMAGE"),
    _release("25.12", "2.64.0", "10.14.1", "1.23.2", "13.1.0", "590.44.01", "SERVER, IMAGE"),
    _release("26.01", "2.65.0", "10.14.1", "1.23.2", "13.1.1", "590.48.01", "SERVER, IMAGE"),
    _release("26.02", "2.66.0", "10.15.1", "1.24.1", "13.1.1", "590.48.01", "SERVER, NOTES, IMAGE"),
    _release("26.03", "2.67.0", "10.16.0", "1.24.2", "13.2.0", "595.45.04", "SERVER, IMAGE"),
    _release("26.04", "2.68.0", "10.16.1", "1.24.4", "13.2.1", "595.58.03", "SERVER, NOTES, IMAGE"),
    _release("26.05", "2.69.0", "10.16.1", "1.24.4", "13.2.1", "595.58.03", "SERVER, IMAGE"),
    _release("26.06", "2.70.0", "11.0.0", "1.24.4", "13.3.0", "610.43.02", "SERVER, NOTES, IMAGE"),
    _release("26.07", "2.71.0", "11.1.0", "1.27.0", "13.3.0", "610.43.02", "SERVER, IMAGE"),
    _release("26.08", "2.72.0", "11.2.1", "1.28.0", "13.4.1", "615.61", "SERVER, IMAGE"),
    _release("26.09", "2.73.0", None, None, "13.4.1", "615.61", "NOTES, DYNAMO"),
    _release("26.10", None, None, None, "13.4.3", None, "NOTES"),
)
"""Oldest first."""


_ONNXRUNTIME_LIMITS = (((1, 27), (26, 13)), ((1, 24), (25, 13)), ((1, 23), (23, 11)), ((1, 22), (22, 10)))
"""From this version on: highest opset, highest IR version. Measured."""


def onnxruntime_limits(version: str) -> tuple[int, int] | None:
    """The highest opset and IR version that an ONNX Runtime loads; `None` for one older than those measured.

    A version newer than those measured loads at least as much as the newest one that was.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return None
    asked = int(found[1]), int(found[2])
    return next((limits for since, limits in _ONNXRUNTIME_LIMITS if asked >= since), None)


def highest_tensorrt_opset(version: Version) -> int | None:
    """The highest opset that TensorRT's ONNX parser takes; `None` before 10.15, of which no source was found."""
    if version >= (11, 5, 0):
        return 25
    return 24 if version >= (10, 15, 0) else None


def release_name(text: str) -> str:
    """The plain name behind `26.08`, `26.08-py3`, `r26.08` or an image's whole name.

    >>> release_name("nvcr.io/nvidia/tritonserver:26.08-py3")
    '26.08'

    Raises `ValueError` for anything else.
    """
    found = re.fullmatch(r"(?:.*:)?r?(\d\d\.\d\d)(?:-[\w.-]+)?", text)
    if not found:
        raise ValueError(f"expected a Triton release such as {RELEASES[-3].name}, got {text!r}")
    return found[1]


_OUTSIDE = "; for another one leave engine.target out, and name engine.tensorrt (its TensorRT) and engine.builder.image"


def find_release(text: str) -> TritonRelease:
    """The release of that name. Raises `ValueError` for one that is not in the table, naming the nearest."""
    name = release_name(text)
    known = [release.name for release in RELEASES]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        mean = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"Triton release {name} is not in our table, which has {known[0]} to {known[-1]}{mean}{_OUTSIDE}"
        )
    return RELEASES[known.index(name)]


def release_text(value: object) -> object:
    """A pipeline file's value as a release's name: YAML reads `26.08` as a number. Other types are left to be refused.

    Nothing is lost: a month has two digits, so the number 26.1 can only have been written as 26.10.
    """
    text = f"{value:.2f}" if isinstance(value, float) else value
    return find_release(text).name if isinstance(text, str) else value


def release_of_server(version: str) -> TritonRelease | None:
    """The release with this version of Triton itself (`2.72.0`); `None` where the table has none."""
    return next((release for release in RELEASES if release.server == version), None)


def described(version: Version | None) -> str:
    """For a person: `TensorRT 11.2.1`, or that the table does not know it."""
    return "a TensorRT that our table does not know" if version is None else f"TensorRT {version_text(version)}"
