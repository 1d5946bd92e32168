"""One metric, fed alike, wherever the outputs come from; and golden examples."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file


def report(output):
    return json.loads((output / "report.json").read_text())


def test_pytorch_and_onnxruntime_give_the_same_number(bench):
    made = bench()
    weights = made.train(learning_rate=0.05) / "model.safetensors"
    exported = made.export(weights)
    one = report(made.evaluate("torch", runtime="pytorch", weights=str(weights)))
    two = report(made.evaluate("onnx", runtime="onnxruntime", onnx=str(exported / "model.onnx")))
    assert one["metrics"] == two["metrics"]
    assert 0.5 < one["metrics"]["accuracy"] <= 1
    assert (one["samples"], one["batches"], one["split"]) == (21, 6, "test")


def test_the_metric_sees_every_row_once_in_the_datas_order(bench):
    metric = """
    class Accuracy:
        def __init__(self):
            self.seen = []
        def update(self, outputs, targets):
            assert type(outputs["y"]) is np.ndarray and type(targets) is np.ndarray
            self.seen += targets.tolist()
        def result(self):
            return {"ordered": self.seen == [int(t) for _, t in rows(21, 3)], "rows": len(self.seen)}
    """
    made = bench(metric=metric)
    found = report(made.evaluate(runtime="pytorch", weights=str(made.weights())))
    assert found["metrics"] == {"ordered": 1.0, "rows": 21.0}


def test_requests_stay_within_the_declared_range(bench):
    user_data = """
    sizes = []
    def rows(count, seed):
        made = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
        return [({"x": row}, np.int64(row[0] > 0)) for row in made]
    """
    model = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)
        def forward(self, x):
            sizes.append(len(x))
            return self.linear(x)
    """
    made = bench(data=user_data, model=model, shapes={"batch": {"min": 2, "opt": 2, "max": 3}})
    job = made.job("evaluate", batch_size=100, runtime="pytorch", weights=str(made.weights()))
    import sys

    from tasks.programs import evaluate

    evaluate.main({**job, "split": "validation"})
    assert report_rows(job) == (23, 8)
    sizes = sys.modules[made.file.stem].sizes
    assert set(sizes) == {3, 2}
    made = bench(data=user_data, model=model, inputs={"x": {"dtype": "float32", "shape": [5, 4]}}, shapes={})
    job = made.job("evaluate", batch_size=100, runtime="pytorch", weights=str(made.weights()))
    evaluate.main(job)
    assert set(sys.modules[made.file.stem].sizes) == {5}  # 21 rows: the last request is filled up
    assert report_rows(job) == (21, 5)


def report_rows(job):
    from pathlib import Path

    found = report(Path(job["output"]))
    return found["samples"], found["batches"]


def test_golden_examples_are_the_same_bytes_and_are_compared(bench):
    made = bench()
    weights = made.weights()
    golden = [
        made.evaluate(name, runtime="pytorch", weights=str(weights), write_golden=True, metric=False)
        / "golden.safetensors"
        for name in ("one", "two")
    ]
    assert golden[0].read_bytes() == golden[1].read_bytes()
    tensors = load_file(golden[0])
    assert {name: value.shape for name, value in tensors.items()} == {"inputs.x": (8, 4), "outputs.y": (8, 3)}
    exported = made.export(weights)
    ask = {"runtime": "onnxruntime", "onnx": str(exported / "model.onnx"), "metric": False}
    found = report(made.evaluate("same", **ask, compare_golden=str(golden[0])))
    assert found["golden"]["max_abs_difference"] < 1e-5
    assert found["golden"]["rows"] == 8
    assert (found["metrics"], found["samples"]) == ({}, 0)
    tensors["outputs.y"] = tensors["outputs.y"] + np.float32(0.5)
    save_file(tensors, made.folder / "moved.safetensors")
    found = report(made.evaluate("moved", **ask, compare_golden=str(made.folder / "moved.safetensors")))
    assert found["golden"]["max_abs_difference"] == pytest.approx(0.5, abs=1e-4)
    assert found["golden"]["beyond_rtol"] == pytest.approx(0.5, abs=1e-3)
    assert found["golden"]["beyond_rtol"] < 0.5


def test_a_metric_that_is_not_finite_is_no_number_for_a_gate(bench, failure_of):
    made = bench()
    made.file.write_text(made.file.read_text().replace("self.right / self.seen", 'float("nan")'))
    failure = failure_of(made.evaluate, runtime="pytorch", weights=str(made.weights()))
    assert failure.kind == "configuration"
    assert "gave accuracy = nan; expected a finite number" in failure.message


def test_data_beyond_the_declared_range_is_refused(bench, failure_of):
    data = """
    def rows(count, seed):
        return [({"x": np.ones((9, 4), np.float32)}, 0) for _ in range(count)]
    """
    made = bench(
        data=data,
        inputs={"x": {"dtype": "float32", "shape": ["batch", "sequence", 4]}},
        shapes={"batch": {"min": 1, "opt": 2, "max": 4}, "sequence": {"min": 1, "opt": 4, "max": 8}},
    )
    failure = failure_of(made.evaluate, runtime="pytorch", weights=str(made.weights()))
    assert 'test_data() gives input "x" with 9 along sequence; shapes.sequence allows 1 to 8' in failure.message


def test_a_server_that_is_not_there_is_named(bench, failure_of):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = bench()
    failure = failure_of(
        made.evaluate, runtime="triton", triton={"url": f"127.0.0.1:{port}", "model": "digits", "version": 3}
    )
    assert failure.kind == "not ready"
    assert failure.where == f"digits/3 at 127.0.0.1:{port}"
    assert "a request of x float32[4, 4]" in failure.message
