"""The candidate beside the champion: the same requests to both, on a staging server."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from flows.releases import shadow
from tasks.errors import ConfigError, Refused

TESTS = Path(__file__).parents[1]
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
