"""The gates: measured values against what the pipeline file allows. Pure; whoever measured calls them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence

from tasks.config import Gates, LoadGate, MetricGate, Parity
from tasks.errors import GateFailed, GateResult

Metrics = Mapping[str, Mapping[str, float]]
"""Per metric, per runtime (`pytorch`, `onnx`, `engine`, `staging`, `live`), the value."""


def metric_gates(gates: Gates, metrics: Metrics) -> list[GateResult]:
    """Compare every measured value of the declared metrics with its bounds; one that nothing measured fails as NaN."""
    results = []
    for name, gate in gates.metrics.items():
        if not metrics.get(name):
            results.append(_not_measured(name, metrics))
        for runtime, value in metrics.get(name, {}).items():
            results += _within(f"metrics.{name}", runtime, value, at_least=gate.min, at_most=gate.max)
    return results


def _not_measured(name: str, metrics: Metrics) -> GateResult:
    """A gate on a metric that nothing measured. Only running the metric tells what it returns, so that a misspelt name
    is found no earlier."""
    near = difflib.get_close_matches(name, metrics, n=1, cutoff=0.6)
    mean = f"; did you mean {near[0]}?" if near else ""
    return GateResult(
        gate=f"metrics.{name}",
        runtime="recipe",
        measured=math.nan,
        allowed=f"a metric that the recipe returns, which are {', '.join(metrics) or 'none'}{mean}",
        passed=False,
    )


def parity_gate(gates: Gates, runtime: str, golden: Mapping[str, float], *, parity: Parity | None = None) -> GateResult:
    """Judge a comparison with PyTorch's golden answers: `|got - golden| - rtol * |golden| <= atol` for each element.

    `golden` is the `GoldenDifference` of an evaluation (tasks/programs/jobs.py); `parity` is the engine's own tolerance
    where it has one, and was the evaluation's too.
    """
    parity = parity or gates.parity
    unit = f" (beyond {parity.rtol:g} of the expected value)"
    (result,) = _within("parity", runtime, golden["beyond_rtol"], at_most=parity.atol, unit=unit)
    return result


SERVED_TOLERANCE: Mapping[str, float] = {
    "fp32": 0.001,
    "tf32": 0.002,
    "fp16": 0.005,
    "bf16": 0.01,
    "int8": 0.02,
    "fp8": 0.02,
}
"""By the engine's precision, how far a metric between 0 and 1 may move where `gates.served_tolerance` says nothing:
some rows of a test split fall on the other side of a threshold when answers are rounded."""


def served_gates(
    gates: Gates,
    runtime: str,
    expected: Mapping[str, float],
    served: Mapping[str, float],
    *,
    precision: str = "fp32",
) -> list[GateResult]:
    """Judge how far each metric on a server lies from the one on PyTorch, whether it has bounds or not."""
    declared = gates.served_tolerance
    tolerance = SERVED_TOLERANCE[precision] if declared is None else declared
    said = f"the default in {precision}" if declared is None else "as declared"
    unit = f" (gates.served_tolerance, {said})"
    return [
        result
        for name, value in expected.items()
        for result in _within(
            f"served_tolerance of {name}",
            runtime,
            abs(served.get(name, math.nan) - value),
            at_most=tolerance,
            unit=unit,
        )
    ]


def repeat_gate(gates: Gates, runtime: str, golden: Mapping[str, float]) -> GateResult:
    """Judge how far two answers to the same request lie apart."""
    (result,) = _within("determinism", runtime, golden["repeated"], at_most=gates.repeat_tolerance)
    return result


def slice_gates(gates: Gates, runtime: str, slices: Metrics) -> list[GateResult]:
    """Judge the metrics of every slice; `slices` holds per slice, per metric, the value."""
    results = []
    for name, gate in gates.slices.items():
        values = {where: found[name] for where, found in slices.items() if name in found} or {"none": math.nan}
        for where, value in values.items():
            results += _within(f"slices.{name} of {where}", runtime, value, at_least=gate.min, at_most=gate.max)
    return results


def compares(gates: Gates) -> bool:
    """Whether any gate needs the champion measured beside the candidate."""
    declared = [*gates.metrics.values(), *gates.slices.values()]
    return any(gate.min_improvement is not None or gate.max_loss is not None for gate in declared)


def champion_gates(
    declared: Mapping[str, MetricGate], what: str, candidate: Mapping[str, float], champion: Mapping[str, float]
) -> list[GateResult]:
    """Judge the candidate against the champion, measured on the same server with the same data in the same run.

    `what` begins the gates' names: `metrics.`, or `slices.` with the slice.
    """
    results = []
    for name, gate in declared.items():
        ours, theirs = candidate.get(name, math.nan), champion.get(name, math.nan)
        better = ours - theirs if gate.goal == "maximize" else theirs - ours
        for bound in (gate.min_improvement, None if gate.max_loss is None else -gate.max_loss):
            against = f"{what}{name} against the champion's {theirs:.6g}"
            results += _within(against, "staging", better, at_least=bound, unit=" better")
    return results


def load_gates(
    gate: LoadGate, candidate: Mapping[str, float], champion: Mapping[str, float], *, by: str
) -> list[GateResult]:
    """Judge how the candidate bears load; both hold `p50`, `p95`, `p99` (ms) and `throughput` (requests/s) of one run.

    `by` is what made the load.
    """
    ours, theirs = candidate, champion

    def latencies(of: Mapping[str, float]) -> str:
        return "/".join(f"{of[name]:.3g}" for name in ("p50", "p95", "p99"))

    return [
        *_within(
            f"load ({by}): p99 of p50/p95/p99 {latencies(ours)} ms to the champion's {latencies(theirs)} ms",
            "staging",
            ours["p99"] / theirs["p99"],
            at_most=gate.max_p99_ratio,
        ),
        *_within(
            f"load ({by}): {ours['throughput']:.4g}/s to the champion's {theirs['throughput']:.4g}/s",
            "staging",
            ours["throughput"] / theirs["throughput"],
            at_least=gate.min_throughput_ratio,
        ),
    ]


def require(results: Sequence[GateResult], *, consequence: str, override: str | None = None) -> None:
    """Raise `GateFailed` when a result did not pass; `consequence` says what stays as it was.

    With `override`, a person's reason to release all the same, nothing is raised: the results are recorded with it.
    """
    failed = sum(not result.passed for result in results)
    if failed and override is None:
        raise GateFailed(f"{failed} of {len(results)} gates failed; {consequence}", results=results)


def _within(
    gate: str,
    runtime: str,
    measured: float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    unit: str = "",
) -> list[GateResult]:
    """A result for each bound that is given. NaN, which is what was not measured, is within none."""
    results = []
    if at_least is not None:
        allowed = f">= {at_least:g}{unit}"
        results.append(
            GateResult(gate=gate, runtime=runtime, measured=measured, allowed=allowed, passed=measured >= at_least)
        )
    if at_most is not None:
        allowed = f"<= {at_most:g}{unit}"
        results.append(
            GateResult(gate=gate, runtime=runtime, measured=measured, allowed=allowed, passed=measured <= at_most)
        )
    return results
