"""Starts a server that shall outlive its starter, and records it before it runs.

Run by file path in isolated mode (`python -I -S launch.py`), standard library only. On stdin comes one JSON object:
`argv`, `env`, `cwd`, `log`, `record` (its path) and `fields` (what it shall hold; `pid`, `start_time` and `boot_id` are
added). It forks; the child makes a session of its own, writes the record, and executes `argv`, keeping its pid. So a
starter that is killed at any instant leaves nothing, or a server with a record. The parent ends when the child has
become the server: with status 0, or with 1 and a JSON object on stdout, `{"running": pid}` where the record names a
process that lives, or `{"error": text}`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys


def main() -> int:
    order = Order(**json.loads(sys.stdin.buffer.read()))
    # Held until the exec, by parent and child: of two starters of the same server the second one sees the record.
    lock = os.open(order.record + ".lock", os.O_WRONLY | os.O_CREAT, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX)
    running = recorded(order.record)
    if running is not None:
        return say({"running": running})
    failed, failing = os.pipe()
    if os.fork() == 0:
        try:
            become(order)
        except OSError as error:
            os.write(failing, str(error).encode())
        finally:
            os._exit(127)
    os.close(failing)
    reason = os.read(failed, 1 << 12)
    return say({"error": reason.decode(errors="replace")}) if reason else 0


class Order:
    """What to start, as the starter sends it."""

    def __init__(
        self, argv: list[str], env: dict[str, str], cwd: str, log: str, record: str, fields: dict[str, object]
    ) -> None:
        self.argv, self.env, self.cwd, self.log, self.record, self.fields = argv, env, cwd, log, record, fields


def become(order: Order) -> None:
    """Turns this process into the recorded server; never returns, and raises OSError where that cannot be."""
    os.setsid()
    with contextlib.suppress(FileNotFoundError):
        os.replace(order.log, order.log + ".previous")  # noqa: PTH105 - no pathlib, see `supervise.read`
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor, file in ((0, null), (1, log), (2, log)):
        os.dup2(file, descriptor)
    os.chdir(order.cwd)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two, and exec would pass that on
        signal.signal(number, signal.SIG_DFL)
    identity = {"pid": os.getpid(), "start_time": start_time(os.getpid()), "boot_id": boot_id()}
    write_durably(order.record, json.dumps(order.fields | identity, indent=2) + "\n")
    try:
        os.execvpe(order.argv[0], order.argv, order.env)  # noqa: S606 - no shell is wanted
    except OSError:
        os.unlink(order.record)  # noqa: PTH108
        raise


def recorded(record: str) -> int | None:
    """The pid of the recorded process, if it lives."""
    try:
        fields = json.loads(read(record))
    except FileNotFoundError:
        return None
    same = fields["boot_id"] == boot_id() and fields["start_time"] == start_time(fields["pid"])
    return fields["pid"] if same else None


def start_time(pid: int) -> int | None:
    """When the process began, in clock ticks after boot; None where it is gone (a zombie is)."""
    try:
        stat = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if stat[0] in ("Z", "X") else int(stat[19])


def boot_id() -> str:
    return read("/proc/sys/kernel/random/boot_id").strip()


def write_durably(path: str, text: str) -> None:
    """The file is there whole and will be there after a power cut, or it is not there."""
    partial = path + ".partial"
    with open(partial, "w") as file:  # noqa: PTH123
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)  # noqa: PTH105
    folder = os.open(os.path.dirname(path), os.O_RDONLY)  # noqa: PTH120
    os.fsync(folder)
    os.close(folder)


def read(path: str) -> str:
    with open(path, errors="replace") as file:  # noqa: PTH123
        return file.read()


def say(what: dict[str, object]) -> int:
    print(json.dumps(what))  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main())
