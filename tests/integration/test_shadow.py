"""The candidate beside the champion: the same requests to both, on a staging server."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from flows.releases import repair, shadow
from tasks.errors import ConfigError, Refused
from tasks.toolchain import triton_client
from tests.waiting import eventually

TESTS = Path(__file__).parents[1]
HOLDING = """
import sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from release_lab import Lab
from flows.releases import candidate_of
from tasks.beside import served_beside
from tasks.publish import Repository

lab = Lab(Path(sys.argv[2]))
release = lab.desk().standing.candidate
repository = Repository(lab.pipeline.repository)
(replica,) = lab.target.observe()
with served_beside(candidate_of(lab.store, release), repository=repository, replica=replica) as name:
    print(name, flush=True)
    time.sleep(600)
"""
_spec = spec_from_file_location("release_lab", TESTS / "release_lab.py")
release_lab = module_from_spec(_spec)
sys.modules["release_lab"] = release_lab
_spec.loader.exec_module(release_lab)


@pytest.fixture
def lab(tmp_path, triton_installation):
    release_lab.no_proxy()
    made = release_lab.Lab(tmp_path / "lab")
    yield made
    made.stop()


def test_answers_and_latency_of_both_are_told_before_a_promotion(lab, tmp_path):
    first = lab.release(1)
    with pytest.raises(Refused, match="no champion"):
        shadow(lab.desk())
    lab.promote(first)
    lab.release(1.5)
    found = shadow(lab.desk())
    assert (found["champion"], found["candidate"]) == ("adding/release@1", "adding/release@2")
    assert found["requests"] == 3
    assert found["outputs"]["y"]["max"] == pytest.approx(0.5)
    assert found["latency"].keys() == {"champion", "candidate"}
    assert all(value["p99"] > 0 for value in found["latency"].values())
    assert lab.ask() == 1, "nothing is promoted by it"

    requests = tmp_path / "requests.jsonl"
    asked = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 1], "data": [1, 2]}]}
    requests.write_text("\n".join([json.dumps(asked)] * 7))
    assert shadow(lab.desk(), requests=requests)["requests"] == 7
    requests.write_text(json.dumps(asked) + "\nnonsense\n")
    with pytest.raises(ConfigError, match=r"no request"):
        shadow(lab.desk(), requests=requests)


def test_the_candidate_answers_beside_the_live_champion_and_is_gone_again(lab, tmp_path):
    lab.promote(lab.release(1))
    lab.release(1.5)
    server = lab.target.observe()[0].address
    before = triton_client.statistics(server, "adding", 1)[0]["inference_count"]
    requests = tmp_path / "requests.npz"
    np.savez(requests, x=np.arange(5, dtype=np.float32)[:, None])
    found = shadow(lab.desk(), requests=requests, live=True)
    assert (found["on"], found["requests"]) == ("live", 5)
    assert found["outputs"]["y"]["max"] == pytest.approx(0.5)

    def asked() -> int:
        return int(triton_client.statistics(server, "adding", 1)[0]["inference_count"]) - int(before)

    # A request is counted a moment after it was answered.
    assert eventually(lambda: asked() == 6, 5), "the live champion was asked, and once to connect"
    assert eventually(lambda: triton_client.ready_versions(server, "adding-candidate") == ())
    assert [path.name for path in (lab.root / "models").iterdir()] == ["adding"]
    assert lab.ask() == 1
    np.savez(requests, x=np.zeros(3, np.float32), z=np.zeros(2, np.float32))
    with pytest.raises(ConfigError, match="different numbers of rows"):
        shadow(lab.desk(), requests=requests, live=True)
    np.savez(requests, x=np.array([[print]], dtype=object))
    with pytest.raises(ConfigError, match=r"no \.npz of plain arrays"):
        shadow(lab.desk(), requests=requests, live=True)

    # Killed while it compares: the next repair unloads it, and a server that starts again would not serve it anyhow.
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(TESTS), str(lab.root)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline().strip() == "adding-candidate"
    child.kill()
    child.wait()
    assert triton_client.ready_versions(server, "adding-candidate") == (2,)
    assert release_lab.answer(server.http_url) == 1.5, "the champion answers, asked for 0.5 and adding 1"
    assert any("serves adding-candidate no more" in line for line in repair(lab.desk())["done"])
    assert eventually(lambda: triton_client.ready_versions(server, "adding-candidate") == ())
    assert repair(lab.desk())["state"] == "unchanged"

    mine = lab.root / "models" / "adding-candidate" / "1"
    mine.mkdir(parents=True)
    with pytest.raises(Refused, match="a model of that name"):
        shadow(lab.desk(), live=True)
    assert mine.is_dir()
