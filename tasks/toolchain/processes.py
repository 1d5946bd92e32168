"""Processes and ports of this machine, as /proc and the sockets tell."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path


def boot_id() -> str:
    """Differs after each boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """When the process began, in clock ticks after boot; None where it is gone. A zombie is gone: it only waits for its
    parent to notice."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if stat[0] in ("Z", "X") else int(stat[19])


def end(pid: int, started: int, *, grace: float) -> None:
    """SIGTERM to that process (told from a later one of the same pid by its start time), SIGKILL after `grace` seconds.

    Returns when it is gone. Raises PermissionError for another user's.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if start_time(pid) != started:
            return
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 30.0)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if start_time(pid) != started:
                    return
                time.sleep(0.05)
    finally:
        os.close(handle)


def end_session(session: int) -> None:
    """SIGKILL to what is left of a session whose leader has ended, until there is nothing left (30 s at most).

    While there is, the kernel gives the session's number to no other.
    """
    deadline = time.monotonic() + 30
    while (members := list(_members(session))) and time.monotonic() < deadline:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _members(session: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat[3]) == session and stat[0] not in ("Z", "X"):
                yield int(entry.name)


def find_free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """That many TCP ports that nothing on `host` listens on.

    They lie below the range from which the kernel takes the ports of outgoing connections, so none of those can take
    one before the server binds it.
    """
    found: list[int] = []
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(min(below, 32768) - 12000, min(below, 32768)), 1000):
        if is_free(port, host):
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"no {count} free ports on {host}")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError:
            return False
    return True


def listener(port: int) -> str | None:
    """Who listens on a port, such as `python3 (pid 4711)`; None where that cannot be seen (another user's process)."""
    import psutil

    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return None
