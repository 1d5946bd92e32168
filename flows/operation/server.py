"""Prefect servers of this machine: one that `enginehouse up` keeps until `down`, or one that ends with its run.

A kept process is recorded in the home with its pid and start time, so that a record which outlived its process is
told from a living one. No Prefect is imported here: the server is a child, and looking for it must cost nothing.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from tasks.errors import NotReady, Refused
from tasks.home import Home
from tasks.toolchain import processes
from tasks.toolchain.command import last_lines

HOST = "127.0.0.1"
PATIENCE = 180.0
"""Seconds until a server must answer: the first start makes the database, and a small machine may be busy."""
POOL = "enginehouse"
"""The work pool of the worker that `up --worker` starts."""

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # What Prefect starts with `-m` looks for modules in the current folder first: a `json.py` there would be taken for
    # Python's own.
    "PYTHONSAFEPATH": "1",
}
"""What every process of Prefect's gets that we start, unless the user says otherwise."""

Name = Literal["server", "worker"]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A process that `up` has started."""

    name: Name
    pid: int
    start_time: int
    boot_id: str
    url: str
    """The API's; of the server that it is, or that it works for."""
    log: str
    started: str

    @property
    def ui(self) -> str:
        """Where a person looks."""
        return self.url.removesuffix("/api")

    @property
    def port(self) -> int:
        """Where the server listens."""
        return int(self.ui.rpartition(":")[2])

    @property
    def lives(self) -> bool:
        """Whether that process runs; what it answers is another question."""
        return self.boot_id == processes.boot_id() and self.start_time == processes.start_time(self.pid)


def folder(home: Home) -> Path:
    """Where the kept server has its database, its log and its record."""
    return home.root / "prefect"


def kept(home: Home, name: Name = "server") -> Kept | None:
    """The process that `up` has started, if it lives. Milliseconds."""
    record = recorded(home, name)
    return record if record is not None and record.lives else None


def up(home: Home, *, port: int | None = None, worker: bool = False) -> tuple[list[Kept], set[Name]]:
    """Start the server of this home, and a worker if wanted, unless they run; returns both, and which are new.

    Raises `Refused` where it runs on another port than `port`, or something else has that port; `NotReady` where it
    does not come up. A server that died comes back on its port, where that is free; a worker of another one goes.
    """
    with _alone(home):
        server = kept(home)
        started: set[Name] = set()
        if server is None:
            server = _start_server(home, port)
            started.add("server")
        elif port is not None and server.url != _url(port):
            raise Refused(
                f"the Prefect server of this home runs at {server.ui} already\nend it first: enginehouse down"
            )
        else:
            await_answer(server.url, lambda: server.lives, Path(server.log))
        found = [server]
        hand = kept(home, "worker")
        if hand is not None and hand.url != server.url:  # of a server that died: nothing would reach it any more
            _end(hand)
            hand, worker = None, True
        if worker and hand is None:
            hand = _start_worker(home, server)
            started.add("worker")
        return [*found, *([] if hand is None else [hand])], started


def down(home: Home) -> list[Kept]:
    """End what `up` has started; returns what ran. The worker goes first: it tells the server how its runs ended."""
    if not folder(home).is_dir():
        return []
    with _alone(home):
        ended = []
        names: tuple[Name, ...] = ("worker", "server")
        for name in names:
            process = kept(home, name)
            if process is not None:
                _end(process)
                ended.append(process)
            _record(home, name).unlink(missing_ok=True)
        return ended


