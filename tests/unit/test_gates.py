"""Gates: what passes, what does not, and what a person reads of it."""

import math

import pytest

from tasks.config import Gates
from tasks.errors import GateFailed
from tasks.gates import metric_gates, parity_gate, require, served_gates

GATES = Gates.model_validate(
    {"parity": {"atol": 1e-4, "rtol": 1e-3}, "metrics": {"accuracy": {"min": 0.9}, "loss": {"max": 0.5}}}
)


def test_every_runtime_that_was_measured_is_judged():
    results = metric_gates(
        GATES, {"accuracy": {"pytorch": 0.95, "live": 0.85}, "loss": {"pytorch": 0.5}, "other": {"onnx": 0}}
    )
    assert [(r.gate, r.runtime, r.passed) for r in results] == [
        ("metrics.accuracy", "pytorch", True),
        ("metrics.accuracy", "live", False),
        ("metrics.loss", "pytorch", True),
    ]


def test_a_declared_metric_that_the_recipe_does_not_give_fails():
    results = metric_gates(GATES, {"accuracy": {"pytorch": 0.95}})
    (missing,) = [r for r in results if r.gate == "metrics.loss"]
    assert not missing.passed
    assert math.isnan(missing.measured)


def test_a_misspelt_metric_is_told_with_what_the_recipe_returns():
    gates = Gates.model_validate({"metrics": {"acuracy": {"min": 0.9}}})
    (missing,) = metric_gates(gates, {"accuracy": {"pytorch": 0.95}, "loss": {"pytorch": 0.1}})
    assert str(missing).endswith("which are accuracy, loss; did you mean accuracy?")


@pytest.mark.parametrize("value", [math.nan, 0.8999999])
def test_what_is_not_a_number_does_not_pass(value):
    (result,) = metric_gates(
        Gates.model_validate({"metrics": {"accuracy": {"min": 0.9}}}), {"accuracy": {"live": value}}
    )
    assert not result.passed


@pytest.mark.parametrize(("beyond", "passed"), [(0.0, True), (1e-4, True), (1.1e-4, False)])
def test_parity_is_what_lies_beyond_the_relative_part(beyond, passed):
    assert parity_gate(GATES, "onnx", {"beyond_rtol": beyond, "max_abs_difference": 1.0}).passed is passed


@pytest.mark.parametrize(
    ("served", "passed"), [({"accuracy": 0.9509}, True), ({"accuracy": 0.9521}, False), ({}, False)]
)
def test_a_server_must_measure_what_pytorch_measured(served, passed):
    (result,) = served_gates(GATES, "live", {"accuracy": 0.95}, served)
    assert result.passed is passed


@pytest.mark.parametrize(("precision", "passed"), [("fp32", False), ("fp16", True)])
def test_how_far_a_served_metric_may_move_follows_the_precision_unless_it_is_said(precision, passed):
    (result,) = served_gates(Gates(), "live", {"accuracy": 0.95}, {"accuracy": 0.947}, precision=precision)
    assert result.passed is passed
    assert f"gates.served_tolerance, the default in {precision}" in result.allowed
    said = Gates.model_validate({"served_tolerance": 0.001})
    (result,) = served_gates(said, "live", {"accuracy": 0.95}, {"accuracy": 0.947}, precision=precision)
    assert not result.passed


def test_the_error_lists_what_failed_and_what_stays():
    results = metric_gates(GATES, {"accuracy": {"pytorch": 0.5}, "loss": {"pytorch": 0.1}})
    with pytest.raises(GateFailed) as failed:
        require(results, consequence="the champion stays")
    assert str(failed.value) == (
        "1 of 2 gates failed; the champion stays\n  metrics.accuracy on pytorch: measured 0.5, allowed >= 0.9"
    )
    require([r for r in results if r.passed], consequence="")
