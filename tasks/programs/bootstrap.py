"""Starts one program of this folder in a child process.

    python -I -u bootstrap.py train|curves|export|evaluate job.json

Started by its path in isolated mode, so neither the current folder nor ours is on `sys.path`. The programs are loaded
as the package `enginehouse_programs`, a name that no user has a folder for; the recipe's folder alone is put first on
the path. So a user's own `tasks.py`, `flows/`, `train.py` or `recipe.py` is what the user's imports find, and what we
import (always relatively) is ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

PACKAGE = "enginehouse_programs"
PROGRAMS = (
    "train", "curves", "export", "evaluate", "golden", "load", "shadow", "samples", "scores", "precision", "preflight",
    "drift",
)  # fmt: skip
MENDS = {
    "torch": "pip install torch",
    "onnx": "pip install onnx",
    "onnxscript": "pip install onnxscript",
    "onnxruntime": "pip install 'enginehouse[cpu]' (or 'enginehouse[gpu]'; never both in one environment)",
    "tritonclient": "pip install 'tritonclient[grpc]'",
    "safetensors": "pip install safetensors",
    "numpy": "pip install numpy",
    "modelopt": "enginehouse engine setup modelopt",
    "tensorrt_rtx": "enginehouse engine setup tensorrt-rtx",
}


def load_programs() -> ModuleType:
    """This folder as the package `enginehouse_programs`, whatever else is called `tasks` on the path."""
    if PACKAGE in sys.modules:
        return sys.modules[PACKAGE]
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    return package


def run(program: str, job: dict[str, Any]) -> int:
    """Run one program; returns the exit status after writing `error.json` for what a user can mend."""
    prepare_environment()
    load_programs()
    failures = importlib.import_module(f"{PACKAGE}.failures")
    try:
        main = load_main(program, failures)
        main(job)
    except failures.ProgramFailed as failure:
        failures.write_failure(failure, Path(job["output"]))
        print(f"{failure.kind}: {failure}", file=sys.stderr, flush=True)  # noqa: T201 - the log is this program's output
        return 1
    return 0


def prepare_environment() -> None:
    """Set what libraries read when they are loaded."""
    # cuBLAS: without it no matrix product on a GPU is deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Without it ONNX Runtime 1.32 sends telemetry, and writes into the user's home for it.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def load_main(program: str, failures: ModuleType) -> Any:
    """The program's `main`; a library that is missing is named with the way to get it."""
    try:
        return importlib.import_module(f"{PACKAGE}.{program}").main
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in MENDS:
            raise
        raise failures.ProgramFailed(
            "tool missing", f"{program} needs {library}, which this Python does not have", hint=MENDS[library]
        ) from error


def main(arguments: list[str]) -> int:
    """The command line."""
    if len(arguments) != 2 or arguments[0] not in PROGRAMS:
        print(f"usage: bootstrap.py {'|'.join(PROGRAMS)} job.json", file=sys.stderr)  # noqa: T201
        return 2
    program, job_file = arguments
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    Path(job["output"]).mkdir(parents=True, exist_ok=True)
    Path(job["work"]).mkdir(parents=True, exist_ok=True)
    if "RANK" not in os.environ:  # of several ranks, one that starts late must not remove what another has written
        (Path(job["output"]) / "error.json").unlink(missing_ok=True)
        return run(program, job)
    return run_rank(program, job)


def run_rank(program: str, job: dict[str, Any]) -> NoReturn:
    """As one of several ranks: end at once, without destructors, whether it went well or not.

    After a failure they would wait for collective operations with peers that are not coming. After success gloo's
    destructor joins a thread while it holds Python's lock, and that thread may want the lock to free a tensor: a
    deadlock, seen in one of fifteen runs.
    """
    load_programs()
    ranks = importlib.import_module(f"{PACKAGE}.rank_failures")
    if ranks.restart_is_vain(Path(job["output"])):
        os._exit(1)
    lines = importlib.import_module(f"{PACKAGE}.rank_lines")
    lines.mark_lines(int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1")))
    try:
        prepare_environment()
        load_main(program, importlib.import_module(f"{PACKAGE}.failures"))(job)
        status = 0
    except BaseException as error:  # noqa: BLE001 - also of an interrupt: it must not reach the orderly end
        traceback.print_exc()
        status = ranks.record(error, job)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
