"""Which process a run belongs to: told by number, start and boot; and a process whose run was taken from it stops."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prefect.exceptions import Abort
from prefect.states import Crashed, Running

from flows import train_to_deploy
from flows.operation import owner
from tests.waiting import eventually


def run_of(label):
    return SimpleNamespace(labels={} if label is None else {owner.OWNER: label})


def label_of(pid):
    return f"{owner._machine()} {owner._life(pid)}"


def test_a_process_lives_as_long_as_it_does_and_no_other_takes_its_place():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    label = label_of(child.pid)
    assert owner.owner_lives(run_of(label))
    assert owner.owner_lives(run_of(f"{label}1")) is False, "another process of that number"
    child.stdin.close()
    stat = Path(f"/proc/{child.pid}/stat")
    assert eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    assert owner.owner_lives(run_of(label)) is False, "nobody has waited for it yet"
    child.wait()
    assert owner.owner_lives(run_of(label)) is False
    assert owner.owner_lives(run_of(f"elsewhere {label}")) is None
    assert owner.owner_lives(run_of(None)) is None


@pytest.fixture
def server(monkeypatch):
    """What Prefect's server would say of the present run."""
    told = SimpleNamespace(state=Running(), run_count=1, error=None)
    monkeypatch.setattr(owner, "_present", lambda: SimpleNamespace(id="one", run_count=1))
    monkeypatch.setattr(owner, "get_run_logger", lambda: SimpleNamespace(warning=lambda text: None))

    def read(identity):
        if told.error is not None:
            raise told.error
        return told

    @contextmanager
    def client(*, sync_client):
        yield SimpleNamespace(read_flow_run=read)

    monkeypatch.setattr(owner, "get_client", client)
    return told


def test_a_run_that_is_still_ours_goes_on(server):
    owner.require_ours()
    server.error = httpx.ConnectError("restarting")
    owner.require_ours()


@pytest.mark.parametrize("change", [{"state": Crashed()}, {"run_count": 2}, {"state": None}], ids=str)
def test_a_run_that_was_taken_from_this_process_stops_before_its_next_stage(server, change, monkeypatch):
    monkeypatch.setattr(train_to_deploy, "task", lambda **options: pytest.fail("it began"))
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(Abort, match=r"this process does not go on with it"):
        train_to_deploy._as_task("train", lambda: None)
