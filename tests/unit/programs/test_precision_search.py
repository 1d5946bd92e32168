"""Which nodes stay in fp32: the search, on conversions that are made up, so that every answer is known."""

from __future__ import annotations

import importlib
import importlib.util
from itertools import combinations
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from onnx import helper as h

BOOTSTRAP = Path(__file__).parents[3] / "tasks" / "programs" / "bootstrap.py"


def program(name):
    """A module of `tasks/programs`, loaded as its child process loads it."""
    spec = importlib.util.spec_from_file_location("bootstrap_of_tests", BOOTSTRAP)
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    bootstrap.load_programs()
    return importlib.import_module(f"{bootstrap.PACKAGE}.{name}")


precision = program("precision_search")

NODES = [f"n{i}" for i in range(40)]
FALLING = {name: 40.0 - i for i, name in enumerate(NODES)}


def converter(culprits, calls):
    """A converter whose result passes exactly if every culprit is kept."""

    def attempt(kept):
        calls.append(tuple(kept))
        passes = set(culprits) <= set(kept)
        return precision.Attempt(
            model=None,
            kept=tuple(kept),
            converted=tuple(n for n in NODES if n not in kept),
            difference=precision.Difference(max_abs=0.0 if passes else 1.0, excess=-1.0 if passes else 1.0),
        )

    return attempt


@settings(deadline=None)
@given(st.sets(st.sampled_from(NODES), min_size=1, max_size=6), st.permutations(NODES))
def test_the_list_that_is_found_passes_and_every_entry_that_was_tried_is_needed(culprits, order):
    attempt = converter(culprits, [])
    losses = {name: float(len(order) - place) for place, name in enumerate(order)}
    found = precision.search(attempt, losses, attempt(()), quick=None)
    assert found is not None
    assert culprits <= set(found.kept)
    if max(order.index(c) for c in culprits) < precision.PRUNED:
        assert set(found.kept) == culprits


def test_bisection_converts_a_logarithm_of_the_nodes_and_what_pruning_adds():
    calls = []
    attempt = converter({"n0", "n1"}, calls)
    found = precision.search(attempt, FALLING, attempt(()), quick=None)
    assert found.kept == ("n0", "n1")
    assert len(calls) < 15


def test_nothing_is_found_where_keeping_everything_is_not_enough():
    attempt = converter({"no node"}, [])
    assert precision.search(attempt, FALLING, attempt(()), quick=None) is None


def test_with_a_quick_answer_only_the_result_is_converted():
    calls = []
    attempt = converter({"n3"}, calls)
    found = precision.search(attempt, FALLING, attempt(()), quick=lambda converted, kept: "n3" in kept)
    assert found.kept == ("n3",)
    assert calls == [(), ("n3",)]


def test_what_passes_quickly_and_fails_when_converted_is_given_more():
    attempt = converter({"n0", "n1", "n2"}, [])
    found = precision.search(attempt, FALLING, attempt(()), quick=lambda converted, kept: "n0" in kept)
    assert found is not None
    assert {"n0", "n1", "n2"} <= set(found.kept)


def test_no_shorter_list_than_the_one_that_is_found_passes():
    """Every subset of the nodes of a real graph that overflows, in the arithmetic that rounds every tensor to fp16."""
    shape = [None, 16]
    nodes = [
        h.make_node("MatMul", ["x", "w"], ["m"], name="before"),
        h.make_node("Mul", ["m", "m"], ["square"], name="square"),
        h.make_node("ReduceMean", ["square"], ["mean"], name="mean", keepdims=1),
        h.make_node("Sqrt", ["mean"], ["root"], name="root"),
        h.make_node("Div", ["m", "root"], ["y"], name="divide"),
    ]
    weights = [numpy_helper.from_array(np.eye(16, dtype=np.float32), "w")]
    ends = [h.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
    model = h.make_model(h.make_graph(nodes, "g", ends[:1], ends[1:], weights), opset_imports=[h.make_opsetid("", 20)])
    graph = program("lowered").Graph(model)
    check = [{"x": (np.random.default_rng(2).random((8, 16)) * 400).astype(np.float32)}]
    expected = [graph.run(batch) for batch in check]
    passes = precision.quick_answer("fp16", {"atol": 0.02, "rtol": 0.02}, graph, check, expected)
    names = [node.name for node in nodes]

    def attempt(kept):
        apart = 0.0 if passes(names, kept) else 1.0
        return precision.Attempt(
            model=None,
            kept=tuple(kept),
            converted=tuple(n for n in names if n not in kept),
            difference=precision.Difference(max_abs=apart, excess=apart - 0.5),
        )

    losses = precision.layer_losses(graph, graph, names, check, "fp16")
    found = precision.search(attempt, losses, attempt(()), quick=None)
    sizes = [len(kept) for n in range(len(names)) for kept in combinations(names, n) if passes(names, kept)]
    assert len(found.kept) == min(sizes) == 2


def test_a_difference_that_is_not_finite_is_infinite_and_outside():
    got, expected = [{"y": np.array([np.nan, 1], np.float32)}], [{"y": np.array([1, 1], np.float32)}]
    apart = precision.difference(got, expected, {"atol": 1e9, "rtol": 1e9})
    assert apart.max_abs == float("inf")
    assert not apart.within


def test_a_difference_is_held_against_both_tolerances():
    got, expected = [{"y": np.array([10.5, 0.01], np.float32)}], [{"y": np.array([10.0, 0.0], np.float32)}]
    assert precision.difference(got, expected, {"atol": 0.02, "rtol": 0.05}).within
    assert not precision.difference(got, expected, {"atol": 0.02, "rtol": 0.01}).within
    assert not precision.difference(got, expected, {"atol": 0.001, "rtol": 0.05}).within
