"""Graphs that load and answer, but not what PyTorch answered: written by hand, since an exporter rarely makes them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import pytest
import torch
from onnx import parser

from tasks.programs.axes import Axes
from tasks.programs.export_eager import Answer, Tolerance
from tasks.programs.export_graph import save, signature
from tasks.programs.export_runtime import check_running
from tasks.programs.failures import Place

AXES = Axes(inputs={"x": {"dtype": "float32", "shape": ["batch", 4]}}, shapes={"batch": {"min": 1, "opt": 4, "max": 8}})
TOLERANCE = Tolerance(atol=1e-4, rtol=1e-4)


def graph(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]>\ng (float[batch,4] x) => {text}')


@dataclass(frozen=True)
class Bad:
    graph: str
    where: str
    says: str
    hint: str


BAD = {
    "a size baked into a reshape": Bad(
        "(float[batch,4] y) { s = Constant <value = int64[2] {3, 4}> ()  [view] r = Reshape(x, s)  y = Exp(r) }",
        "node view",
        "the graph fails at batch 1, where PyTorch answers",
        "a size taken as a Python number",
    ),
    "a reshape that gives another shape": Bad(
        "(float[batch,c] y) { s = Constant <value = int64[2] {1, -1}> ()  r = Reshape(x, s)  y = Exp(r) }",
        "output y, axis 0 (batch)",
        "the graph gives the shape [1, 12] at batch 3, PyTorch [3, 4]",
        "an if on a size",
    ),
    "an axis that the graph calls a constant and is none": Bad(
        "(float[batch,5] y) { y = Exp(x) }",
        "output y, axis 1 (5)",
        "the graph says 5 for this axis, but it is 4 at batch 1",
        "usual causes",
    ),
    "rows in another order": Bad(
        "(float[batch,4] y) { a = Constant <value = int64[1] {-1}> ()  z = Constant <value = int64[1] {-1000}> ()  "
        "o = Constant <value = int64[1] {0}> ()  r = Slice(x, a, z, o, a)  y = Exp(r) }",
        "output y, axis 0 (batch)",
        "its rows are PyTorch's rows [2, 1, 0]",
        "usual causes",
    ),
    "another value": Bad(
        "(float[batch,4] y) { e = Exp(x)  c = Constant <value = float {1.01}> ()  y = Mul(e, c) }",
        "output y",
        "the graph answers otherwise than PyTorch at batch 1: largest difference",
        "gates.parity is too tight",
    ),
    "fp16 that overflows inside": Bad(
        "(float[batch,4] y) { h = Cast <to = 10> (x)  c = Constant <value = float {60000.0}> ()  "
        "b = Cast <to = 10> (c)  [square] m = Mul(h, b)  p = Add(m, m)  f = Cast <to = 1> (p)  y = Exp(f) }",
        "output y, node square",
        "it begins at node square (float16)",
        "fp16 ends at 65504",
    ),
    "random answers": Bad(
        "(float[batch,4] y) { e = Exp(x)  r = RandomNormalLike <scale = 0.00001> (x)  y = Add(e, r) }",
        "output y",
        "the same request twice gives different answers at batch 1",
        "F.dropout",
    ),
    "another dtype": Bad(
        "(int64[batch,4] y) { e = Exp(x)  y = Cast <to = 7> (e) }",
        "output y",
        "the graph gives int64, PyTorch float32",
        "cast it explicitly",
    ),
}


def answers() -> list[Answer]:
    found = []
    for rows in (1, 3):
        x = torch.arange(rows * 4.0).reshape(rows, 4) / 4 + 1.5
        found.append(Answer(sizes={"batch": rows}, inputs={"x": x}, outputs={"y": x.exp()}))
    return found


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_with_its_node_axis_and_cause(name, tmp_path, failure_of):
    bad = BAD[name]
    proto = graph(bad.graph)
    path = save(proto, tmp_path)
    sources = {"view": Place(tmp_path / "recipe.py", 7, "forward")}
    failure = failure_of(check_running, path, signature(proto, AXES), AXES, answers(), TOLERANCE, sources, threads=1)
    assert failure.kind == "export refused"
    assert bad.says in failure.message, str(failure)
    assert failure.where == bad.where, str(failure)
    assert bad.hint in failure.hint, str(failure)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    if bad.where == "node view":
        assert failure.place == sources["view"]


def test_a_graph_that_answers_alike_gives_the_largest_difference(tmp_path):
    proto = graph("(float[batch,4] y) { y = Exp(x) }")
    largest = check_running(save(proto, tmp_path), signature(proto, AXES), AXES, answers(), TOLERANCE, {}, threads=1)
    assert 0 <= largest < 1e-4


def test_a_graph_that_the_runtime_cannot_load_is_refused(tmp_path, failure_of):
    proto = graph("(float[batch,4] y) { y = Exp(x) }")
    path = save(proto, tmp_path)
    proto.opset_import[0].version = 99
    path.write_bytes(proto.SerializeToString())
    failure = failure_of(check_running, path, signature(proto, AXES), AXES, answers(), TOLERANCE, {}, threads=1)
    assert "ONNX Runtime cannot load the graph" in failure.message
    assert "lower export.opset_version" in failure.hint
