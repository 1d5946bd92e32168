"""A graph in lower precision for TensorRT's strongly typed networks; job and products are `jobs.PrecisionJob`.

fp16 and bf16 by ModelOpt's AutoCast, int8 and fp8 as QuantizeLinear and DequantizeLinear nodes by ModelOpt or, lighter,
ONNX Runtime. What was really converted is counted: a tool that ends well and converted nothing is a failure here. The
answers are compared with those of the graph in fp32, on the arithmetic of `lowered`.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from .failures import ProgramFailed, nearest
from .jobs import Parity, PrecisionJob
from .lowered import LOW, Arrays, Graph
from .notes import Notes, Progress, write_json
from .rows import read_batches

SHOWN = 5
"""How many layers a refusal names."""
PRUNED = 24
"""How many entries of a list are tried one by one whether it passes without them."""
LARGE = 1_500_000_000
"""Bytes from which weights go into a file of their own, as the export does it."""

Batches = Sequence[Arrays]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far the answers lie from those in fp32."""

    max_abs: float
    excess: float
    """max(|got - fp32| - atol - rtol * |fp32|); at most 0 passes."""

    @property
    def within(self) -> bool:
        return self.excess <= 0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One conversion."""

    model: onnx.ModelProto
    kept: tuple[str, ...]
    converted: tuple[str, ...]
    """Names of the nodes that work in lower precision."""
    difference: Difference


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
            f"nothing was converted to {job['precision']}: all {len(original.graph.node)} nodes stay as they were, though "
            f"{job['quantizer'] if job['precision'] == 'int8' else 'ModelOpt'} reported no failure",
            hint="choose another engine.precision: this graph has no operator that is converted to it",
        )
    progress(2, "layers")
    with notes.timed("layers"):
        losses = layer_losses(reference, Graph(first.model), first.converted, check[:1], job["precision"])
    chosen = first
    if not first.difference.within:
        with notes.timed("search"):
            found = search(attempt, losses, first, quick=_quick(job, reference, check, expected))
        if given != "auto" or found is None:
            raise _refused(job, first, losses, found)
        chosen = found
    progress(3, "file")
    _write(output, Path(job["onnx"]), chosen, losses, job, original)
    notes.environment["onnxruntime"] = onnxruntime.__version__
    notes.write(work)
    progress(4, "done")


def named(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph, each node with a name of its own, by which it can be kept in fp32."""
    seen: set[str] = set()
    for index, node in enumerate(model.graph.node):
        if not node.name or node.name in seen:
            node.name = f"{node.op_type}_{index}"
        seen.add(node.name)
    return model


@dataclass(frozen=True, kw_only=True)
class Converter:
    """The tool that converts, with what it needs."""

    job: PrecisionJob
    original: onnx.ModelProto
    calibration: Batches
    work: Path

    def convert(self, kept: Sequence[str]) -> onnx.ModelProto:
        """The graph in the job's precision, but for the nodes `kept`."""
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            source = Path(folder) / "fp32.onnx"
            onnx.save(self.original, source, save_as_external_data=self.original.ByteSize() > LARGE)
            match self.job["precision"], self.job["quantizer"]:
                case ("fp16" | "bf16") as low, _:
                    return named(self._autocast(source, low, kept))
                case "int8", "onnxruntime":
                    return named(self._onnxruntime(source, Path(folder) / "int8.onnx", kept))
                case mode, _:
                    return named(self._modelopt(source, mode, Path(folder) / "qdq.onnx", kept))

    def _autocast(self, source: Path, low: str, kept: Sequence[str]) -> onnx.ModelProto:
        from modelopt.onnx.autocast import convert_to_mixed_precision

        batches = source.parent / "batches"
        batches.mkdir()
        for index, batch in enumerate(self.calibration):
            np.savez(batches / f"{index:05}.npz", **batch)  # type: ignore[arg-type] # numpy's stub takes any name for a flag
        converted: onnx.ModelProto = convert_to_mixed_precision(
            onnx_path=str(source),
            low_precision_type=low,
            keep_io_types=True,
            calibration_data=str(batches),
            nodes_to_exclude=[f"^{re.escape(name)}$" for name in kept],
            # Overflow is what the comparison finds, on data; AutoCast's own caution (512) would keep half a
            # transformer in fp32 unasked. Its limit stays where fp16 itself ends.
            data_max=65504.0 if low == "fp16" else math.inf,
        )
        return converted

    def _modelopt(self, source: Path, mode: str, target: Path, kept: Sequence[str]) -> onnx.ModelProto:
        from modelopt.onnx.quantization import quantize

        quantize(
            onnx_path=str(source),
            quantize_mode=mode,
            calibration_data_reader=_Reader(self.calibration),
            calibration_eps=["cpu"],
            high_precision_dtype="fp32",
            nodes_to_exclude=[f"^{re.escape(name)}$" for name in kept],
            output_path=str(target),
            log_level="WARNING",
        )
        return onnx.load(target)

    def _onnxruntime(self, source: Path, target: Path, kept: Sequence[str]) -> onnx.ModelProto:
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

        quantize_static(
            str(source),
            str(target),
            _Reader(self.calibration),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "MatMul", "Gemm"],
            nodes_to_exclude=list(kept),
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            # TensorRT takes symmetric int8 only, and adds the bias in higher precision itself.
            extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False},
        )
        return onnx.load(target)


