"""A graph in lower precision for TensorRT's strongly typed networks; job and products are `jobs.PrecisionJob`.

fp16 and bf16 by ModelOpt's AutoCast, int8 and fp8 as QuantizeLinear and DequantizeLinear nodes by ModelOpt or, lighter,
ONNX Runtime. What was really converted is counted: a tool that ends well and converted nothing is a failure here. The
answers are compared with those of the graph in fp32, on the arithmetic of `lowered`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnxruntime

from .failures import ProgramFailed, nearest
from .jobs import PrecisionJob
from .lowered import Graph
from .notes import Notes, Progress, write_json
from .precision_convert import LARGE, Converter, converted_nodes, named
from .precision_search import Attempt, compare, layer_losses, quick_answer, search
from .rows import read_batches, write_batches

SHOWN = 5
"""How many layers a refusal names."""


def main(job: PrecisionJob) -> None:
    notes = Notes()
    output, work = Path(job["output"]), Path(job["work"])
    progress = Progress(4)
    progress(0, "fp32 answers")
    original = named(onnx.load(job["onnx"]))
    calibration, check = read_batches(Path(job["calibration"])), read_batches(Path(job["check"]))
    reference = Graph(original)
    with notes.timed("fp32"):
        expected = [reference.run(batch) for batch in check]

    converter = Converter(job=job, original=original, calibration=calibration, work=work)

    def attempt(kept: Sequence[str]) -> Attempt:
        model = converter.convert(kept)
        return Attempt(
            model=model,
            kept=tuple(kept),
            converted=tuple(converted_nodes(model)),
            difference=compare(Graph(model), check, expected, job["parity"]),
        )

    progress(1, f"conversion to {job['precision']}")
    given = job["keep_fp32"]
    with notes.timed("convert"):
        unknown = (
            [name for name in given if name not in {n.name for n in original.graph.node}] if given != "auto" else []
        )
        if unknown:
            raise _no_such_node(unknown[0], original)
        first = attempt(() if given == "auto" else tuple(given))
    if not first.converted:
        raise ProgramFailed(
            "gate failed",
            f"nothing was converted to {job['precision']}: all {len(original.graph.node)} nodes stay as they were, and "
            f"{job['quantizer'] if job['precision'] == 'int8' else 'ModelOpt'} reported no failure",
            hint="choose another engine.precision: this graph has no operator that is converted to it",
        )
    progress(2, "layers")
    with notes.timed("layers"):
        losses = layer_losses(reference, Graph(first.model), first.converted, check[:1], job["precision"])
    chosen = first
    if not first.difference.within:
        with notes.timed("search"):
            found = search(
                attempt, losses, first, quick=quick_answer(job["precision"], job["parity"], reference, check, expected)
            )
        if given != "auto" or found is None:
            raise _refused(job, first, losses, found)
        chosen = found
    progress(3, "file")
    # Not the graph's bytes: another environment, which has the recipe, measures its metric on these.
    write_batches(work / "fp32.npz", expected)
    with notes.timed("answers"):
        write_batches(work / "converted.npz", map(Graph(chosen.model).run, check))
    _write(output, Path(job["onnx"]), chosen, losses, job, original)
    notes.environment["onnxruntime"] = onnxruntime.__version__
    notes.write(work)
    progress(4, "done")


def _refused(job: PrecisionJob, first: Attempt, losses: Mapping[str, float], found: Attempt | None) -> ProgramFailed:
    ops = {node.name: node.op_type for node in first.model.graph.node}
    worst = [f"  {name} ({ops.get(name, '?')}): {_percent(loss)}" for name, loss in list(losses.items())[:SHOWN]]
    parity = job["parity"]
    apart = f"{first.difference.max_abs:.3g}" if math.isfinite(first.difference.max_abs) else "infinitely (an overflow)"
    message = "\n".join(
        [
            f"in {job['precision']} the graph answers up to {apart} away from fp32; allowed is "
            f"{parity['atol']:g} + {parity.get('rtol', 0.0):g} * |fp32|",
            "the layers that lose the most, each by itself:",
            *worst,
        ]
    )
    if found is None:
        hint = "no list of layers to keep in fp32 is enough: choose a higher engine.precision, or a wider engine.parity"
    else:
        names = json.dumps(list(found.kept))
        hint = f"it passes with engine.keep_fp32: {names} (or `auto`, which finds that list in every run)"
    return ProgramFailed("gate failed", message, hint=hint)


def _percent(loss: float) -> str:
    return "overflows" if math.isinf(loss) else f"{100 * loss:.2g} % of its largest value"


def _no_such_node(name: str, model: onnx.ModelProto) -> ProgramFailed:
    names = [node.name for node in model.graph.node]
    return ProgramFailed(
        "configuration",
        f'engine.keep_fp32 names "{name}", and the graph has no such node',
        hint=nearest(name, names) or f"the graph has {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}",
    )


def _write(
    output: Path,
    source: Path,
    chosen: Attempt,
    losses: Mapping[str, float],
    job: PrecisionJob,
    original: onnx.ModelProto,
) -> None:
    model = chosen.model
    # The tools write their own names and times; the product must depend on the job alone.
    model.ClearField("doc_string")
    model.producer_name, model.producer_version = original.producer_name, original.producer_version
    target = output / "model.onnx"
    onnx.save(
        model,
        target,
        save_as_external_data=model.ByteSize() > LARGE,
        location="model.onnx.data",
    )
    onnx.checker.check_model(str(target))
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    signature = json.loads((source.parent / "signature.json").read_bytes())
    write_json(output / "signature.json", {**signature, "opset": opset, "ir_version": model.ir_version})
    ops = {node.name: node.op_type for node in model.graph.node}
    counts = Counter(node.op_type for node in model.graph.node)
    write_json(
        output / "report.json",
        {
            "precision": job["precision"],
            "nodes": len(original.graph.node),
            "converted": len(chosen.converted),
            "converted_by_op": dict(sorted(Counter(ops[name] for name in chosen.converted).items())),
            "casts": counts["Cast"],
            "quantize_nodes": counts["QuantizeLinear"],
            "dequantize_nodes": counts["DequantizeLinear"],
            "kept_fp32": list(chosen.kept),
            "max_abs_difference": chosen.difference.max_abs,
            "layer_losses": {name: min(loss, 1e30) for name, loss in list(losses.items())[:20]},
        },
    )
