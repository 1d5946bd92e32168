"""Child processes: a deadline, their output line by line, a log file, and an end together with ours."""

from __future__ import annotations

import os
import re
import select
import shlex
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tasks.errors import CommandFailed
from tasks.toolchain.supervised import PROGRAMS, Ending, Supervised, running

LAST_LINES = 20
"""How many lines of output an error shows."""

USUAL_CAUSES = (
    (re.compile(r"Address already in use|EADDRINUSE", re.IGNORECASE), "a port is in use by another process"),
    (re.compile(r"No space left on device", re.IGNORECASE), "the disk is full"),
    (re.compile(r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY", re.IGNORECASE), "the GPU's memory is full"),
    (re.compile(r"ModuleNotFoundError: (No module named \S+)"), "a Python module is missing: {0}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A child process that ended with exit status 0."""

    argv: tuple[str, ...]
    seconds: float
    """Wall-clock time from the start to the end of the last descendant."""
    log: Path
    last_lines: tuple[str, ...]
    """The end of its output, oldest line first, at most 20 lines."""


class Runner(Protocol):
    """What a stage needs of `run`; injected, so that a test can read the commands instead of running them."""

    def __call__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        what: str,
        timeout: float,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        diagnose: Callable[[Sequence[str]], str | None] | None = None,
        grace: float = 10.0,
    ) -> Completed: ...


def run(
    argv: Sequence[str],
    *,
    log: Path,
    what: str,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    diagnose: Callable[[Sequence[str]], str | None] | None = None,
    grace: float = 10.0,
) -> Completed:
    """Runs `argv` to its end; it and every descendant of it is gone when this returns or raises.

    `what` names the work in errors ("training"). `timeout` and `grace` are seconds; past `timeout` all descendants get
    SIGTERM and, after `grace`, SIGKILL. `env` is the child's whole environment (ours by default). stdout and stderr,
    merged, are appended to `log` and given line by line (without the line end) to `on_line`, in the calling thread.
    `diagnose` gets the last lines of a failed child and may name the likely cause.

    Raises `CommandFailed` when it cannot be started, does not exit with status 0, passes its deadline or is cancelled.
    An exception from `on_line`, or an interrupt, ends the child before it goes on.
    """
    recent: deque[str] = deque(maxlen=LAST_LINES)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab", buffering=0) as file:
        file.write(f"$ {shlex.join(argv)}\n".encode())
        with Supervised(argv, what=what, env=env, cwd=cwd, timeout=timeout, grace=grace) as child:
            for line in _lines(_copied(_chunks(child), file.write)):
                recent.append(line)
                if on_line is not None:
                    on_line(line)
            ending = child.wait()
    if ending.cause == "exited" and ending.status == 0:
        return Completed(argv=tuple(argv), seconds=ending.seconds, log=log, last_lines=tuple(recent))
    raise CommandFailed(
        what,
        argv=argv,
        ended=f"deadline of {timeout:g} s passed" if ending.cause == "deadline" else str(ending),
        log=log,
        last_lines=tuple(recent),
        cause=_cause(ending, recent, diagnose),
    )


def cancel_all() -> None:
    """Ends every child that any thread's `run` is waiting for; those calls raise `CommandFailed` ("cancelled")."""
    for child in list(running):
        child.cancel()


def python_program(name: str, job: Path) -> list[str]:
    """The command line that runs `tasks/programs/<name>.py` on a job file, in isolation from our own packages."""
    return [sys.executable, "-I", "-u", str(PROGRAMS / "bootstrap.py"), name, str(job)]


def last_lines(log: Path, count: int = LAST_LINES) -> tuple[str, ...]:
    """The last lines of a log file, oldest first; none where there is no such file. Reads its end only."""
    try:
        with log.open("rb") as file:
            file.seek(-min(file.seek(0, os.SEEK_END), 1 << 16), os.SEEK_END)
            data = file.read()
    except FileNotFoundError:
        return ()
    return tuple(line.rstrip() for line in data.decode(errors="replace").splitlines()[-count:])


def _chunks(child: Supervised) -> Iterator[bytes]:
    """The child's output as it comes, until its last descendant is gone."""
    output = child.output.fileno()
    poll = select.poll()
    poll.register(output, select.POLLIN)
    while True:
        if poll.poll(500):
            chunk = os.read(output, 1 << 16)
            if not chunk:
                return
            yield chunk
        elif child.ended:
            return  # and yet not at its end: a process that could not be ended, or a fork of ours, still holds the pipe
        elif not threading.main_thread().is_alive():
            # The interpreter is shutting down and waits for this thread before anything else could end the child.
            child.cancel()


def _copied(chunks: Iterator[bytes], write: Callable[[bytes], object]) -> Iterator[bytes]:
    for chunk in chunks:
        write(chunk)
        yield chunk


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Text lines; of a line that was rewritten with carriage returns (a progress bar) its last state only."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > 1 << 16:  # no line end for a long time: memory must not grow without bound
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield _text(line)
    if rest:
        yield _text(rest)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


def _cause(ending: Ending, recent: Sequence[str], diagnose: Callable[[Sequence[str]], str | None] | None) -> str | None:
    if ending.cause == "could not start":
        return f"it could not be started: {ending.error}"
    if ending.oom_kills:
        return "out of memory: the kernel killed a process of this control group (a container's or job's memory limit)"
    if ending.cause != "exited":
        return None
    named = diagnose(tuple(recent)) if diagnose is not None else None
    if named is not None:
        return named
    return usual_cause(recent)


def usual_cause(lines: Sequence[str]) -> str | None:
    """What lines of output tell of why a program failed, where it is something usual."""
    for pattern, cause in USUAL_CAUSES:
        for line in reversed(lines):
            if found := pattern.search(line):
                return cause.format(*found.groups())
    return None