class _Reader:
    """Calibration data as onnxruntime's calibrator asks for it."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.rewind()

    def get_next(self) -> Mapping[str, Any] | None:
        return next(self._iterator, None)

    def rewind(self) -> None:
        self._iterator = iter(self._batches)

    def get_first(self) -> Mapping[str, Any]:
        return self._batches[0]


def converted_nodes(model: onnx.ModelProto) -> list[str]:
    """The nodes that work in lower precision: those that write fp16 or bf16, or whose inputs are dequantised."""
    graph = Graph(model)
    dequantised = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    helpers = ("Cast", "QuantizeLinear", "DequantizeLinear", "Constant")
    found = []
    for node in model.graph.node:
        if node.op_type in helpers:
            continue
        low = any(graph.types.get(name) in LOW.values() for name in node.output)
        if low or any(name in dequantised for name in node.input):
            found.append(node.name)
    return found


def compare(graph: Graph, check: Batches, expected: Batches, parity: Parity) -> Difference:
    """Hold a graph's answers against those in fp32."""
    return difference([graph.run(batch) for batch in check], expected, parity)


def difference(got: Batches, expected: Batches, parity: Parity) -> Difference:
    """The largest differences over all batches and outputs; infinite where a value is not finite."""
    largest, excess = 0.0, -math.inf
    for ours, theirs in zip(got, expected, strict=True):
        for name, wanted in theirs.items():
            values = ours[name].astype(np.float64)
            if not np.isfinite(values).all():
                return Difference(max_abs=math.inf, excess=math.inf)
            apart = np.abs(values - wanted)
            allowed = parity["atol"] + parity.get("rtol", 0.0) * np.abs(wanted.astype(np.float64))
            largest = max(largest, float(apart.max(initial=0.0)))
            excess = max(excess, float((apart - allowed).max(initial=-math.inf)))
    return Difference(max_abs=largest, excess=excess)


def layer_losses(
    reference: Graph, converted: Graph, nodes: Sequence[str], batches: Batches, precision: str
) -> dict[str, float]:
    """Per converted node, what it alone loses on exact inputs: the largest error over the largest magnitude of its
    answer; infinite where it overflows. Largest first."""
    places = {node.name: index for index, node in enumerate(reference.nodes)}
    low = LOW.get(precision)
    losses: dict[str, float] = {}
    sources = {node.output[0]: index for index, node in enumerate(converted.nodes)}
    for batch in batches:
        values: Arrays = {**reference.constants, **batch}
        for node in reference.steps(values):
            if node.name not in nodes:
                continue
            index = places[node.name]
            if low is not None:
                answers = reference.outputs_of(index, values, low)
            else:
                answers = _quantised_answers(reference, converted, node, index, values, sources)
            losses[node.name] = max(losses.get(node.name, 0.0), _loss(answers, {n: values[n] for n in answers}))
    return dict(sorted(losses.items(), key=lambda item: -item[1]))


