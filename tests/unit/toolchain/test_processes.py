"""Processes and ports, as this machine really has them."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

from tasks.toolchain.processes import end, end_session, find_free_ports, is_free, listener, start_time


def test_free_ports_are_distinct_and_no_outgoing_connection_can_take_them() -> None:
    ports = find_free_ports(20)
    assert len(set(ports)) == 20
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < port < first_outgoing and is_free(port) for port in ports)


def test_a_port_with_a_listener_is_taken_and_the_listener_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
        assert f"(pid {os.getpid()})" in (listener(port) or "")
    assert is_free(port)
    assert listener(port) is None


def test_a_zombie_counts_as_gone() -> None:
    child = subprocess.Popen(["true"])
    deadline = time.monotonic() + 10
    while start_time(child.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert start_time(child.pid) is None
    assert Path("/proc", str(child.pid)).exists()
    child.wait()


def test_a_process_of_a_reused_pid_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        started = start_time(child.pid)
        assert started is not None
        end(child.pid, started - 1, grace=0)
        assert child.poll() is None
        end(child.pid, started, grace=0)
        assert child.wait() != 0
    end(child.pid, started, grace=0)  # and one that is gone is no error


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    with subprocess.Popen(["bash", "-c", "trap '' TERM; echo; sleep 60"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        started = start_time(child.pid)
        assert started is not None
        began = time.monotonic()
        end(child.pid, started, grace=0.3)
        assert 0.3 <= time.monotonic() - began < 5
        assert child.wait() == -9


def test_what_a_session_leader_leaves_is_ended() -> None:
    leader = subprocess.Popen(
        ["bash", "-c", "sleep 60 & echo $!"], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert leader.stdout is not None
    left = int(leader.stdout.readline())
    leader.stdout.close()
    leader.wait()
    assert start_time(left) is not None
    end_session(leader.pid)
    deadline = time.monotonic() + 10
    while start_time(left) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert start_time(left) is None
