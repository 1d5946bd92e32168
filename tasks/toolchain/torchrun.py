"""torchrun: its command line, and what it and its workers left when they failed."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import CommandFailed
from tasks.toolchain.command import last_lines
from tasks.toolchain.supervised import signal_name

ENVIRONMENT = {
    # Otherwise the workers of a restart meet in the store of those before them, read where these listened, and fail
    # ("connectFullMesh … Connection refused") or hang.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""The signals that torchrun hands on to its workers, unless it is told of others."""
_EXIT_CODE = re.compile(r"exitcode\s*: (-?\d+)\)?.*?\(pid: (\d+)\)")
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_LOST_RENDEZVOUS = re.compile(r"RendezvousConnectionError|RendezvousClosedError")
_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_AGENT_SIGNALLED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the torchruns of several machines meet."""

    endpoint: str
    """`HOST:PORT`."""
    name: str
    """Two trainings that meet at one place need different ones."""
    conf: str | None = None
    """Further settings for `--rdzv-conf`."""


def torchrun_command(
    *,
    nproc_per_node: int,
    max_restarts: int,
    nnodes: int | str = 1,
    meeting: Meeting | None = None,
    keeps_store: bool = True,
) -> tuple[str, ...]:
    """Return what stands before a worker's own command line.

    `--standalone` makes a rendezvous of its own on a free port of this machine, so that two trainings never meet; its
    ranks find each other at the loopback address, since a container's host name may lead nowhere. With
    a `meeting` the torchrun that `keeps_store` opens its port, and ends with an error where it is in use; the others
    look for it there. `--no-python` lets the worker's command line name the interpreter with its own options.
    """
    if meeting is None:
        place: tuple[str, ...] = ("--standalone", "--local-addr", "127.0.0.1")
    else:
        conf = f"is_host={str(keeps_store).lower()}" + (f",{meeting.conf}" if meeting.conf else "")
        place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", meeting.endpoint)
        place += ("--rdzv-id", meeting.name, "--rdzv-conf", conf)
    return (
        *(sys.executable, "-I", "-m", "torch.distributed.run"),
        *(*place, "--nnodes", str(nnodes), "--nproc-per-node", str(nproc_per_node)),
        *("--max-restarts", str(max_restarts), "--no-python", "--"),
    )


def ending(*, preemption_signal: str | None, grace_seconds: float) -> dict[str, str]:
    """The environment in which torchrun hands a notice of preemption on, and gives its workers time to heed it.

    Variables and not options: a torchrun too old to know one of them passes over it.
    """
    notice = [] if preemption_signal is None else [f"SIG{preemption_signal}"]
    return {
        "PET_SIGNALS_TO_HANDLE": ",".join(dict.fromkeys([*HANDLED.split(","), *notice])),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(grace_seconds)),
    }


def join_script(argv: Sequence[str], env: Mapping[str, str], job_file: Path) -> str:
    """A shell script that lets another machine, which sees the same folders, take part.

    It looks for the meeting again when that is over too early, until the job is gone, which is when the training is
    done.
    """
    return f"""#!/bin/sh
export {shlex.join(f"{name}={value}" for name, value in env.items())}
while [ -e {shlex.quote(str(job_file))} ]; do
    {shlex.join(argv)} && exit 0
    sleep 2
done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a start of the workers failed."""

    text: str
    hint: str | None = None
    rank: int | None = None
    """Whose failure it was, where it is known."""
    silent: bool = False
    """Whether that rank could say nothing itself."""


def cause_among(told: Sequence[Mapping[str, Any]], lines: Sequence[str]) -> Cause | None:
    """The first cause among what the ranks of one attempt told (`RankFailure` in tasks/programs/jobs.py); a rank that
    only missed another one is believed if no rank says more.

    `lines` are the end of torchrun's log: how a process ended that could not write anything stands there alone.
    """
    if not told:
        return None
    first = min(told, key=lambda failure: (failure["symptom"], failure["time"]))
    text = str(first["message"])
    silent = bool(first["symptom"]) and "has ended without a word" in text
    if silent and (ended := _endings(lines).get(first.get("suspect_pid") or 0)) is not None:
        text = text.replace("has ended without a word", ended)
    rank = first["suspect"] if first["symptom"] else first["rank"]
    return Cause(text=text, hint=first["hint"], rank=rank, silent=silent)


def failures(output: Path) -> list[Mapping[str, Any]]:
    """What the ranks of the last attempt that failed have written."""
    by_attempt = _by_attempt(output)
    return by_attempt[max(by_attempt)] if by_attempt else []


def failures_about(output: Path, pid: int) -> list[Mapping[str, Any]]:
    """What the ranks of that attempt have written in which a process failed, or was missed."""
    for told in _by_attempt(output).values():
        if any(pid in (failure.get("pid"), failure.get("suspect_pid")) for failure in told):
            return told
    return []


def _by_attempt(output: Path) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for path in (output / "failures").glob("*.json"):
        found.setdefault(int(path.name.partition("-")[0]), []).append(json.loads(path.read_bytes()))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker's end, as torchrun tells it when it ends or restarts all the others for it."""

    local_rank: int
    pid: int
    how: str
    """`was killed by SIGKILL`, `exited with status 3`."""


def death(line: str) -> Death | None:
    """What a line of torchrun's says of the worker that it saw end first."""
    if (found := _FAILED.search(line)) is None:
        return None
    return Death(local_rank=int(found[2]), pid=int(found[3]), how=_ending(int(found[1])))


def end_of_log(failure: CommandFailed) -> tuple[str, ...]:
    """Enough of the log for torchrun's report on all ranks; nothing of an earlier start."""
    if failure.log is None:
        return ()
    lines = last_lines(failure.log, 400)
    started = f"$ {shlex.join(failure.argv)}"
    since = max((number for number, line in enumerate(lines) if line == started), default=-1)
    return lines[since + 1 :]


def agent_signal(lines: Sequence[str]) -> str | None:
    """The signal that asked torchrun itself to end, as its traceback tells."""
    for line in reversed(lines):
        if found := _AGENT_SIGNALLED.search(line):
            return signal_name(int(found[1]))
    return None


def _endings(lines: Sequence[str]) -> dict[int, str]:
    """By pid, how processes ended as torchrun saw it."""
    found: dict[int, str] = {}
    for line in lines:
        if match := _EXIT_CODE.search(line):
            found[int(match[2])] = _ending(int(match[1]))
    return found


def _ending(code: int) -> str:
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with status {code}"


def lost_rendezvous(lines: Sequence[str]) -> bool:
    """Whether torchrun ended as the store where machines meet was gone; not where its port was in use at once."""
    text = "\n".join(lines)
    return bool(_LOST_RENDEZVOUS.search(text)) and not _IN_USE.search(text)


def nobody_came(lines: Sequence[str]) -> str | None:
    """What is to be said where torchrun waited in vain for other machines."""
    if not any("RendezvousTimeoutError" in line for line in lines):
        return None
    return "fewer machines came to train.rdzv_endpoint than train.nnodes asks for (join_timeout of train.rdzv_conf)"
