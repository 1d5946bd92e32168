"""Stands between the orchestrator and one child, and sees to it that nothing of the child outlives its run.

Run by file path in isolated mode (`python -I -S supervise.py CONTROL REPORT PARENT NAME`), standard library only, and
little of that, because every child waits for it. CONTROL is the read end of a pipe to the parent: it brings one line of
JSON (`argv`, `env`, `cwd`, `timeout`, `grace`); anything more, or its end, means that the parent wants everything ended
or has died. REPORT is the write end of a pipe that takes one JSON object:

    {"cause": "exited" | "deadline" | "cancelled" | "could not start", "status": exit status or null,
     "signal": number or null, "error": text or null, "oom_kills": count, "left": [pid, …], "seconds": number}

It is a session leader, so a signal to the parent's process group misses it, and a child subreaper, so every orphan
among its descendants, whatever session or group it made for itself, becomes its own child: when `waitpid` knows of no
children, there are no descendants. The exception is marked in its environment (`OUTLIVES`): a server that goes on
serving, and is recorded before it starts. It has one thread, so its direct child can ask the kernel to be killed with
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""<linux/prctl.h>"""

LEFTOVERS_GRACE = 1.0
"""Seconds that descendants get once the child itself has ended."""
GIVE_UP = 15.0
"""Seconds of SIGKILL after which what still lives (another user's process, one stuck in the kernel) is reported."""
OUTLIVES = "ENGINEHOUSE_OUTLIVES"
"""The environment variable that marks a process, and all that it starts, as meant to outlive the run; its value is the
path of the process's record."""
PRIVATE_TMP = "ENGINEHOUSE_PRIVATE_TMP"
"""The environment variable that asks for a TMPDIR of the child's own, which goes with it: the killed leave their files
(torchrun's logs, W&B's files), and a machine that trains every night fills up."""
SOCKET_PATH = 107 - len("/pymp-12345678/listener-12345678")
"""How long a TMPDIR may be: processes that load data open sockets in it, whose paths the kernel limits."""
PARENT_CHECK = 1.0
"""Seconds between looks at the parent: a forked copy of it could hold the pipe open beyond its death."""


