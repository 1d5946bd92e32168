"""Graphs in lower precision, for real: ModelOpt and ONNX Runtime convert, and what they made is compared.

The environment is made by `enginehouse engine setup modelopt`; .ci/run does so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper

from tasks.toolchain import builder_environment

BOOTSTRAP = Path(builder_environment.__file__).parents[1] / "programs" / "bootstrap.py"
NEEDS_MODELOPT = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not builder_environment.find_environment("modelopt").is_ready,
        reason="make it with `enginehouse engine setup modelopt`",
    ),
]


def save(path: Path, nodes, weights, *, shape, outputs) -> None:
    tensors = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in weights.items()]
    inputs = [h.make_tensor_value_info("x", T.FLOAT, shape)]
    made = h.make_graph(nodes, "g", inputs, [h.make_tensor_value_info("y", T.FLOAT, outputs)], tensors)
    model = h.make_model(made, opset_imports=[h.make_opsetid("", 20)])
    model.ir_version = 10
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    (path.parent / "signature.json").write_text(
        json.dumps({"inputs": [], "outputs": [], "opset": 20, "ir_version": 10})
    )


def cnn(path: Path) -> None:
    rng = np.random.default_rng(0)
    nodes = [
        h.make_node("Conv", ["x", "k"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        h.make_node("Relu", ["c"], ["r"], name="relu"),
        h.make_node("Flatten", ["r"], ["f"], name="flatten", axis=1),
        h.make_node("MatMul", ["f", "w"], ["y"], name="head"),
    ]
    weights = {"k": rng.standard_normal((8, 1, 3, 3)) * 0.3, "w": rng.standard_normal((512, 10)) * 0.05}
    save(path, nodes, weights, shape=["b", 1, 8, 8], outputs=["b", 10])


def overflowing(path: Path) -> None:
    """A normalisation whose squares leave fp16 on some data, between two products that are harmless."""
    nodes = [
        h.make_node("MatMul", ["x", "w"], ["m"], name="before"),
        h.make_node("Mul", ["m", "m"], ["square"], name="square"),
        h.make_node("ReduceMean", ["square"], ["mean"], name="mean", keepdims=1),
        h.make_node("Sqrt", ["mean"], ["root"], name="root"),
        h.make_node("Div", ["m", "root"], ["d"], name="divide"),
        h.make_node("MatMul", ["d", "v"], ["y"], name="after"),
    ]
    weights = {"w": np.eye(16) + 0.01, "v": np.random.default_rng(0).standard_normal((16, 4)) * 0.2}
    save(path, nodes, weights, shape=["b", 16], outputs=["b", 4])


def batches(path: Path, shape, *, scale: float = 1.0, seed: int = 1, count: int = 2) -> Path:
    rng = np.random.default_rng(seed)
    made = {f"{i:05}/x": (rng.random(shape) * scale).astype(np.float32) for i in range(count)}
    np.savez(path, **made)
    return path


def convert(folder: Path, precision: str, calibration: Path, check: Path, *, quantizer="modelopt", keep=(), atol=0.02):
    job = {
        "onnx": str(folder / "model.onnx"),
        "precision": precision,
        "quantizer": quantizer,
        "keep_fp32": keep if keep == "auto" else list(keep),
        "calibration": str(calibration),
        "check": str(check),
        "parity": {"atol": atol, "rtol": atol},
        "output": str(folder / "output"),
        "work": str(folder / "work"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    light = quantizer == "onnxruntime"
    python = sys.executable if light else str(builder_environment.find_environment("modelopt").python)
    done = subprocess.run(
        [python, "-I", str(BOOTSTRAP), "precision", str(folder / "job.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    explained = folder / "output" / "error.json"
    if explained.exists():
        assert done.returncode == 1
        return None, json.loads(explained.read_text())
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "output" / "report.json").read_text()), None


@pytest.fixture
def image_batches(tmp_path):
    shape = (8, 1, 8, 8)
    return batches(tmp_path / "calibration.npz", shape, count=4), batches(tmp_path / "check.npz", shape, seed=2)


CONVERSIONS = [
    pytest.param("fp16", "modelopt", 4, 0, marks=NEEDS_MODELOPT),
    pytest.param("bf16", "modelopt", 4, 0, marks=NEEDS_MODELOPT),
    pytest.param("int8", "modelopt", 1, 2, marks=NEEDS_MODELOPT),
    pytest.param("int8", "onnxruntime", 3, 4),
]


@pytest.mark.parametrize(("precision", "quantizer", "converted", "quantize_nodes"), CONVERSIONS)
def test_what_was_converted_is_counted_and_compared(
    tmp_path, image_batches, precision, quantizer, converted, quantize_nodes
):
    cnn(tmp_path / "model.onnx")
    report, error = convert(tmp_path, precision, *image_batches, quantizer=quantizer, atol=0.05)
    assert error is None
    assert report["converted"] == converted
    assert report["quantize_nodes"] == quantize_nodes
    assert 0 < report["max_abs_difference"] < 0.05
    model = onnx.load(tmp_path / "output" / "model.onnx")
    onnx.checker.check_model(model)
    ends = [*model.graph.input, *model.graph.output]
    assert {v.type.tensor_type.elem_type for v in ends} == {T.FLOAT}, "clients see the types that they saw before"
    signature = json.loads((tmp_path / "output" / "signature.json").read_text())
    assert signature["opset"] == next(o.version for o in model.opset_import if not o.domain)


@pytest.mark.parametrize(("precision", "quantizer", "converted", "quantize_nodes"), CONVERSIONS)
def test_the_same_conversion_gives_the_same_bytes(
    tmp_path, image_batches, precision, quantizer, converted, quantize_nodes
):
    graphs = []
    for name in ("one", "two"):
        cnn(tmp_path / name / "model.onnx")
        report, _ = convert(tmp_path / name, precision, *image_batches, quantizer=quantizer, atol=0.05)
        assert report is not None
        graphs.append((tmp_path / name / "output" / "model.onnx").read_bytes())
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("precision", [pytest.param("fp8", marks=NEEDS_MODELOPT)])
def test_products_of_matrices_are_converted_to_fp8(tmp_path, precision):
    rng = np.random.default_rng(0)
    nodes = [
        h.make_node("MatMul", ["x", "w"], ["m"], name="first"),
        h.make_node("Relu", ["m"], ["r"], name="between"),
        h.make_node("MatMul", ["r", "v"], ["y"], name="second"),
    ]
    weights = {"w": rng.standard_normal((64, 64)) * 0.1, "v": rng.standard_normal((64, 16)) * 0.1}
    save(tmp_path / "model.onnx", nodes, weights, shape=["b", 64], outputs=["b", 16])
    data = batches(tmp_path / "calibration.npz", (8, 64), count=4), batches(tmp_path / "check.npz", (8, 64), seed=2)
    report, error = convert(tmp_path, precision, *data, atol=0.1)
    assert error is None
    assert (report["converted_by_op"], report["quantize_nodes"]) == ({"MatMul": 2}, 4)
    assert 0 < report["max_abs_difference"] < 0.1
    types = {t.data_type for t in onnx.load(tmp_path / "output" / "model.onnx").graph.initializer}
    assert T.FLOAT8E4M3FN in types


@pytest.mark.parametrize("precision", [pytest.param("fp8", marks=NEEDS_MODELOPT)])
def test_a_tool_that_ends_well_and_converted_nothing_is_a_failure(tmp_path, image_batches, precision):
    cnn(tmp_path / "model.onnx")
    report, error = convert(tmp_path, precision, *image_batches)
    assert report is None
    assert error["kind"] == "gate failed"
    assert "nothing was converted to fp8: all 4 nodes stay as they were" in error["message"]


@pytest.fixture
def unlike_batches(tmp_path):
    """Calibration data on which nothing overflows, and data to check with on which it does."""
    return (
        batches(tmp_path / "calibration.npz", (8, 16), count=4),
        batches(tmp_path / "check.npz", (8, 16), scale=400, seed=2),
    )


@pytest.mark.parametrize("precision", [pytest.param("fp16", marks=NEEDS_MODELOPT)])
def test_an_overflow_is_refused_with_its_layer_and_the_list_that_mends_it(tmp_path, unlike_batches, precision):
    overflowing(tmp_path / "model.onnx")
    report, error = convert(tmp_path, precision, *unlike_batches)
    assert report is None
    assert error["kind"] == "gate failed"
    assert "square (Mul): overflows" in error["message"]
    kept = json.loads(error["hint"].split("engine.keep_fp32: ")[1].split(" (or")[0])
    assert "square" in kept
    report, error = convert(tmp_path, precision, *unlike_batches, keep=kept)
    assert error is None
    assert report["kept_fp32"] == kept


@pytest.mark.parametrize("precision", [pytest.param("fp16", marks=NEEDS_MODELOPT)])
def test_auto_keeps_what_must_stay_and_converts_the_rest(tmp_path, unlike_batches, precision):
    overflowing(tmp_path / "model.onnx")
    report, error = convert(tmp_path, precision, *unlike_batches, keep="auto")
    assert error is None
    # The square and its mean leave fp16, and the root would have to read the mean in it: no two of them are enough.
    assert sorted(report["kept_fp32"]) == ["mean", "root", "square"]
    assert report["converted"] == 3
    assert report["max_abs_difference"] <= 0.05


@pytest.mark.parametrize("quantizer", ["onnxruntime", pytest.param("modelopt", marks=NEEDS_MODELOPT)])
def test_too_strict_a_gate_is_told_as_what_it_is(tmp_path, image_batches, quantizer):
    cnn(tmp_path / "model.onnx")
    report, error = convert(tmp_path, "int8", *image_batches, quantizer=quantizer, atol=1e-7)
    assert report is None
    assert "in int8 the graph answers up to" in error["message"]
    assert "the layers that lose the most, each by itself:" in error["message"]
    assert "no list of layers to keep in fp32 is enough" in error["hint"]


def test_a_node_that_the_graph_has_not_is_refused_with_the_nearest(tmp_path, image_batches):
    cnn(tmp_path / "model.onnx")
    report, error = convert(tmp_path, "int8", *image_batches, quantizer="onnxruntime", keep=["hed"])
    assert report is None
    assert error["kind"] == "configuration"
    assert 'keep_fp32 names "hed"' in error["message"]
    assert 'did you mean "head"?' in error["hint"]


def test_a_node_that_is_kept_is_not_converted(tmp_path, image_batches):
    cnn(tmp_path / "model.onnx")
    report, _ = convert(tmp_path, "int8", *image_batches, quantizer="onnxruntime", keep=["head"], atol=0.05)
    assert report["kept_fp32"] == ["head"]
    assert report["converted_by_op"] == {"Conv": 1, "Relu": 1}