def launch(port: int, log: Path, environment: Mapping[str, str], *, detached: bool) -> subprocess.Popen[bytes]:
    """Start a server process that listens at `port`; `detached` from our terminal and our end."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            # As `prefect server start` does in the end, without the seconds that its command line takes.
            [
                *(sys.executable, "-I", "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"),
                *("--host", HOST, "--port", str(port), "--log-level", "warning", "--lifespan", "on"),
            ],
            env={**environment, "PREFECT_API_URL": _url(port), "PREFECT_SERVER_API_PORT": str(port)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=detached,
        )


def await_answer(url: str, lives: Callable[[], bool], log: Path, patience: float = PATIENCE) -> None:
    """Return when the server answers. Raises `NotReady` with the end of its log as soon as it is dead, or too late."""
    deadline = time.monotonic() + patience
    while not answers(url):
        if not lives():
            raise NotReady("the Prefect server died at its start", log=log, last_lines=last_lines(log))
        if time.monotonic() > deadline:
            raise NotReady(
                f"the Prefect server at {url} does not answer after {patience:.0f} s",
                log=log,
                last_lines=last_lines(log),
            )
        time.sleep(0.1)


def answers(url: str) -> bool:
    """Whether a Prefect server answers there. No proxy is asked: the server is on this machine."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def temporary(log: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that ends with the block: its URL, before it answers, and its process."""
    (port,) = processes.find_free_ports(1)
    # As Prefect marks one that it starts itself: no pages, and no schedules that nobody would be there to keep.
    marks = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    process = launch(port, log, {**environment, **marks}, detached=False)
    try:
        yield _url(port), process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start_server(home: Home, port: int | None) -> Kept:
    former = recorded(home, "server")
    if port is None and former is not None and processes.is_free(former.port):
        port = former.port  # of one that died: its worker and other programs know it by that
    elif port is None:
        (port,) = processes.find_free_ports(1)
    elif not processes.is_free(port):
        who = processes.listener(port)
        raise Refused(f"port {port} is taken{f' by {who}' if who else ''}\nname another one, or none")
    room = folder(home)
    database = f"sqlite+aiosqlite:///{room / 'prefect.db'}"
    environment = {**QUIET, "PREFECT_SERVER_DATABASE_CONNECTION_URL": database, **os.environ, "PREFECT_HOME": str(room)}
    log = room / "server.log"
    process = launch(port, log, environment, detached=True)
    try:
        server = _write(home, "server", process.pid, _url(port), log)
        await_answer(server.url, lambda: process.poll() is None, log)
    except BaseException:
        _discard(home, "server", process)
        raise
    return server


def _start_worker(home: Home, server: Kept) -> Kept:
    room = folder(home)
    log = room / "worker.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-m", "prefect", "worker", "start", "--type", "process"),
                *("--pool", POOL, "--name", f"{POOL}-{home.root.parent.name}"),
            ],
            env={**QUIET, **os.environ, "PREFECT_API_URL": server.url, "PREFECT_HOME": str(room)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _write(home, "worker", process.pid, server.url, log)
    except BaseException:
        _discard(home, "worker", process)
        raise


def _discard(home: Home, name: Name, process: subprocess.Popen[bytes]) -> None:
    """End what has not come up, or could not be recorded: nobody would find it again."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _record(home, name).unlink(missing_ok=True)


def _end(process: Kept) -> None:
    processes.end(process.pid, process.start_time, grace=30)
    processes.end_session(process.pid)


def _write(home: Home, name: Name, pid: int, url: str, log: Path) -> Kept:
    started = processes.start_time(pid)
    if started is None:
        raise NotReady(f"the Prefect {name} died at its start", log=log, last_lines=last_lines(log))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = Kept(
        name=name, pid=pid, start_time=started, boot_id=processes.boot_id(), url=url, log=str(log), started=now
    )
    file = _record(home, name)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record)) + "\n")
    partial.replace(file)
    return record


def recorded(home: Home, name: Name = "server") -> Kept | None:
    """What was written down of the process that `up` has started last, whether it lives or not."""
    try:
        return Kept(**json.loads(_record(home, name).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):  # none, or cut by a crash: `up` writes it anew
        return None


def _record(home: Home, name: Name) -> Path:
    return folder(home) / f"{name}.json"


def _url(port: int) -> str:
    return f"http://{HOST}:{port}/api"


@contextmanager
def _alone(home: Home) -> Iterator[None]:
    """Two `up` at once start one server."""
    folder(home).mkdir(parents=True, exist_ok=True)
    with (folder(home) / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