def main() -> None:
    control, report, parent = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for descriptor in (control, report):  # they came inherited through exec; the child must not have them
        os.set_inheritable(descriptor, False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    order = read_order(control)
    began = time.monotonic()
    kills = oom_kills()
    wake = wake_on_signals()
    cause, code, child, error, left = "cancelled", None, None, None, []
    scratch = None
    if order is not None:
        cause = "could not start"
        scratch = private_tmp(order.env)
        child, error = start(order, libc)
    # From here on only the child and its descendants hold the output, so its end is theirs.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if order is not None and child is not None:
        children = Children(child)
        deadline = None if order.timeout is None else began + order.timeout
        cause = watch(children, control=control, wake=wake, parent=parent, deadline=deadline)
        left = end_descendants(children, wake=wake, grace=LEFTOVERS_GRACE if cause == "exited" else order.grace)
        code = None if children.status is None else os.waitstatus_to_exitcode(children.status)
    if scratch is not None:
        import shutil  # only now: it takes longer than the start of this program

        shutil.rmtree(scratch, ignore_errors=True)
    outcome = {
        "cause": cause,
        "status": code if code is not None and code >= 0 else None,
        "signal": -code if code is not None and code < 0 else None,
        "error": error,
        "oom_kills": oom_kills() - kills,
        "left": left,
        "seconds": time.monotonic() - began,
    }
    with contextlib.suppress(BrokenPipeError):  # the parent is dead: nobody is there to read it
        os.write(report, json.dumps(outcome).encode())


class Order:
    """What to run, as the parent sends it."""

    def __init__(
        self, argv: list[str], env: dict[str, str], cwd: str | None, timeout: float | None, grace: float
    ) -> None:
        self.argv, self.env, self.cwd, self.timeout, self.grace = argv, env, cwd, timeout, grace


def private_tmp(env: dict[str, str]) -> str | None:
    """Gives the child a TMPDIR of its own where it asks for one and that can be had; its path."""
    if env.pop(PRIVATE_TMP, None) is None:
        return None
    folder = os.path.join(env.get("TMPDIR") or "/tmp", f"eh-{os.urandom(4).hex()}")  # noqa: PTH118, S108
    if len(folder) > SOCKET_PATH:
        return None
    try:
        os.mkdir(folder, 0o700)  # noqa: PTH102
    except OSError:
        return None  # the child says better what is wrong with the place
    env["TMPDIR"] = folder
    return folder


def read_order(control: int) -> Order | None:
    """The order, or None where the parent has given it up before the child was started."""
    data = b""
    while b"\n" not in data:
        part = os.read(control, 1 << 16)
        if not part:
            return None
        data += part
    line, _, more = data.partition(b"\n")
    return None if more else Order(**json.loads(line))


def wake_on_signals() -> int:
    """A descriptor that becomes readable with each signal: SIGCHLD, and those that ask for an end (by their number)."""
    wake, write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(write, False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return wake


def start(order: Order, libc: ctypes.CDLL) -> tuple[int | None, str | None]:
    """Forks and executes; its pid, or the reason why it could not be executed."""
    failed, failing = os.pipe()
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)  # a tool that signals its own group must not reach the supervisor
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != supervisor:
                os._exit(1)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two, and exec would pass that on
                signal.signal(number, signal.SIG_DFL)
            if order.cwd is not None:
                os.chdir(order.cwd)
            os.execvpe(order.argv[0], order.argv, order.env)  # noqa: S606 - no shell is wanted
        except OSError as error:
            os.write(failing, str(error).encode())
        finally:
            os._exit(127)
    os.close(failing)
    reason = os.read(failed, 1 << 12).decode(errors="replace")
    os.close(failed)
    if not reason:
        return child, None
    os.waitpid(child, 0)
    return None, reason


class Children:
    """The supervisor's children: the one it started, and every orphan that came to it."""

    def __init__(self, child: int) -> None:
        self.child = child
        self.status: int | None = None
        """How the started one ended, as `waitpid` gives it."""

    def reap(self) -> bool:
        """Collects what has ended; whether any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.child:
                self.status = status


def watch(children: Children, *, control: int, wake: int, parent: int, deadline: float | None) -> str:
    """Waits for the first reason to end: `exited`, `cancelled` (also by the parent's death), `deadline`."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        children.reap()
        if children.status is not None:
            return "exited"
        left = PARENT_CHECK if deadline is None else min(PARENT_CHECK, deadline - time.monotonic())
        if left <= 0:
            return "deadline"
        ready = [descriptor for descriptor, _ in poll.poll(left * 1000 + 1)]
        signals = os.read(wake, 1 << 10) if wake in ready else b""
        if control in ready or os.getppid() != parent or set(signals) - {signal.SIGCHLD}:
            return "cancelled"


def end_descendants(children: Children, *, wake: int, grace: float) -> list[int]:
    """SIGTERM for every descendant, SIGKILL after `grace` seconds, until there are none; those that cannot be ended."""
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    kill_from = time.monotonic() + grace
    asked: set[int] = set()
    nothing_seen = False
    while children.reap():
        now = time.monotonic()
        living = descendants()
        if not living and nothing_seen:
            return []  # what is left is meant to outlive the run
        # One look may miss a process that gets another parent while /proc is read, two in a row do not.
        nothing_seen = not living
        if now > kill_from + GIVE_UP:
            return living
        for pid in living:
            if now >= kill_from:
                send(pid, signal.SIGKILL)
            elif pid not in asked:
                asked.add(pid)
                send(pid, signal.SIGTERM)
                send(pid, signal.SIGCONT)  # a stopped process could not act on it
        poll.poll(50)
        with contextlib.suppress(BlockingIOError):  # no signal came
            os.read(wake, 1 << 10)
    return []


def send(pid: int, number: int) -> None:
    # Gone in the meantime, or another user's: that one is reported as left if it stays.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def descendants() -> list[int]:
    """Every process below this one but those that are meant to outlive the run; also zombies, which may be processes of
    which only the first thread has ended."""
    offspring: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - see `read`
        if entry.isdecimal():
            try:
                stat = read(f"/proc/{entry}/stat")
            except (FileNotFoundError, ProcessLookupError):
                continue
            parent = stat.rpartition(")")[2].split()[1]
            offspring.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    below = [os.getpid()]
    while below:
        level = [pid for pid in offspring.get(below.pop(), []) if not outlives(pid)]
        found += level
        below += level
    return found


def outlives(pid: int) -> bool:
    """Whether the process is a served one, recorded by `launch`, or belongs to one."""
    try:
        return f"\0{OUTLIVES}=" in "\0" + read(f"/proc/{pid}/environ")
    except OSError:  # gone, a zombie, or another user's
        return False


def oom_kills() -> int:
    """How many processes of our control group the kernel has killed for want of memory; 0 where that cannot be read."""
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            file = f"/sys/fs/cgroup/memory{path}/memory.oom_control"
        elif not controllers:
            file = f"/sys/fs/cgroup{path}/memory.events"
        else:
            continue
        try:
            counters = dict(line.split() for line in read(file).splitlines())
        except OSError:
            continue  # the controller is not mounted here
        if "oom_kill" in counters:
            return int(counters["oom_kill"])
    return 0


def read(path: str) -> str:
    """A file of the kernel's. Without pathlib, whose import takes longer than all the rest of this program's start."""
    with open(path, errors="replace") as file:  # noqa: PTH123
        return file.read()


if __name__ == "__main__":
    main()
