"""A graph that a training program left itself is asked everything that one of PyTorch's making is asked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.programs import export


def graph(nodes=None, *, rows="n", output="y", inputs=1):
    """`y = x · weight`, four numbers to three."""
    taken = [helper.make_tensor_value_info(f"x{n or ''}", TensorProto.FLOAT, [rows, 4]) for n in range(inputs)]
    given = helper.make_tensor_value_info(output, TensorProto.FLOAT, [rows, 3])
    weight = numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(4, 3) / 10, "weight")
    nodes = nodes or [helper.make_node("MatMul", ["x", "weight"], [output])]
    made = helper.make_graph(nodes, "given", taken, [given], [weight])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def exported(made, model) -> Path:
    given = made.folder / "given.onnx"
    given.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    job = made.job("export", onnx=str(given), parity={"atol": 1e-4})
    export.main(job)  # type: ignore[arg-type]
    return Path(job["output"])


def test_it_keeps_its_opset_and_gets_the_declared_names_of_axes(bench):
    output = exported(bench(), graph())
    signature = json.loads((output / "signature.json").read_text())
    assert signature["opset"] == 18
    assert signature["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}]
    assert signature["outputs"] == [{"name": "y", "dtype": "float32", "shape": ["batch", 3]}]
    assert onnx.load(output / "model.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


REFUSED = {
    "no graph": (b"no graph at all", "it cannot be read as an ONNX graph"),
    "an axis that is fixed": (graph(rows=4), "input x, axis 0 (batch): declared is batch, but the graph has 4 there"),
    "other outputs": (graph(output="z"), 'it gives "z"; the recipe\'s outputs are "y"'),
    "another input": (graph(inputs=2), "the graph takes x, x1 and gives 1 outputs; declared are x"),
    "rows that depend on each other": (
        graph([
            helper.make_node("MatMul", ["x", "weight"], ["z"]),
            helper.make_node("Softmax", ["z"], ["y"], axis=0),
        ]),
        "a row's answer depends on the other rows of its batch",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused(model, says, bench, failure_of):
    failure = failure_of(exported, bench(), model)
    assert failure.kind == "export refused"
    assert says in str(failure)
