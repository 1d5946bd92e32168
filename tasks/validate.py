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
from tasks.stage import Built, Identity, KeyedStage, KeyParts, Site, Step, program_step, read_json
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
    on_pytorch = program_step(
        site,
        "evaluate",
        name="pytorch",
        what="the evaluation on PyTorch",
        job=job
        | {
            "runtime": "pytorch",
            "weights": str(site.materials["train"] / "model.safetensors"),
            "write_golden": True,
        },
        timeout_seconds=timeout_seconds,
    )
    compared = job | {"compare_golden": evaluation.golden_file(on_pytorch.output)}
    on_onnx = program_step(
        site,
        "evaluate",
        name="onnx",
        what="the evaluation on ONNX Runtime",
        job=compared | {"runtime": "onnxruntime", "onnx": str(site.materials["export"] / "model.onnx")},
        timeout_seconds=timeout_seconds,
    )
    return (on_pytorch, on_onnx, *kind_of(pipeline).evaluations(site, compared, timeout_seconds=timeout_seconds))


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
        "samples": reports["pytorch"]["samples"],
    }
    site.product.mkdir(parents=True, exist_ok=True)
    (site.product / "report.json").write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n")
    for name in (evaluation.GOLDEN, evaluation.REQUEST):
        (site.work / "pytorch" / "output" / name).rename(site.product / name)
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


def judge(pipeline: Pipeline, report: dict[str, Any]) -> list[GateResult]:
    """Return the result of every gate on this stage's report."""
    return [
        *(parity_gate(pipeline.gates, runtime, golden) for runtime, golden in report["parity"].items()),
        *metric_gates(pipeline.gates, report["metrics"]),
    ]
