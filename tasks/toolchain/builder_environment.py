"""Environments of their own for the tools whose pins fit no other: ModelOpt, and TensorRT-RTX.

Each is made once, from a pinned list in `containers/builder/`, by `enginehouse engine setup NAME`. A half-made one is
never found: it counts from the moment that its mark, written last, names the list it was made from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.errors import ToolMissing
from tasks.toolchain.command import Runner, run

Name = Literal["modelopt", "tensorrt-rtx"]

NAMES: tuple[Name, ...] = ("modelopt", "tensorrt-rtx")

_WHAT: dict[Name, str] = {
    "modelopt": "puts fp16, bf16, int8 and fp8 into the graph (about 1.5 GB, with a CPU build of PyTorch)",
    "tensorrt-rtx": "compiles the graph on the CPU before a GPU is paid for (about 400 MB)",
}
_MARK = "enginehouse-requirements.sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderEnvironment:
    """One of them, made or not."""

    name: Name
    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter; the path is known before it is made, so that a plan can show it."""
        return self.folder / "bin" / "python"

    @property
    def is_ready(self) -> bool:
        """Whether it was made, completely, from today's list."""
        mark = self.folder / _MARK
        return mark.is_file() and mark.read_text() == requirements_digest(self.name) and self.python.exists()


def find_environment(name: Name) -> BuilderEnvironment:
    """`$ENGINEHOUSE_MODELOPT` or `$ENGINEHOUSE_TENSORRT_RTX`, else `<sys.prefix>/share/enginehouse/<name>`."""
    named = os.environ.get(f"ENGINEHOUSE_{name.upper().replace('-', '_')}")
    return BuilderEnvironment(name=name, folder=Path(named or Path(sys.prefix, "share", "enginehouse", name)))


def require(name: Name) -> BuilderEnvironment:
    """The environment, ready to use. Raises `ToolMissing` naming the command that makes it."""
    found = find_environment(name)
    if not found.is_ready:
        raise ToolMissing(
            name,
            why=f"it {_WHAT[name]}, and {found.folder} is no environment made from our list of versions",
            mend=f"Make it with `enginehouse engine setup {name}`.",
        )
    return found


def requirements(name: Name) -> Path:
    """The pinned list, in the source tree or in an installed wheel."""
    spec = importlib.util.find_spec("tasks")
    assert spec is not None
    assert spec.origin is not None
    tasks = Path(spec.origin).parent
    inside = tasks / "containers" / "builder" / f"{name}.txt"
    return inside if inside.is_file() else tasks.parent / "containers" / "builder" / f"{name}.txt"


def requirements_digest(name: Name) -> str:
    """Of the list, with the interpreter that the packages are for."""
    text = requirements(name).read_bytes() + repr(sys.version_info[:2]).encode()
    return hashlib.sha256(text).hexdigest()


def setup(
    name: Name, *, say: Callable[[str], None], folder: Path | None = None, runner: Runner = run
) -> BuilderEnvironment:
    """Make the environment, or find it made. Raises `CommandFailed` when pip fails; the next call begins anew."""
    environment = find_environment(name) if folder is None else BuilderEnvironment(name=name, folder=folder)
    if environment.is_ready:
        return environment
    shutil.rmtree(environment.folder, ignore_errors=True)
    environment.folder.parent.mkdir(parents=True, exist_ok=True)
    log = environment.folder.with_suffix(".log")
    what = f"the setup of {name}"
    runner([sys.executable, "-m", "venv", str(environment.folder)], log=log, what=what, timeout=300.0, on_line=say)
    pip = [str(environment.python), "-m", "pip", "install", "--disable-pip-version-check"]
    runner([*pip, "--requirement", str(requirements(name))], log=log, what=what, timeout=3600.0, on_line=say)
    (environment.folder / _MARK).write_text(requirements_digest(name))
    return environment
