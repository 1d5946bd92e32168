"""A training program that leaves an ONNX graph and no weights: the whole chain goes on without PyTorch's model."""

from __future__ import annotations

import pytest

SCRIPT = '''
"""Fits a linear classifier in closed form, and leaves it as a graph."""
import json, os
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

job = json.loads(Path(os.environ["ENGINEHOUSE_JOB"]).read_text())
output = Path(job["output"])
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))[: round(0.6 * len(digits.target))]
x = np.c_[digits.images[order].reshape(len(order), -1) / 16, np.ones(len(order))]
solved = np.linalg.solve(x.T @ x + 0.5 * np.eye(65), x.T @ np.eye(10)[digits.target[order]]).astype(np.float32)
graph = helper.make_graph(
    [
        helper.make_node("Flatten", ["image"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weight", "bias"], ["logits"]),
    ],
    "linear",
    [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["rows", 1, 8, 8])],
    [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", 10])],
    [numpy_helper.from_array(solved[:64].copy(), "weight"), numpy_helper.from_array(solved[64].copy(), "bias")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
onnx.save(model, output / "model.onnx")
(output / "metrics.json").write_text(json.dumps({"rows": len(order)}))
'''


def with_graph(workspace):
    file = workspace.pipeline("digits")
    (file.parent / "fit.py").write_text(SCRIPT)
    recipe = file.parent / "recipe.py"
    recipe.write_text(recipe.read_text().replace("return Network()", 'raise AssertionError("nobody needs it")'))
    settings = ["train.script=fit.py", "train.nproc_per_node=1", "gates.metrics.accuracy.min=0.9"]
    return [file, *(word for setting in settings for word in ("--set", setting))]


@pytest.mark.slow
def test_a_graph_is_checked_served_and_measured_without_weights(workspace):
    report = workspace.report("run", *with_graph(workspace))
    assert report["metrics"]["accuracy"].keys() == {"onnx", "staging", "live"}
    assert report["metrics"]["accuracy"]["live"] == report["metrics"]["accuracy"]["onnx"] > 0.9
    assert all(gate["passed"] for gate in report["gates"])
    assert workspace.report("run", *with_graph(workspace))["state"] == "unchanged"
    told = workspace.enginehouse("run", *with_graph(workspace), "--set", "train.start_from=digits/train@1", status=2)
    assert "was not made of weights that were trained here" in told.stderr
