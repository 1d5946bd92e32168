"""Low-precision arithmetic node by node: what numpy says, and the overflow that ONNX Runtime on a CPU hides."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper

BOOTSTRAP = Path(__file__).parents[3] / "tasks" / "programs" / "bootstrap.py"
LOW = {"fp16": (T.FLOAT16, np.float16), "bf16": (T.BFLOAT16, ml_dtypes.bfloat16)}


def program(name):
    """A module of `tasks/programs`, loaded as its child process loads it."""
    spec = importlib.util.spec_from_file_location("bootstrap_of_tests", BOOTSTRAP)
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    bootstrap.load_programs()
    return importlib.import_module(f"{bootstrap.PACKAGE}.{name}")


lowered = program("lowered")


def model(nodes, inputs, outputs, weights=None, opset=22):
    tensors = [
        value if isinstance(value, onnx.TensorProto) else numpy_helper.from_array(np.asarray(value), name)
        for name, value in (weights or {}).items()
    ]
    made = h.make_model(h.make_graph(nodes, "g", inputs, outputs, tensors), opset_imports=[h.make_opsetid("", opset)])
    made.ir_version = 10
    return made


def tensor(name, kind=T.FLOAT, shape=("b", 8)):
    return h.make_tensor_value_info(name, kind, list(shape))


def normaliser(kind):
    """300 x / sqrt(mean((300 x)^2)), in between as `kind`: the squares leave fp16."""
    return model(
        [
            h.make_node("Cast", ["x"], ["low"], name="in", to=kind),
            h.make_node("Mul", ["low", "k"], ["a"], name="scale"),
            h.make_node("Mul", ["a", "a"], ["square"], name="square"),
            h.make_node("ReduceMean", ["square"], ["mean"], name="mean", keepdims=1),
            h.make_node("Sqrt", ["mean"], ["root"], name="root"),
            h.make_node("Div", ["a", "root"], ["d"], name="divide"),
            h.make_node("Cast", ["d"], ["y"], name="out", to=T.FLOAT),
        ],
        [tensor("x")],
        [tensor("y")],
        {"k": h.make_tensor("k", kind, [1], [300.0])},
    )


X = np.linspace(0.5, 2, 16).reshape(2, 8).astype(np.float32)


def on_onnxruntime(graph, values):
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": values})[0]


def test_an_overflow_in_fp16_shows_here_and_not_in_onnx_runtime_on_a_cpu():
    graph = normaliser(T.FLOAT16)
    hidden = on_onnxruntime(graph, X)
    assert np.isfinite(hidden).all()
    assert (hidden > 0.3).all()
    shown = lowered.Graph(graph).run({"x": X})["y"]
    assert (shown == 0).all()  # divided by an infinity, as a GPU would


def test_bf16_runs_and_rounds_as_its_type_does():
    got = lowered.Graph(normaliser(T.BFLOAT16)).run({"x": X})["y"]
    exact = lowered.Graph(normaliser(T.FLOAT)).run({"x": X})["y"]
    assert np.allclose(got, exact, rtol=2e-2)
    assert not np.allclose(got, exact, rtol=1e-4)


@pytest.mark.parametrize("precision", LOW)
def test_nodes_named_as_low_read_and_write_in_that_type(precision):
    kind, dtype = LOW[precision]
    weights = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    product = h.make_node("MatMul", ["x", "w"], ["y"], name="mm")
    graph = lowered.Graph(model([product], [tensor("x")], [tensor("y", shape=("b", 4))], {"w": weights}))
    got = graph.run({"x": X}, low={"mm"}, to=kind)["y"]
    expected = X.astype(dtype).astype(np.float32) @ weights.astype(dtype).astype(np.float32)
    assert np.allclose(got, expected.astype(dtype).astype(np.float32), rtol=1e-2, atol=1e-2)
    assert np.array_equal(got, got.astype(dtype).astype(np.float32))
    assert np.allclose(graph.run({"x": X})["y"], X @ weights, rtol=1e-5, atol=1e-5)


def quantised(zero, axis, kind):
    scale = np.float32(0.05) if axis is None else np.array([0.05] * 8, np.float32)
    zeros = kind(zero) if axis is None else np.full(8, zero, kind)
    extra = {} if axis is None else {"axis": axis}
    return model(
        [
            h.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q", **extra),
            h.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="d", **extra),
        ],
        [tensor("x")],
        [tensor("y")],
        {"s": scale, "z": zeros},
    )


@pytest.mark.parametrize(("zero", "axis", "kind"), [(0, None, np.int8), (0, 1, np.int8), (128, None, np.uint8)])
def test_quantisation_is_the_one_that_onnx_runtime_does(zero, axis, kind):
    graph = quantised(zero, axis, kind)
    values = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32) * 4
    assert np.allclose(lowered.Graph(graph).run({"x": values})["y"], on_onnxruntime(graph, values))


def test_fp8_saturates_and_rounds():
    graph = model(
        [
            h.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
            h.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="d"),
        ],
        [tensor("x")],
        [tensor("y")],
        {"s": np.float32(1), "z": h.make_tensor("z", T.FLOAT8E4M3FN, [], [0.0])},
    )
    values = np.array([[0.1, 1.06, 17.0, 1000.0, -1000.0, 0, 3, 448]], np.float32)
    expected = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(lowered.Graph(graph).run({"x": values})["y"], expected)


def test_a_branch_reads_the_tensors_around_it():
    branch = h.make_graph([h.make_node("Mul", ["x", "two"], ["t"])], "then", [], [tensor("t")])
    other = h.make_graph([h.make_node("Neg", ["x"], ["e"])], "else", [], [tensor("e")])
    graph = model(
        [
            h.make_node("ReduceSum", ["x"], ["s"], name="sum", keepdims=0),
            h.make_node("Greater", ["s", "zero"], ["c"], name="greater"),
            h.make_node("If", ["c"], ["y"], name="choose", then_branch=branch, else_branch=other),
        ],
        [tensor("x")],
        [tensor("y")],
        {"two": np.float32(2), "zero": np.float32(0)},
    )
    run = lowered.Graph(graph).run
    assert np.array_equal(run({"x": X})["y"], 2 * X)
    assert np.array_equal(run({"x": -X})["y"], X)
