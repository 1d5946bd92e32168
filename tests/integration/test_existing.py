"""Servers that somebody else runs: moved one by one, and moved back when one does not follow."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from flows.releases import repair
from tasks import rollout
from tasks.errors import NotReady
from tasks.toolchain import triton, triton_client
from tests.waiting import eventually

TESTS = Path(__file__).parents[1]
_spec = spec_from_file_location("release_lab", TESTS / "release_lab.py")
release_lab = module_from_spec(_spec)
sys.modules["release_lab"] = release_lab
_spec.loader.exec_module(release_lab)


@pytest.fixture
def fleet(tmp_path, triton_installation):
    """Three servers on one repository, and the pipeline that lists them."""
    release_lab.no_proxy()
    root = tmp_path / "lab"
    (root / "models").mkdir(parents=True)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                triton.staging(triton_installation, repository=root / "models", folder=tmp_path / "s", name=f"s{n}")
            )
            for n in range(3)
        ]
        listed = ", ".join(f"{{http_port: {s.http_port}, grpc_port: {s.grpc_port}}}" for s in servers)
        yield release_lab.Lab(root, deploy=f"{{kind: existing, endpoints: [{listed}]}}"), servers


def everyone(lab) -> list[float]:
    return [lab.ask(server=index) for index in range(3)]


def test_all_servers_are_moved_and_moved_back_when_one_refuses(fleet, monkeypatch):
    lab, servers = fleet
    lab.promote(lab.release(1))
    assert everyone(lab) == [1, 1, 1]
    config = lab.config
    second = lab.release(2)
    load, loads = triton_client.load, []

    def third_fails(address, model, **options):
        loads.append(address.http_port)
        if len(loads) == 3:
            # The third server is given a config that it cannot load, as if its disk were another.
            options["config_text"] = options["config_text"].replace("versions: [1, 2]", "versions: [1, 2, 3]")
            options["config_text"] = options["config_text"].replace("onnxruntime_onnx", "no_such_platform")
        load(address, model, **options)

    monkeypatch.setattr(rollout.triton_client, "load", third_fails)
    with pytest.raises(NotReady, match="loading adding"):
        lab.promote(second)
    assert everyone(lab) == [1, 1, 1]
    assert lab.config == config
    ports = [server.http_port for server in servers]
    assert loads == [*ports, *reversed(ports)], "one by one, and back in the other order"

    monkeypatch.undo()
    lab.promote(second)
    assert everyone(lab) == [2, 2, 2]
    lab.roll_back()
    assert everyone(lab) == [1, 1, 1]


def test_one_that_does_not_answer_stops_it_before_any_other_is_moved(fleet):
    lab, servers = fleet
    lab.promote(lab.release(1))
    second = lab.release(2)
    os.kill(servers[2].pid, signal.SIGKILL)
    assert eventually(lambda: not triton_client.server_live(servers[2].address))
    with pytest.raises(NotReady, match=r"1 of 3 servers do not answer: 127\.0\.0\.1-"):
        lab.promote(second)
    assert [lab.ask(server=0), lab.ask(server=1)] == [1, 1]
    with pytest.raises(NotReady, match="1 of 3 servers"):
        repair(lab.desk())


def test_one_that_restarts_in_the_middle_of_a_rollout_has_the_others_moved_back(fleet, monkeypatch):
    lab, servers = fleet
    lab.promote(lab.release(1))
    second = lab.release(2)
    load, loads = triton_client.load, []

    def second_dies(address, model, **options):
        loads.append(address.http_port)
        if len(loads) == 2:
            os.kill(servers[1].pid, signal.SIGKILL)
            assert eventually(lambda: not triton_client.server_live(address))
        load(address, model, **options)

    monkeypatch.setattr(rollout.triton_client, "load", second_dies)
    with pytest.raises(NotReady, match="loading adding"):
        lab.promote(second)
    url = servers[0].address.http_url
    assert release_lab.answer(url) == 1.5
    assert release_lab.answer(servers[2].address.http_url) == 1.5
    assert any("could not be moved back" in event.get("text", "") for event in lab.heard)