def _quantised_answers(
    reference: Graph,
    converted: Graph,
    node: onnx.NodeProto,
    index: int,
    values: Arrays,
    sources: Mapping[str, int],
) -> Arrays:
    """What a node answers when its inputs went through their quantisation, each from its exact value."""
    twin = next(n for n in converted.nodes if n.name == node.name)
    given = dict(values)
    for ours, theirs in zip(node.input, twin.input, strict=False):
        if theirs not in sources or converted.nodes[sources[theirs]].op_type != "DequantizeLinear":
            continue
        dequantise = converted.nodes[sources[theirs]]
        scope: Arrays = {**converted.constants, **values}
        quantised = dequantise.input[0]
        if quantised in sources:
            quantise = converted.nodes[sources[quantised]]
            scope[quantise.input[0]] = values.get(ours, scope.get(quantise.input[0], np.zeros(0, np.float32)))
            scope.update(converted.outputs_of(sources[quantised], scope))
        given[ours] = converted.outputs_of(sources[theirs], scope)[theirs]
    return reference.outputs_of(index, given)


def _loss(answers: Arrays, exact: Arrays) -> float:
    worst = 0.0
    for name, value in answers.items():
        if value.dtype != np.float32 or not value.size:
            continue
        if not np.isfinite(value).all() and np.isfinite(exact[name]).all():
            return math.inf
        scale = float(np.abs(exact[name]).max()) or 1.0
        worst = max(worst, float(np.abs(value - exact[name]).max()) / scale)
    return worst


Quick = Callable[[Sequence[str], Sequence[str]], bool]
"""Whether the parity gate would pass with these converted nodes, of which these are kept; without a conversion."""


def _quick(job: PrecisionJob, reference: Graph, check: Batches, expected: Batches) -> Quick | None:
    low = LOW.get(job["precision"])
    if low is None:
        return None

    def passes(converted: Sequence[str], kept: Sequence[str]) -> bool:
        rest = set(converted) - set(kept)
        got = [reference.run(batch, low=rest, to=low) for batch in check]
        return difference(got, expected, job["parity"]).within

    return passes


def search(
    attempt: Callable[[Sequence[str]], Attempt],
    losses: Mapping[str, float],
    first: Attempt,
    *,
    quick: Quick | None,
) -> Attempt | None:
    """The attempt that keeps the fewest nodes, or `None` if none of them passes.

    The nodes are ordered by what each loses; the shortest beginning of that list with which the gate passes is found by
    bisection, then every entry of it is tried for whether it passes without, the smallest loss first.
    """
    order = [name for name in losses if name in set(first.converted)]
    order += [name for name in first.converted if name not in losses]
    attempts: dict[tuple[str, ...], Attempt] = {}

    def full(kept: Sequence[str]) -> Attempt:
        key = tuple(kept)
        if key not in attempts:
            attempts[key] = attempt((*first.kept, *key))
        return attempts[key]

    def passes(kept: Sequence[str]) -> bool:
        if quick is not None:
            return quick(first.converted, kept)
        return full(kept).difference.within

    few, many = 0, len(order)
    if not passes(order):
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if passes(order[:middle]) else (middle, many)
    kept = order[:many]
    for name in list(reversed(kept))[:PRUNED]:
        without = [other for other in kept if other != name]
        if without and passes(without):
            kept = without
    found = full(kept)
    # What the quick arithmetic lets pass may miss by a hair once it is really converted: then more is kept.
    while not found.difference.within and many < len(order):
        many = min(len(order), max(many + 1, 2 * many))
        found = full(order[:many])
    return found if found.difference.within and found.converted else None


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
    return ProgramFailed(
        "configuration",
        f'engine.keep_fp32 names "{name}", and the graph has no such node',
        hint=nearest(name, [node.name for node in model.graph.node]),
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
