"""Stage `export`: trained weights become a checked ONNX graph whose declared axes are truly dynamic."""

from __future__ import annotations

from tasks import evaluation
from tasks.config import Pipeline, as_json, keyed
from tasks.engines import kind_of
from tasks.stage import Built, Identity, KeyedStage, KeyParts, Site, Step, move_to_product, program_step, read_json
from tasks.toolchain import probe


def _parts(pipeline: Pipeline, identity: Identity) -> KeyParts:
    return KeyParts(
        config={
            "export": keyed(pipeline.export),
            # A list, since the graph has its inputs in the declared order, which a key's mapping would not tell.
            "inputs": [[name, keyed(spec)] for name, spec in pipeline.inputs.items()],
            "shapes": as_json(pipeline.shapes),
            # A looser tolerance must not reuse what a stricter one refused, nor the other way round.
            "parity": keyed(pipeline.gates.parity),
        },
        code=identity.code.train,
        data=identity.data,  # the checks ask the graph real examples
        environment=probe.versions(["torch", "onnx", "onnxscript", "onnxruntime", "numpy"]),
    )


def _steps(site: Site) -> tuple[Step, ...]:
    pipeline, trained = site.pipeline, site.materials["train"]
    graph = evaluation.trained_graph(trained)
    source = {"weights": str(trained / evaluation.WEIGHTS)} if graph is None else {"onnx": str(graph)}
    job = {
        "recipe": evaluation.recipe_spec(pipeline),
        **source,
        **evaluation.tensors(pipeline),
        "opset_version": pipeline.export.opset_version,
        "parity": as_json(pipeline.gates.parity),
    }
    return (
        program_step(site, "export", what="the export", job=job, timeout_seconds=60 * pipeline.export.timeout_minutes),
    )


def _collect(site: Site) -> Built:
    output = site.work / "export" / "output"
    move_to_product(site, {path.name: path for path in sorted(output.iterdir())})
    signature = read_json(site.product / "signature.json")
    # What serves it may read less than what wrote it; a later change of the target is checked before a run.
    kind_of(site.pipeline).check_graph(site.pipeline, opset=signature["opset"], ir_version=signature["ir_version"])
    return Built(
        details={
            "opset": signature["opset"],
            "ir_version": signature["ir_version"],
            "notes": read_json(site.work / "export" / "work" / "notes.json"),
        }
    )


STAGE = KeyedStage(
    name="export",
    version=1,
    reproducible=True,
    materials=("train",),
    parts=_parts,
    steps=_steps,
    collect=_collect,
)
