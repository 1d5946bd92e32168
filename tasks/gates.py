"""The gates: measured values against what the pipeline file allows. Pure; whoever measured calls them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tasks.config import Gates, Parity
from tasks.errors import GateFailed, GateResult

Metrics = Mapping[str, Mapping[str, float]]
"""Per metric, per runtime (`pytorch`, `onnx`, `engine`, `staging`, `live`), the value."""


def metric_gates(gates: Gates, metrics: Metrics) -> list[GateResult]:
    """Compare every measured value of the declared metrics with its bounds; one that nothing measured fails as NaN."""
    results = []
    for name, gate in gates.metrics.items():
        for runtime, value in (metrics.get(name) or {"recipe": math.nan}).items():
            for bound, passed, sign in (
                (gate.min, gate.min is None or value >= gate.min, ">="),
                (gate.max, gate.max is None or value <= gate.max, "<="),
            ):
                if bound is not None:
                    results.append(
                        GateResult(
                            gate=f"metrics.{name}",
                            runtime=runtime,
                            measured=value,
                            allowed=f"{sign} {bound:g}",
                            passed=passed,
                        )
                    )
    return results


def parity_gate(gates: Gates, runtime: str, golden: Mapping[str, float], *, parity: Parity | None = None) -> GateResult:
    """Judge a comparison with PyTorch's golden answers: `|got - golden| - rtol * |golden| <= atol` for each element.

    `golden` is the `GoldenDifference` of an evaluation (tasks/programs/jobs.py); `parity` is the engine's own tolerance
    where it has one, and was the evaluation's too.
    """
    parity = parity or gates.parity
    return GateResult(
        gate="parity",
        runtime=runtime,
        measured=golden["beyond_rtol"],
        allowed=f"<= {parity.atol:g} (beyond {parity.rtol:g} of the expected value)",
        passed=golden["beyond_rtol"] <= parity.atol,
    )


def served_gates(
    gates: Gates, runtime: str, expected: Mapping[str, float], served: Mapping[str, float]
) -> list[GateResult]:
    """Judge how far each metric on a server lies from the one on PyTorch, whether it has bounds or not."""
    return [
        GateResult(
            gate=f"served_tolerance of {name}",
            runtime=runtime,
            measured=abs(served.get(name, math.nan) - value),
            allowed=f"<= {gates.served_tolerance:g}",
            passed=abs(served.get(name, math.nan) - value) <= gates.served_tolerance,
        )
        for name, value in expected.items()
    ]


def require(results: Sequence[GateResult], *, consequence: str) -> None:
    """Raise `GateFailed` when a result did not pass; `consequence` says what stays as it was."""
    failed = sum(not result.passed for result in results)
    if failed:
        raise GateFailed(f"{failed} of {len(results)} gates failed; {consequence}", results=results)
