"""The recipe's metric and golden examples on PyTorch, ONNX Runtime or a Triton server; job and products are
`jobs.EvaluateJob`.

The same object is fed the same batches of the same rows in the same order wherever the outputs come from, so numbers of
different runtimes differ by what the runtimes do and by nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from .axes import Axes, Examples
from .batches import Batch, Share, batches, check_inputs, map_tensors, to_array, to_arrays
from .export_eager import DEFAULT_RTOL
from .failures import ProgramFailed
from .golden import compare_golden
from .jobs import EvaluateJob, Report
from .notes import Notes, Progress, write_json
from .recipe import Arrays, Metric, Recipe
from .recipe_loading import load_recipe
from .runtimes import runtime_of
from .triton_requests import TRITON_TYPES, Infer

GOLDEN_ROWS = 8


def main(job: EvaluateJob) -> None:
    notes = Notes()
    torch.set_num_threads(job.get("threads", 1))
    torch.manual_seed(0)
    output = Path(job["output"])
    axes = Axes(inputs=job["inputs"], shapes=job["shapes"])
    split = job.get("split", "test")
    with notes.timed("load"):
        recipe = load_recipe(job["recipe"])
        infer = runtime_of(job, recipe)
    report: Report = {
        "runtime": job["runtime"],
        "split": split,
        "metrics": {},
        "samples": 0,
        "batches": 0,
        "batch_size": batch_rows(axes, job["batch_size"]),
        "golden": None,
        "slices": {},
    }
    compare = job.get("compare_golden")
    if compare is not None:
        with notes.timed("golden"):
            report["golden"] = compare_golden(
                infer,
                recipe.outputs,
                Path(compare),
                rtol=job.get("rtol", DEFAULT_RTOL),
                rows=report["batch_size"],
                batched=axes.batch is not None,
            )
    if job.get("write_golden", False):
        with notes.timed("golden"):
            write_golden(infer, recipe, axes, output / "golden.safetensors")
    if job.get("metric", True):
        with notes.timed("metric"):
            measure(infer, recipe, axes, split, report)
    write_json(output / "report.json", report)
    notes.environment = {"torch": torch.__version__}
    notes.write(Path(job["work"]))


def batch_rows(axes: Axes, asked: int) -> int:
    """Rows per request that the declared shapes allow."""
    if axes.batch is None:
        return axes.fixed_rows or 1
    return max(1, min(asked, axes.shapes[axes.batch]["max"]))


def measure(infer: Infer, recipe: Recipe, axes: Axes, split: str, report: Report) -> None:
    """Feed the whole split; fills in the report's metrics and counts."""
    dataset = recipe.data(split, list(axes.inputs))
    metric = recipe.metric()
    slices: dict[str, Metric] = {}
    rows, length = report["batch_size"], len(dataset)
    plan = []
    for start in range(0, length, rows):
        indices = tuple(range(start, min(start + rows, length)))
        plan.append(Share(indices=indices, real=len(indices), total=len(indices)))
    progress = Progress(length)
    for batch in batches(recipe, dataset, plan):
        outputs = answer(infer, recipe, axes, split, batch)
        targets = map_tensors(to_array, batch.targets)
        recipe.update(metric, outputs, targets)
        for name, mask in recipe.slices(metric, targets, batch.share.real).items():
            if mask.any():
                own = slices.setdefault(name, recipe.metric())
                recipe.update(own, {key: value[mask] for key, value in outputs.items()}, masked(targets, mask))
        report["samples"] += batch.share.real
        report["batches"] += 1
        progress(report["samples"], f"{report['runtime']}: {report['samples']}/{length} samples")
    report["metrics"] = recipe.finite_result(metric)
    report["slices"] = {name: recipe.finite_result(own) for name, own in sorted(slices.items())}


def masked(targets: Any, mask: Any) -> Any:
    """The rows of the targets that belong to a slice."""
    if isinstance(targets, Mapping):
        return {key: masked(value, mask) for key, value in targets.items()}
    return targets[mask]


def answer(infer: Infer, recipe: Recipe, axes: Axes, split: str, batch: Batch) -> Arrays:
    """One batch's outputs; rows that a minimum of the batch axis asks for are put in and taken out again."""
    check_inputs(recipe, split, batch.inputs, axes.inputs)
    inputs = {name: np.ascontiguousarray(to_array(batch.inputs[name])) for name in axes.inputs}
    check_sizes(recipe, axes, split, inputs)
    real = batch.share.real
    least = axes.shapes[axes.batch]["min"] if axes.batch is not None else axes.fixed_rows or 1
    if real < least:
        inputs = {name: np.resize(value, (least, *value.shape[1:])) for name, value in inputs.items()}
    outputs = infer(inputs)
    for name, value in outputs.items():
        if value.shape[:1] != (max(real, least),):
            raise ProgramFailed(
                "configuration",
                f"{max(real, least)} rows were asked and the answer has the shape {list(value.shape)}",
                where=f"output {name}, axis 0",
            )
    return {name: value[:real] for name, value in outputs.items()}


def check_sizes(recipe: Recipe, axes: Axes, split: str, inputs: Mapping[str, Any]) -> None:
    """Data beyond the declared ranges would be refused by an engine, so it is no measure of one."""
    for name, spec in axes.inputs.items():
        for axis, declared in enumerate(spec["shape"]):
            if not isinstance(declared, str) or (axis == 0 and declared == axes.batch):
                continue
            size, allowed = inputs[name].shape[axis], axes.shapes[declared]
            if not allowed["min"] <= size <= allowed["max"]:
                raise recipe.wrong(
                    "collate" if recipe.has("collate") else f"{split}_data",
                    f'() gives input "{name}" with {size} along {declared}; shapes.{declared} allows '
                    f"{allowed['min']} to {allowed['max']}",
                    hint="cut the data, or widen the range",
                )


def write_golden(infer: Infer, recipe: Recipe, axes: Axes, path: Path) -> None:
    """Real rows of the validation data (the test split decides gates) and this runtime's answers to them."""
    dataset = recipe.data("validation", list(axes.inputs))
    examples = Examples(recipe=recipe, axes=axes, dataset=dataset, split="validation")
    sizes = axes.opt()
    if axes.batch is not None:
        allowed = axes.shapes[axes.batch]
        sizes[axes.batch] = max(allowed["min"], min(GOLDEN_ROWS, allowed["max"]))
    inputs = to_arrays(examples.make(sizes))
    outputs = infer(inputs)
    tensors = {f"inputs.{name}": np.ascontiguousarray(value) for name, value in inputs.items()}
    tensors |= {f"outputs.{name}": np.ascontiguousarray(value) for name, value in outputs.items()}
    save_file(tensors, path)
    write_json(path.with_name("request.json"), example_request({name: value[:1] for name, value in inputs.items()}))


def example_request(inputs: Arrays) -> dict[str, Any]:
    """One request in the JSON of Triton's HTTP protocol (the KServe predict protocol, version 2)."""
    return {
        "inputs": [
            {
                "name": name,
                "datatype": TRITON_TYPES[str(value.dtype)],
                "shape": list(value.shape),
                "data": value.ravel().tolist(),
            }
            for name, value in inputs.items()
        ]
    }
