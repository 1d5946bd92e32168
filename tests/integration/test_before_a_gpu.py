"""The examples as far as a machine without a GPU goes: trained, exported, converted, and compiled by TensorRT-RTX."""

from __future__ import annotations

import pytest

from tasks.toolchain import builder_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(builder_environment.find_environment(name).is_ready for name in builder_environment.NAMES),
        reason="make them with `enginehouse engine setup modelopt` and `enginehouse engine setup tensorrt-rtx`",
    ),
]

EXAMPLES = ["digits", "mnist", "code_or_prose"]


@pytest.fixture(scope="module")
def trained(workspaces):
    """A workspace per example, made when it is first asked for, so that each trains once."""
    made = {}
    return lambda example: made.setdefault(example, workspaces(example))


def settings(**fields) -> list[str]:
    given = {"kind": "tensorrt", "target": "26.08", "preflight": "tensorrt-rtx"} | fields
    return [part for name, value in given.items() for part in ("--set", f"engine.{name}={value}")]


def run(workspace, example, *arguments, **fields):
    report = workspace.report(
        "run", workspace.pipeline(example), "--until", "preflight", *settings(**fields), timeout=900
    )
    return {stage["stage"]: stage for stage in report["stages"]}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_compiles_as_it_was_exported(trained, example):
    stages = run(trained(example), example)
    assert stages["preflight"]["state"] == "built"
    assert stages["preflight"]["metrics"]["layers"] > 0
    assert "precision" not in stages


@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_compiles_in_lower_precision_and_keeps_its_metric(trained, example, precision):
    stages = run(trained(example), example, precision=precision)
    metrics = stages["precision"]["metrics"]
    assert metrics["converted"] > 0
    assert (metrics["quantize_nodes"] > 0) == (precision == "int8")
    assert metrics["accuracy_converted"] >= metrics["accuracy_fp32"] - 0.05
    assert stages["preflight"]["state"] == "built"
    again = run(trained(example), example, precision=precision)
    assert {stage["state"] for stage in again.values()} == {"reused"}
