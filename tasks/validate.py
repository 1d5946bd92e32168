"""Stage `validate`: the metric and the golden answers of every runtime, before a server is involved.

What is measured is keyed and kept; what is allowed is not in the key, so that moving a threshold measures nothing
again. The test split is read here and on servers, nowhere else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks import evaluation
from tasks.config import Pipeline
from tasks.engines import kind_of
from tasks.errors import GateResult
from tasks.gates import metric_gates, parity_gate
from tasks.stage import Built, Identity, KeyedStage, KeyParts, Site, Step, move_to_product, program_step, read_json
from tasks.toolchain import probe

RUNTIMES = ("pytorch", "onnx", "engine")


def _parts(pipeline: Pipeline, identity: Identity) -> KeyParts:
    return KeyParts(
        config={
            **evaluation.tensors(pipeline),
            "batch_size": evaluation.BATCH_SIZE,
            "rtol": pipeline.gates.parity.rtol,
        },
        code={"recipe": identity.code.train, "metric": identity.code.metric},
        data=identity.data,
        environment=probe.versions(["torch", "onnxruntime", "numpy"]),
    )


def _steps(site: Site) -> tuple[Step, ...]:
    pipeline = site.pipeline
    job = evaluation.job(pipeline)
    timeout_seconds = evaluation.timeout_seconds(pipeline)
    trained, on_onnx = site.materials["train"], {"onnx": str(site.materials["export"] / evaluation.GRAPH)}
    on_onnx["runtime"] = "onnxruntime"

    def measured_on(name: str, what: str, more: dict[str, Any]) -> Step:
        return program_step(
            site,
            "evaluate",
            name=name,
            what=f"the evaluation on {what}",
            job=job | more,
            timeout_seconds=timeout_seconds,
        )

    if evaluation.trained_graph(trained) is None:
        on_pytorch = {"runtime": "pytorch", "weights": str(trained / evaluation.WEIGHTS), "write_golden": True}
        first = measured_on("pytorch", "PyTorch", on_pytorch)
        compared = {"compare_golden": evaluation.golden_file(first.output)}
        steps = [first, measured_on("onnx", "ONNX Runtime", on_onnx | compared)]
    else:  # there is nothing but the graph to measure others by
        first = measured_on("onnx", "ONNX Runtime", on_onnx | {"write_golden": True})
        compared = {"compare_golden": evaluation.golden_file(first.output)}
        steps = [first]
    return (*steps, *kind_of(pipeline).evaluations(site, job | compared, timeout_seconds=timeout_seconds))


def _collect(site: Site) -> Built:
    reports = {
        runtime: read_json(report)
        for runtime in RUNTIMES
        if (report := site.work / runtime / "output" / "report.json").exists()
    }
    metrics: dict[str, dict[str, float]] = {}
    for runtime, report in reports.items():
        for name, value in report["metrics"].items():
            metrics.setdefault(name, {})[runtime] = value
    measured = {
        "metrics": metrics,
        "parity": {runtime: report["golden"] for runtime, report in reports.items() if report["golden"]},
        "samples": next(iter(reports.values()))["samples"],
    }
    site.product.mkdir(parents=True, exist_ok=True)
    (site.product / "report.json").write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n")
    golden = site.work / next(iter(reports)) / "output"
    move_to_product(site, {name: golden / name for name in (evaluation.GOLDEN, evaluation.REQUEST)})
    return Built(
        metrics={f"{name}_{runtime}": value for name, values in metrics.items() for runtime, value in values.items()},
        details={"samples": measured["samples"]},
    )


STAGE = KeyedStage(
    name="validate",
    version=1,
    reproducible=True,
    materials=("train", "export", "engine"),
    parts=_parts,
    steps=_steps,
    collect=_collect,
)


def measured(product: Path) -> dict[str, Any]:
    """Return this stage's report: `metrics` (per name and runtime), `parity` (per runtime), `samples`."""
    report: dict[str, Any] = read_json(product / "report.json")
    return report


def expected(report: dict[str, Any]) -> dict[str, float]:
    """Return each metric as the reference has it: PyTorch, or ONNX Runtime where training left a graph."""
    return {name: next(iter(values[r] for r in RUNTIMES if r in values)) for name, values in report["metrics"].items()}


def judge(pipeline: Pipeline, report: dict[str, Any]) -> list[GateResult]:
    """Return the result of every gate on this stage's report."""
    return [
        *(parity_gate(pipeline.gates, runtime, golden) for runtime, golden in report["parity"].items()),
        *metric_gates(pipeline.gates, report["metrics"]),
    ]
