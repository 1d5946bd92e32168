"""Telling living processes from dead ones."""

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

from tasks.artifacts.owner import Owner


def owner_of(pid):
    """What `Owner.current` would be in the process."""
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return dataclasses.replace(Owner.current(), pid=pid, start=start)


def test_this_process_lives_and_reads_back():
    me = Owner.current()
    assert me.pid == os.getpid()
    assert me == owner_of(os.getpid())
    assert me.alive() is True
    assert Owner.from_json(me.to_json()) == me
    assert dataclasses.replace(Owner.from_token(me.token), host=me.host) == me
    assert Owner.from_token("anything else") is None


def test_a_child_lives_until_it_ends_and_a_zombie_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = owner_of(child.pid)
    assert owner.alive() is True
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
    assert owner.alive() is False
    child.wait()
    assert owner.alive() is False


def test_the_same_pid_at_another_time_is_another_process():
    assert dataclasses.replace(Owner.current(), start=Owner.current().start - 1).alive() is False


def test_a_process_of_another_boot_or_container_cannot_be_seen():
    assert dataclasses.replace(Owner.current(), boot="0" * 32).alive() is None
    assert dataclasses.replace(Owner.current(), pid_namespace=1).alive() is None


def test_a_forked_child_is_someone_else_and_keeps_its_parents_pins(workshop):
    ref = workshop.build(workshop.key())
    pins = sorted((workshop.root / "pins").iterdir())
    parent = Owner.current()
    child = os.fork()
    if child == 0:
        try:
            good = Owner.current().pid == os.getpid() != parent.pid
            workshop.store.path(ref)
            workshop.store.close()
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted((workshop.root / "pins").iterdir()) == pins


def test_a_process_whose_first_thread_ended_lives_while_others_run():
    program = (
        "import ctypes, threading\nthreading.Thread(target=input).start()\nprint(1, flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    owner = owner_of(child.pid)
    deadline = threading.Event()
    while "Z" not in Path(f"/proc/{child.pid}/stat").read_text() and not deadline.wait(0.01):
        if child.poll() is not None:
            break
    assert owner.alive() is True
    child.kill()
    child.communicate()
    assert owner.alive() is False
