"""A child process under `tasks/programs/supervise.py`: started, cancelled, and its end reported."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a supervised child ended."""

    cause: Literal["exited", "deadline", "cancelled", "could not start", "supervisor killed"]
    status: int | None = None
    """The exit status, where it exited."""
    signal: int | None = None
    """The signal that ended it, where one did."""
    error: str | None = None
    """Why it could not be started."""
    oom_kills: int = 0
    """How many processes of the control group the kernel killed for want of memory in the meantime."""
    left: tuple[int, ...] = ()
    """Descendants that could not be ended."""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.cause == "could not start":
            return f"could not be started: {self.error}"
        if self.cause == "exited":
            return f"killed by {signal_name(self.signal)}" if self.signal is not None else f"exit status {self.status}"
        return self.cause


def signal_name(number: int) -> str:
    """Such as `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class Supervised:
    """A running child; leaving its `with` block ends it and all its descendants.

    `output` is a file for its stdout and stderr; with None they come, merged, through `self.output`. `timeout` and
    `grace` are seconds, as in `command.run`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        what: str,
        output: IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float | None = None,
        grace: float = 10.0,
    ) -> None:
        order = {
            "argv": list(argv),
            "env": dict(os.environ if env is None else env),
            "cwd": None if cwd is None else str(cwd),
            "timeout": timeout,
            "grace": grace,
        }
        self._ending: Ending | None = None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        control, ours = os.pipe()
        # A file object: where an interrupt loses this object halfway, collecting it closes the pipe and ends the child.
        self._control = os.fdopen(ours, "wb", buffering=0)
        theirs, report = os.pipe()
        self._report = os.fdopen(theirs, "rb", buffering=0)
        try:
            self._process = subprocess.Popen(
                # Isolated and without `site`: it starts in a few milliseconds, and no user's module can come between.
                [
                    *(sys.executable, "-I", "-S", str(PROGRAMS / "supervise.py")),
                    *(str(control), str(report), str(os.getpid()), what),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if output is None else output,
                stderr=subprocess.STDOUT,
                pass_fds=(control, report),
                start_new_session=True,
            )
            with contextlib.suppress(BrokenPipeError):  # it died already: `wait` says so
                _write_all(self._control, json.dumps(order).encode() + b"\n")
        except BaseException:
            self.cancel()
            if self._process is not None:
                self.wait()
            raise
        finally:
            os.close(control)
            os.close(report)
        running.add(self)

    @property
    def pid(self) -> int:
        """The supervisor's: it lives exactly as long as any descendant of the child."""
        assert self._process is not None
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        """stdout and stderr, merged; at its end when the child and all its descendants have closed it."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def ended(self) -> bool:
        """Whether the child is gone with all its descendants."""
        assert self._process is not None
        return self._process.poll() is not None

    def cancel(self) -> None:
        """Asks for the end of the child and its descendants; returns at once. From any thread, any number of times."""
        with self._lock:
            if not self._control.closed:
                # The byte says it also where a forked copy of this process keeps the pipe open.
                with contextlib.suppress(BrokenPipeError):
                    self._control.write(b"x")
                self._control.close()

    def wait(self) -> Ending:
        """Waits until nothing of it is left."""
        assert self._process is not None
        if self._ending is None:
            self._process.wait()
            os.set_blocking(self._report.fileno(), False)
            self._ending = _ending(self._report.read() or b"")
            self.cancel()
            self._report.close()
            if self._process.stdout is not None:
                self._process.stdout.close()
            running.discard(self)
        return self._ending

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        self.wait()


running: weakref.WeakSet[Supervised] = weakref.WeakSet()
"""Every child that this process has started and not yet seen end."""


def _write_all(pipe: IO[bytes], data: bytes) -> None:
    while data:
        data = data[pipe.write(data) :]


def _ending(report: bytes) -> Ending:
    if not report:
        return Ending(cause="supervisor killed")
    values: dict[str, Any] = json.loads(report)
    return Ending(**{**values, "left": tuple(values["left"])})
