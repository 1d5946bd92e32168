"""Builds an environment with a real Triton for this machine's processor, from ordinary Python packages."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.errors import NotReady, Refused, ToolMissing
from tasks.toolchain import triton_client
from tasks.toolchain.command import run
from tasks.toolchain.triton_installation import (
    DESCRIPTION,
    FORMAT,
    TritonInstallation,
    assembled,
    backend_digest,
    backends_folder,
    containers_folder,
    description,
    in_folder,
    requirements_digest,
    site_packages,
)
from tasks.toolchain.triton_server import staging

PYTHONS = ("3.11", "3.12")
"""For these the pinned numpy, the pinned onnxruntime and Triton's python stub all exist."""
GLIBC = (2, 35)
"""What the wheel that carries Triton was built for."""

# An ONNX model of one Identity node (IR 7, opset 13), x FLOAT [b, 1] to y: what `_prove` serves.
IDENTITY = bytes.fromhex(
    "08073a390a100a01781201792208"
)


def setup(folder: Path, *, say: Callable[[str], None]) -> TritonInstallation:
    """Builds the environment in `folder` (350 MB) and proves that it serves; returns at once where it is there already.

    `say` gets a line per step. It appears in `folder` whole or not at all; its log is `<folder>.log`. A second call at the
    same time waits for the first. Raises ToolMissing (what of the system is missing), CommandFailed (pip), NotReady (it
    does not serve), Refused (`folder` holds something else).
    """
    folder = folder.absolute()
    with _lock(folder):
        made = description(folder)
        if made is not None and made["requirements"] == requirements_digest():
            if made["backend"] != backend_digest():
                say("bringing the backend up to date")
                _assemble_backends(folder, made["python"])
                _describe(folder, python=made["python"], version=made["version"])
            return in_folder(folder)
        if folder.exists() and any(folder.iterdir()) and not (folder / DESCRIPTION).is_file():
            raise Refused(f"{folder} holds something else than a Triton of ours\nname an empty or a new folder")
        python, version = _base_python()
        building = folder.with_name(folder.name + ".building")
        shutil.rmtree(building, ignore_errors=True)
        _install(building, python, version, log=folder.with_name(folder.name + ".log"), say=say)
        _assemble_backends(building, version)
        _check_libraries(building, version)
        say("serving a model for a test")
        server = _prove(assembled(building, python=version, version="unknown"), building / "test")
        _describe(building, python=version, version=server)
        former = folder.with_name(folder.name + ".old")
        shutil.rmtree(former, ignore_errors=True)
        if folder.exists():
            folder.rename(former)
        building.rename(folder)
        shutil.rmtree(former, ignore_errors=True)
    say(f"Triton {server} is ready in {folder}")
    return in_folder(folder)
