"""The records of kept servers; the servers themselves are in tests/integration/test_watch.py."""

import errno
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flows.operation import server
from tasks.errors import NotReady, Refused
from tasks.home import Home
from tasks.toolchain import processes


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


def record(home, **changed):
    """This test's own process, as if it were the server."""
    server.folder(home).mkdir(parents=True, exist_ok=True)
    kept = server._write(home, "server", os.getpid(), "http://127.0.0.1:9/api", home.root / "log")
    (server.folder(home) / "server.json").write_text(json.dumps({**vars(kept), **changed}))
    return replace(kept, **changed)


def test_a_record_of_a_living_process_is_found(home):
    assert server.kept(home) is None
    assert server.kept(home) == server.kept(home)
    assert record(home) == server.kept(home)


@pytest.mark.parametrize("stale", [{"start_time": 1}, {"boot_id": "another boot"}, {"pid": 4_000_000}])
def test_a_record_that_outlived_its_process_counts_for_nothing(home, stale):
    record(home, **stale)
    assert server.kept(home) is None
    assert server.down(home) == []
    assert not (server.folder(home) / "server.json").exists()


@pytest.mark.parametrize("text", ["", '{"pid": 1', "[]", "{}"])
def test_a_record_that_was_cut_counts_for_nothing(home, text):
    record(home)
    (server.folder(home) / "server.json").write_text(text)
    assert server.kept(home) is None


def test_down_leaves_nothing_where_nothing_was(home):
    assert server.down(home) == []
    assert not home.root.exists()


def test_a_port_that_is_taken_is_refused_with_who_has_it(home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=rf"port {port} is taken by .*pid {os.getpid()}"):
            server.up(home, port=port)


def test_a_kept_server_on_another_port_is_not_started_a_second_time(home):
    record(home)
    with pytest.raises(Refused, match=r"runs at http://127\.0\.0\.1:9 already"):
        server.up(home, port=10)


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A program in the place of Python's, which stays; where it writes the number of its process, and its words."""
    program, told = tmp_path / "python", tmp_path / "told"
    program.write_text(f'#!/bin/sh\necho "$$ $*" >> {told}\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return told


def started(told):
    deadline = time.monotonic() + 20
    while not told.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(told.read_text().split()[0])


def test_a_server_that_cannot_be_recorded_does_not_stay(home, python, monkeypatch):
    def full(*_):
        started(python)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(server, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        server.up(home)
    assert processes.start_time(started(python)) is None


def test_a_server_comes_back_where_the_one_was_that_died(home, python, monkeypatch):
    (port,) = processes.find_free_ports(1)
    record(home, pid=4_000_000, url=f"http://127.0.0.1:{port}/api")
    monkeypatch.setattr(server, "await_answer", lambda *_: None)
    try:
        found, new = server.up(home)
        assert (found[0].port, new) == (port, {"server"})
    finally:
        server.down(home)


def test_a_worker_of_a_server_that_died_is_replaced(home, python):
    record(home)
    left = subprocess.Popen(["sleep", "60"], start_new_session=True)
    server._write(home, "worker", left.pid, "http://127.0.0.1:10/api", home.root / "log")
    present = server.kept(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "await_answer", lambda *_: None)
        found, new = server.up(home)
    try:
        assert left.wait(10) != 0
        assert found[0] == present
        assert (found[1].name, found[1].url, new) == ("worker", present.url, {"worker"})
    finally:
        server._end(found[1])


def test_a_server_that_dies_at_its_start_is_told_at_once_with_the_end_of_its_log(tmp_path, monkeypatch):
    log = tmp_path / "log"
    program = tmp_path / "python"  # a server that cannot start, whatever Prefect would do
    program.write_text("#!/bin/sh\necho the database is locked\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with server.temporary(log, os.environ) as (url, process), pytest.raises(NotReady) as raised:
        server.await_answer(url, lambda: process.poll() is None, log, patience=60)
    assert "died at its start" in str(raised.value)
    assert raised.value.last_lines == ("the database is locked",)


def test_a_server_that_does_not_answer_in_time_is_told_with_its_address(tmp_path):
    (port,) = processes.find_free_ports(1)
    url = f"http://127.0.0.1:{port}/api"
    with pytest.raises(NotReady, match=f"{url} does not answer after 0 s"):
        server.await_answer(url, lambda: True, Path(tmp_path / "log"), patience=0.05)
