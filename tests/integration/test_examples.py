"""Every example, from training to a live Triton server, with the numbers that its README promises."""

import json
import urllib.request

import pytest

OTHERS = {"mnist": 0.97, "code_or_prose": 0.9}
"""Beside digits, which test_chain.py covers, and the least accuracy of each."""


@pytest.mark.parametrize("example", ["mnist", pytest.param("code_or_prose", marks=pytest.mark.slow)])
def test_an_example_is_served_as_good_as_it_was_trained(example, workspace):
    report = workspace.report("run", workspace.pipeline(example), timeout=900)
    assert report["state"] == "released"
    for values in report["metrics"].values():
        assert values.keys() == {"pytorch", "onnx", "staging", "live"}
        assert max(values.values()) - min(values.values()) <= 0.001
    assert min(report["metrics"]["accuracy"].values()) >= OTHERS[example]
    url = f"{report['served']['http']}/v2/models/{report['release']['model']}"
    with urllib.request.urlopen(url) as answer:
        metadata = json.load(answer)
    assert metadata["platform"] == "onnxruntime_onnx"
    assert metadata["versions"] == ["1"]
    assert workspace.report("run", workspace.pipeline(example))["state"] == "unchanged"
