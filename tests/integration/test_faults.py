"""A model whose load hangs, on a staging server and on a live one: the champion answers, and the way out is named."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from flows.releases import repair
from tasks import rollout
from tasks.errors import NotReady, StoreUnusable
from tasks.toolchain import triton
from tasks.toolchain.config_pbtxt import parse, print_config

TESTS = Path(__file__).parents[1]
_spec = spec_from_file_location("release_lab", TESTS / "release_lab.py")
release_lab = module_from_spec(_spec)
sys.modules["release_lab"] = release_lab
_spec.loader.exec_module(release_lab)

HANGING = b"""
import time

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(600)
"""


@pytest.fixture
def lab(tmp_path, triton_installation):
    release_lab.no_proxy()
    made = release_lab.Lab(tmp_path / "lab", deploy="{kind: process, ready_timeout_seconds: 20}")
    yield made
    made.stop()


def hang(lab, monkeypatch) -> None:
    """From now on the lab's models hang when they are loaded: `model.py` of Triton's python backend."""
    base = lab.base_config

    def config(max_batch_size: int = 8) -> str:
        message = parse(base(max_batch_size))
        message.platform, message.backend = "", "python"
        return print_config(message)

    monkeypatch.setattr(lab, "base_config", config)
    write = Path.write_bytes

    def write_model(path: Path, data: bytes) -> int:
        return write(path.with_name("model.py"), HANGING) if path.name == "model.onnx" else write(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_model)


@pytest.mark.slow
def test_a_load_that_hangs_ends_at_its_deadline_and_the_champion_answers(lab, monkeypatch):
    lab.promote(lab.release(1))
    hang(lab, monkeypatch)
    started = time.monotonic()
    with pytest.raises(NotReady):
        lab.release(2, stage=True)
    assert time.monotonic() - started < 60
    hanging = lab.release(3)
    started = time.monotonic()
    with pytest.raises(NotReady, match="loading adding"):
        lab.promote(hanging, load_seconds=4)
    assert time.monotonic() - started < 40
    assert lab.ask(1) == 1
    monkeypatch.undo()

    # The server waits for the hanging model for good: it is ended, and started again with the champion.
    started = time.monotonic()
    lab.stop()
    assert time.monotonic() - started < 60
    done = repair(lab.desk())
    assert (done["release"], lab.ask()) == ("adding/release@1", 1)

    # Killed while it loads: the command says so at once, and the champion comes back.
    (record,) = [triton.observe(path) for path in lab.home.serve.glob("*.json")]
    killer = threading.Timer(1, os.kill, (record.pid, signal.SIGKILL))
    killer.start()
    started = time.monotonic()
    with pytest.raises(NotReady, match="loading adding"):
        lab.promote(hanging)
    killer.join()
    assert time.monotonic() - started < 30
    assert repair(lab.desk())["release"] == "adding/release@1"
    assert lab.ask() == 1


def test_a_disk_that_is_full_at_the_last_step_moves_the_servers_back(lab, monkeypatch):
    """Only the last write is made to fail here; `tests/unit/test_publish.py` fills a real file system."""
    lab.promote(lab.release(1))
    second, config = lab.release(2), lab.config

    def full(*_args, **_options):
        assert lab.ask() == 2
        raise StoreUnusable("the model repository cannot be written: No space left on device")

    monkeypatch.setattr(rollout, "commit_config", full)
    with pytest.raises(StoreUnusable):
        lab.promote(second)
    assert (lab.ask(), lab.config) == (1, config)
    assert repair(lab.desk())["state"] == "unchanged"
