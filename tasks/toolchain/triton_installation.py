"""Finds a Triton that can be started on this machine; `triton_setup` makes one where there is none."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.errors import ToolMissing

VARIABLE = "ENGINEHOUSE_TRITON"
DESCRIPTION = "installation.json"
"""Written last by `setup`, so what has none is not finished."""
FORMAT = 1
"""Of the description."""
SETUP = "set one up with `enginehouse serve setup` (310 MB), or install NVIDIA's tritonserver and put it on the PATH"


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonInstallation:
    """A `tritonserver` that can be started."""

    tritonserver: Path
    version: str
    """Of the server, such as `2.51.0`; `unknown` where a native one does not say."""
    backends: Literal["cpu stand-in", "native"]
    """`cpu stand-in`: made by `setup`, serves ONNX models with our python-based backend. `native`: NVIDIA's own."""
    arguments: tuple[str, ...]
    """What every start of it needs (backend directory…)."""
    environment: tuple[tuple[str, str], ...]
    """Environment variables to set on top of ours (LD_LIBRARY_PATH, PATH)."""


def default_folder() -> Path:
    """`<sys.prefix>/share/enginehouse/triton`."""
    return Path(sys.prefix, "share", "enginehouse", "triton")


def find_installation() -> TritonInstallation:
    """$ENGINEHOUSE_TRITON (a folder made by `setup`, or a tritonserver binary), else `tritonserver` on the PATH, else
    what is in the default folder. Reads a few small files.

    Raises ToolMissing where there is none, or where the folder was made for another version of us.
    """
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named).absolute()
        return in_folder(path, f"${VARIABLE} names {path}, where") if path.is_dir() else _native(path)
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return _native(Path(on_path))
    return in_folder(default_folder(), f"none is on the PATH, and in {default_folder()}")


def in_folder(folder: Path, where: str | None = None) -> TritonInstallation:
    """What `setup` made in `folder`; `where` begins the sentence that says why there is none. Raises ToolMissing."""
    made = description(folder)
    if made is None:
        raise ToolMissing("Triton", why=f"{where or f'in {folder}'} there is none that `setup` finished", mend=SETUP)
    if made["requirements"] != requirements_digest() or made["backend"] != backend_digest():
        raise ToolMissing(
            "Triton",
            why=f"the one in {folder} was set up by another version of Enginehouse",
            mend="bring it up to date with `enginehouse serve setup`",
        )
    return assembled(folder, python=made["python"], version=made["version"])


def description(folder: Path) -> dict[str, Any] | None:
    """What `setup` wrote about the installation in `folder`; None where none is finished or the format is another."""
    try:
        made: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
    except FileNotFoundError:
        return None
    return made if made.get("format") == FORMAT else None


def assembled(folder: Path, *, python: str, version: str) -> TritonInstallation:
    """The installation whose parts lie in `folder`, made with that Python (such as `3.11`)."""
    server = site_packages(folder, python) / "pytriton" / "tritonserver"
    return TritonInstallation(
        tritonserver=server / "bin" / "tritonserver",
        version=version,
        backends="cpu stand-in",
        arguments=(
            f"--backend-directory={backends_folder(folder)}",
            f"--cache-directory={server / 'caches'}",
            "--allow-gpu-metrics=false",
            # A laptop, not a server room: the usual eight HTTP threads would only be in each other's way.
            "--http-thread-count=2",
            "--model-load-thread-count=2",
        ),
        environment=(
            # All but libpython carry a hash in their names, so nothing else finds these by mistake.
            (
                "LD_LIBRARY_PATH",
                _joined("LD_LIBRARY_PATH", site_packages(folder, python) / "nvidia_pytriton.libs", folder / "lib"),
            ),
            # The stub takes its modules from the environment of the first `python3` on the PATH.
            ("PATH", _joined("PATH", folder / "env" / "bin")),
            ("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1")),
        ),
    )


def site_packages(folder: Path, python: str) -> Path:
    return folder / "env" / "lib" / f"python{python}" / "site-packages"


def backends_folder(folder: Path) -> Path:
    """Named by its contents: a running server keeps the one that it was started with."""
    return folder / f"backends-{backend_digest()[:12]}"


def containers_folder() -> Path:
    """The repository's `containers/`, or its copy in an installed wheel."""
    tasks = Path(__file__).resolve().parent.parent
    inside = tasks / "containers"
    return inside if inside.is_dir() else tasks.parent / "containers"


def requirements_digest() -> str:
    """sha256 of `containers/triton/requirements.txt`, in hex."""
    return hashlib.sha256((containers_folder() / "triton" / "requirements.txt").read_bytes()).hexdigest()


def backend_digest() -> str:
    """sha256 of the stand-in's code, in hex."""
    return hashlib.sha256(
        (containers_folder() / "triton" / "backends" / "onnxruntime" / "model.py").read_bytes()
    ).hexdigest()


def _native(binary: Path) -> TritonInstallation:
    if not (binary.is_file() and os.access(binary, os.X_OK)):
        raise ToolMissing(
            "Triton", why=f"${VARIABLE} names {binary}, which is neither a folder nor a program", mend=SETUP
        )
    # In NVIDIA's containers: /opt/tritonserver/bin/tritonserver beside /opt/tritonserver/TRITON_VERSION.
    version = binary.resolve().parent.parent / "TRITON_VERSION"
    return TritonInstallation(
        tritonserver=binary,
        version=version.read_text().strip()
        if version.is_file()
        else os.environ.get("TRITON_SERVER_VERSION", "unknown"),
        backends="native",
        arguments=(),
        environment=(),
    )


def _joined(variable: str, *folders: Path) -> str:
    former = os.environ.get(variable)
    return os.pathsep.join([*map(str, folders), *([former] if former else [])])
