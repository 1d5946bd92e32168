"""torchrun: its command line, and what it and its workers left when they failed."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.toolchain.command import last_lines

ENVIRONMENT = {
    # Otherwise the workers of a restart meet in the store of those before them, read where these listened, and fail
    # ("connectFullMesh … Connection refused") or hang.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_EXIT_CODE = re.compile(r"exitcode\s*: (-?\d+)\)?.*?\(pid: (\d+)\)")
_AGENT_SIGNALLED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")


def torchrun_command(*, nproc_per_node: int, max_restarts: int) -> tuple[str, ...]:
    """Return what stands before a worker's own command line.

    `--standalone` makes a rendezvous of its own on a free port of this machine, so that two trainings never meet;
    `--no-python` lets the worker's command line name the interpreter with its own options.
    """
    return (
        *(sys.executable, "-I", "-m", "torch.distributed.run"),
        *("--standalone", "--nnodes", "1", "--nproc-per-node", str(nproc_per_node)),
        *("--max-restarts", str(max_restarts), "--no-python", "--"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a start of the workers failed."""

    text: str
    hint: str | None = None
    file: Path | None = None
    line: int | None = None


def first_cause(output: Path, lines: Sequence[str]) -> Cause | None:
    """The first cause among what the ranks of the last attempt wrote in `output/failures/` (`RankFailure` in
    tasks/programs/jobs.py); a rank that only missed another one is believed if no rank says more.

    `lines` are the end of torchrun's log: how a process ended that could not write anything stands there alone.
    """
    told = sorted(failures(output), key=lambda failure: (failure["symptom"], failure["time"]))
    if not told:
        return None
    first = told[0]
    text = str(first["message"])
    if first["symptom"] and first["suspect"] is not None:
        ended = _endings(lines).get(first.get("suspect_pid") or 0)
        if ended is not None:
            text = text.replace("has ended without a word", ended)
    file = first.get("file")
    return Cause(text=text, hint=first["hint"], file=Path(file) if file else None, line=first.get("line"))


def failures(output: Path) -> list[Mapping[str, Any]]:
    """What the ranks of the last attempt that failed have written."""
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for path in (output / "failures").glob("*.json"):
        by_attempt.setdefault(int(path.name.partition("-")[0]), []).append(json.loads(path.read_bytes()))
    return by_attempt[max(by_attempt)] if by_attempt else []


def end_of_log(log: Path | None) -> tuple[str, ...]:
    """Enough of the log for torchrun's report on all ranks."""
    return () if log is None else last_lines(log, 400)


def agent_signal(lines: Sequence[str]) -> str | None:
    """The signal that asked torchrun itself to end, as its traceback tells."""
    for line in reversed(lines):
        if found := _AGENT_SIGNALLED.search(line):
            return signal.Signals(int(found[1])).name
    return None


def _endings(lines: Sequence[str]) -> dict[int, str]:
    """By pid, how processes ended as torchrun saw it."""
    found: dict[int, str] = {}
    for line in lines:
        if match := _EXIT_CODE.search(line):
            code, pid = int(match[1]), int(match[2])
            found[pid] = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    return found
