"""Builds an environment with a real Triton for this machine's processor, from ordinary Python packages."""

from __future__ import annotations

import fcntl
import http.client
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
from tasks.toolchain.triton_staging import staging

PYTHONS = ("3.11", "3.12")
"""For these the pinned numpy, the pinned onnxruntime and Triton's python stub all exist."""
GLIBC = (2, 35)
"""What the wheel that carries Triton was built for."""

IDENTITY = bytes.fromhex(
    "080712003a410a100a017812017922084964656e746974791201675a140a0178120f0a0d080112090a031201620a0208"
    "0162140a0179120f0a0d080112090a031201620a02080142040a00100d"
)
"""An ONNX model (IR 7, opset 13) of one Identity node, from `x` FLOAT [b, 1] to `y`."""
IDENTITY_CONFIG = """\
name: "identity"
platform: "onnxruntime_onnx"
max_batch_size: 4
input [{ name: "x" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [1] }]
"""


def setup(folder: Path, *, say: Callable[[str], None]) -> TritonInstallation:
    """Builds the environment in `folder` (350 MB) and proves that it serves; returns at once where it is there.

    `say` gets a line per step. It appears in `folder` whole or not at all; pip's log is `<folder>.log`. A second call
    at the same time waits for the first.

    Raises ToolMissing (something of the system), CommandFailed (pip), NotReady (it does not serve), Refused (`folder`
    holds something else).
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
            raise Refused(f"{folder} holds something else than a Triton that we set up\nname an empty or a new folder")
        version = _build(folder, say)
    say(f"Triton {version} is ready in {folder}")
    return in_folder(folder)


def _build(folder: Path, say: Callable[[str], None]) -> str:
    base, python = _base_python()
    building, former = (folder.with_name(folder.name + suffix) for suffix in (".building", ".former"))
    for left in (building, former):  # by a build that was killed
        shutil.rmtree(left, ignore_errors=True)
    _install(base, building, log=folder.with_name(folder.name + ".log"), say=say)
    _assemble_backends(building, python)
    _link_libpython(base, building, python)
    _check_libraries(building, python)
    say("asking it for a test")
    version = _prove(assembled(building, python=python, version="unknown"), building / "test")
    shutil.rmtree(building / "test")
    _describe(building, python=python, version=version)
    if folder.exists():
        folder.rename(former)
    building.rename(folder)
    shutil.rmtree(former, ignore_errors=True)
    return version


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _base_python() -> tuple[str, str]:
    """A Python outside any environment that the pinned packages exist for, and its version such as `3.11`."""
    libc, glibc = platform.libc_ver()
    if platform.machine() != "x86_64" or libc != "glibc" or tuple(map(int, glibc.split("."))) < GLIBC:
        raise ToolMissing(
            "Triton",
            why=f"the packaged one needs x86_64 and glibc {GLIBC[0]}.{GLIBC[1]} or newer; "
            f"this is {platform.machine()} with {libc or 'another C library'} {glibc}",
            mend="use NVIDIA's container, or a newer system",
        )
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if own in PYTHONS:
        return getattr(sys, "_base_executable", sys.executable), own
    for version in PYTHONS:
        found = shutil.which(f"python{version}")
        if found is not None:
            return found, version
    raise ToolMissing(
        "Python for Triton",
        why=f"the packaged Triton runs models in Python {' or '.join(PYTHONS)}, and this is {own}",
        mend=f"install one of them (Debian and Ubuntu: apt-get install python{PYTHONS[0]}), and run this again",
    )


def _install(base: str, building: Path, *, log: Path, say: Callable[[str], None]) -> None:
    env = building / "env"
    # Our own pip serves; only where this environment has none (uv makes such) the new one gets a pip of its own.
    shared = importlib.util.find_spec("pip") is not None
    say(f"making an environment with {base}")
    log.unlink(missing_ok=True)
    run(
        [base, "-I", "-m", "venv", *(["--without-pip"] if shared else []), str(env)],
        log=log,
        what="making Triton's environment",
        timeout=300,
        diagnose=lambda lines: (
            "this Python lacks the venv module (Debian and Ubuntu: apt-get install python3-venv)"
            if any("ensurepip" in line or "No module named venv" in line for line in lines)
            else None
        ),
    )
    say("installing Triton and onnxruntime into it (150 MB to fetch)")
    python = str(env / "bin" / "python")
    run(
        [
            *([sys.executable, "-I", "-m", "pip", "--python", python] if shared else [python, "-I", "-m", "pip"]),
            *("install", "--no-input", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"),
            *("--requirement", str(containers_folder() / "triton" / "requirements.txt")),
        ],
        log=log,
        what="installing Triton",
        timeout=3600,
        on_line=lambda line: say(f"  {line.strip()}") if line.startswith(("Collecting", "Installing")) else None,
    )


def _assemble_backends(folder: Path, python: str) -> None:
    """Triton's python backend with the stub for our Python, and our onnxruntime backend beside it.

    Copied, because Triton refuses a backend that a link leads out of the backend directory.
    """
    server = site_packages(folder, python) / "pytriton" / "tritonserver"
    final = backends_folder(folder)
    building = final.with_name(final.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    shutil.copytree(server / "backends" / "python", building / "python")
    stub = building / "python" / "triton_python_backend_stub"
    shutil.copyfile(server / "python_backend_stubs" / python / stub.name, stub)
    stub.chmod(0o755)
    shutil.copytree(containers_folder() / "triton" / "backends", building, dirs_exist_ok=True)
    shutil.rmtree(final, ignore_errors=True)
    building.rename(final)


def _link_libpython(base: str, building: Path, python: str) -> None:
    """Where the base Python has a shared library of its own, the stub shall find it, and nothing else of its folder."""
    told = subprocess.run(
        [base, "-I", "-c", "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    library = Path(told.stdout.strip(), f"libpython{python}.so.1.0")
    (building / "lib").mkdir()
    if library.is_file():
        (building / "lib" / library.name).symlink_to(library)


def _check_libraries(building: Path, python: str) -> None:
    stub = backends_folder(building) / "python" / "triton_python_backend_stub"
    environment = os.environ | dict(assembled(building, python=python, version="unknown").environment)
    # Without arguments it ends at once; before that, the dynamic loader says what it does not find.
    told = subprocess.run([stub], capture_output=True, text=True, env=environment, timeout=60, check=False)
    if "error while loading shared libraries" in told.stderr:
        missing = told.stderr.partition("error while loading shared libraries: ")[2].partition(":")[0]
        package = f"libpython{python}" if missing.startswith("libpython") else "the package that holds it"
        raise ToolMissing(
            missing,
            why="Triton runs Python models through it",
            mend=f"install {package} (Debian and Ubuntu: apt-get install {package}), and run this again"
            if missing.startswith("libpython")
            else f"install {package}, and run this again",
        )


def _prove(installation: TritonInstallation, folder: Path) -> str:
    """Serves a model of one node and asks it; the server's version."""
    model = folder / "repository" / "identity"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.onnx").write_bytes(IDENTITY)
    (model / "config.pbtxt").write_text(IDENTITY_CONFIG)
    question = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 1], "data": [1.5, -2.0]}]}
    with staging(
        installation, repository=folder / "repository", models=["identity"], folder=folder, timeout=120
    ) as server:
        connection = http.client.HTTPConnection(server.host, server.http_port, timeout=60)
        connection.request("POST", "/v2/models/identity/infer", json.dumps(question))
        answer = connection.getresponse().read()
        connection.close()
        if json.loads(answer).get("outputs", [{}])[0].get("data") != [1.5, -2.0]:
            raise NotReady(f"the new Triton answers wrongly: {answer.decode(errors='replace')}")
        return str(triton_client.server_metadata(server.address)["version"])


def _describe(folder: Path, *, python: str, version: str) -> None:
    made = {
        "format": FORMAT,
        "requirements": requirements_digest(),
        "backend": backend_digest(),
        "python": python,
        "version": version,
    }
    partial = folder / f"{DESCRIPTION}.partial"
    partial.write_text(json.dumps(made, indent=2) + "\n")
    partial.replace(folder / DESCRIPTION)
