"""Which process something belongs to, told apart from a later one with the same pid, and whether it still runs."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_TOKEN = re.compile(r"([0-9a-f]{32})-(\d+)-(\d+)-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process of this or another machine."""

    boot: str
    """The kernel's boot id: 32 hex digits, the same in every container of a machine, another after each boot."""
    pid_namespace: int
    """Inode of the pid namespace: a pid says something only to those who share it."""
    pid: int
    start: int
    """Start time in clock ticks since the boot (proc(5), stat, field 22); tells a reused pid from the first one."""
    host: str = ""
    """For people."""

    @classmethod
    def current(cls) -> Owner:
        """This process; computed once, and again after a fork."""
        global _current  # noqa: PLW0603 - a process has one identity, and each commit asks for it several times
        if _current is None or _current.pid != os.getpid():
            pid = os.getpid()
            stat = _stat(pid)
            if stat is None:
                raise RuntimeError("/proc is not mounted: a process cannot say when it started")
            boot, namespace = _place()
            _current = cls(boot=boot, pid_namespace=namespace, pid=pid, start=stat[1], host=platform.node())
        return _current

    @property
    def token(self) -> str:
        """The identity as part of a file name; all but the host."""
        return f"{self.boot}-{self.pid_namespace}-{self.pid}-{self.start}"

    @classmethod
    def from_token(cls, token: str) -> Owner | None:
        """The owner that a `token` names; None for any other text."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            return None
        boot, namespace, pid, start = match.groups()
        return cls(boot=boot, pid_namespace=int(namespace), pid=int(pid), start=int(start))

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Owner:
        """The inverse of `to_json`."""
        return cls(**value)

    def alive(self) -> bool | None:
        """Whether the process runs; None when this process cannot see it (another machine, container or boot)."""
        if (self.boot, self.pid_namespace) != _place():
            return None
        stat = _stat(self.pid)
        if stat is None:
            return _exists(self.pid)
        state, start = stat
        return start == self.start and (state != "Z" or _has_threads(self.pid))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'an unnamed host'}"


_current: Owner | None = None


def _place() -> tuple[str, int]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return boot, Path("/proc/self/ns/pid").stat().st_ino


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process, None when it is not there (or hidden by the mount option hidepid)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything, also spaces and parentheses
    return fields[0], int(fields[19])


def _has_threads(pid: int) -> bool:
    """Whether a process whose first thread has ended still has others; one that has none waits to be reaped only."""
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def _exists(pid: int) -> bool:
    """Whether there is a process that /proc does not show to this user; its start time cannot be compared."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
