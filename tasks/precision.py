"""Stage `precision`: the exported graph in lower precision, for engines whose networks are strongly typed.

A stage of its own, since calibrating and finding what must stay in fp32 takes long and depends on neither TensorRT's
version nor the GPU: changing one of the builder's options converts nothing again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks import evaluation
from tasks.config import BATCH, Pipeline, as_json
from tasks.engines import Conversion, kind_of
from tasks.errors import GateResult
from tasks.gates import metric_gates, require
from tasks.stage import Built, Identity, KeyedStage, KeyParts, Site, Step, move_to_product, program_step, read_json
from tasks.toolchain import builder_environment, probe

CHECK_ROWS = 128
"""Rows of the validation split that the converted graph answers in comparison with fp32."""


def conversion_of(pipeline: Pipeline) -> Conversion:
    """How the pipeline's graph is converted; only asked where it is."""
    conversion = kind_of(pipeline).conversion(pipeline)
    assert conversion is not None
    return conversion


def _applies(pipeline: Pipeline) -> bool:
    return kind_of(pipeline).conversion(pipeline) is not None


def _in_modelopt(conversion: Conversion) -> bool:
    return not (conversion.precision == "int8" and conversion.quantizer == "onnxruntime")


def _check(pipeline: Pipeline) -> None:
    if _in_modelopt(conversion_of(pipeline)):
        builder_environment.require("modelopt")


def _parts(pipeline: Pipeline, identity: Identity) -> KeyParts:
    conversion = conversion_of(pipeline)
    if _in_modelopt(conversion):
        environment = {"modelopt": builder_environment.requirements_digest("modelopt")}
    else:
        environment = probe.versions(["onnxruntime", "onnx", "numpy"])
    return KeyParts(
        config={
            "precision": conversion.precision,
            "quantizer": conversion.quantizer,
            "keep_fp32": conversion.keep_fp32 if conversion.keep_fp32 == "auto" else list(conversion.keep_fp32),
            "calibration_samples": conversion.calibration_samples,
            "check_rows": CHECK_ROWS,
            "parity": as_json(conversion.parity),
            **evaluation.tensors(pipeline),
        },
        # The rows to calibrate with are the recipe's, and the metric judges what was made of them.
        code={"recipe": identity.code.train, "metric": identity.code.metric},
        data=identity.data,
        environment=environment,
    )


def _steps(site: Site) -> tuple[Step, ...]:
    pipeline, conversion = site.pipeline, conversion_of(site.pipeline)
    timeout_seconds = 60 * pipeline.export.timeout_minutes
    batch = pipeline.shapes.get(BATCH)
    rows = {
        "recipe": evaluation.recipe_spec(pipeline),
        "inputs": as_json(pipeline.inputs),
        "check_rows": CHECK_ROWS,
        "batch_size": batch.opt if batch is not None else next(iter(pipeline.inputs.values())).shape[0],
        "whole_batches": batch is None,
    }
    samples = program_step(
        site,
        "samples",
        what="the drawing of calibration data",
        job=rows | {"calibration_rows": conversion.calibration_samples},
        timeout_seconds=timeout_seconds,
    )
    convert = program_step(
        site,
        "precision",
        what=f"the conversion to {conversion.precision}",
        job={
            "onnx": str(site.materials["export"] / "model.onnx"),
            "precision": conversion.precision,
            "quantizer": conversion.quantizer,
            "keep_fp32": conversion.keep_fp32 if conversion.keep_fp32 == "auto" else list(conversion.keep_fp32),
            "calibration": str(samples.output / "calibration.npz"),
            "check": str(samples.output / "check.npz"),
            "parity": as_json(conversion.parity),
        },
        timeout_seconds=timeout_seconds,
        python=builder_environment.find_environment("modelopt").python if _in_modelopt(conversion) else None,
    )
    answers = site.work / "precision" / "work"
    scores = program_step(
        site,
        "scores",
        what="the metric on the converted graph",
        job=rows | {"answers": {name: str(answers / f"{name}.npz") for name in ("fp32", "converted")}},
        timeout_seconds=timeout_seconds,
    )
    return samples, convert, scores


def _collect(site: Site) -> Built:
    output = site.work / "precision" / "output"
    report = read_json(output / "report.json")
    scores = read_json(site.work / "scores" / "output" / "report.json")
    require(judged(site.pipeline, scores), consequence=f"the graph stays as it was; {_mend(report)}")
    files = {path.name: path for path in sorted(output.iterdir()) if path.name != "report.json"}
    move_to_product(site, files)
    return Built(
        metrics={
            "nodes": report["nodes"],
            "converted": report["converted"],
            "quantize_nodes": report["quantize_nodes"],
            "max_abs_difference": report["max_abs_difference"],
            **{f"{name}_fp32": value for name, value in scores["fp32"].items()},
            **{f"{name}_converted": value for name, value in scores["converted"].items()},
        },
        details=report,
    )


def judged(pipeline: Pipeline, scores: Mapping[str, Mapping[str, float]]) -> list[GateResult]:
    """Judge the metric on the converted graph, where the graph in fp32 passes on the same rows.

    Some rows of the validation split are no test split: what fails there in fp32 too is a matter of the sample.
    """
    before = {name: {"fp32": value} for name, value in scores["fp32"].items()}
    after = {name: {"converted": value} for name, value in scores["converted"].items()}
    passed = [result.passed for result in metric_gates(pipeline.gates, before)]
    return [
        result for result, fp32_passed in zip(metric_gates(pipeline.gates, after), passed, strict=True) if fp32_passed
    ]


def _mend(report: Mapping[str, Any]) -> str:
    worst = list(report["layer_losses"])[:5]
    return f"keep in fp32 what loses the most, such as engine.keep_fp32: {json.dumps(worst)}"


def _preview(pipeline: Pipeline) -> tuple[str, ...]:
    conversion = conversion_of(pipeline)
    by = "ONNX Runtime's static quantisation" if not _in_modelopt(conversion) else "ModelOpt"
    kept = conversion.keep_fp32 if conversion.keep_fp32 == "auto" else ", ".join(conversion.keep_fp32) or "nothing"
    return (
        f"{conversion.precision} by {by}, calibrated on {conversion.calibration_samples} rows; stays in fp32: {kept}",
        f"passes where |answer - fp32| <= {conversion.parity.atol:g} + {conversion.parity.rtol:g} * |fp32|",
    )


STAGE = KeyedStage(
    name="precision",
    version=1,
    reproducible=True,
    materials=("export",),
    parts=_parts,
    steps=_steps,
    collect=_collect,
    applies=_applies,
    check=_check,
    preview=_preview,
)
