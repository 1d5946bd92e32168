"""Stage `precision`: the exported graph in lower precision, for engines whose networks are strongly typed.

A stage of its own, since calibrating and finding what must stay in fp32 takes long and depends on neither TensorRT's
version nor the GPU: changing one of the builder's options converts nothing again.
"""

from __future__ import annotations

from tasks import evaluation
from tasks.config import BATCH, Pipeline, as_json
from tasks.engines import Conversion, kind_of
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
        environment = probe.environment(["onnxruntime", "onnx", "numpy"])
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
        code=identity.code.train,  # the rows to calibrate with are the recipe's
        data=identity.data,
        environment=environment,
    )


def _steps(site: Site) -> tuple[Step, ...]:
    pipeline, conversion = site.pipeline, conversion_of(site.pipeline)
    timeout_seconds = 60 * pipeline.export.timeout_minutes
    batch = pipeline.shapes.get(BATCH)
    first = next(iter(pipeline.inputs.values())).shape[0]
    samples = program_step(
        site,
        "samples",
        what="the drawing of calibration data",
        job={
            "recipe": evaluation.recipe_spec(pipeline),
            "inputs": as_json(pipeline.inputs),
            "rows": conversion.calibration_samples,
            "check_rows": CHECK_ROWS,
            "batch_size": batch.opt if batch is not None else first,
            "whole_batches": batch is None,
        },
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
    return samples, convert


def _collect(site: Site) -> Built:
    output = site.work / "precision" / "output"
    report = read_json(output / "report.json")
    files = {path.name: path for path in sorted(output.iterdir()) if path.name != "report.json"}
    move_to_product(site, files)
    return Built(
        metrics={
            "nodes": report["nodes"],
            "converted": report["converted"],
            "quantize_nodes": report["quantize_nodes"],
            "max_abs_difference": report["max_abs_difference"],
        },
        details=report,
    )


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
