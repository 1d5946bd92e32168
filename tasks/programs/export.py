"""Weights to a checked ONNX graph; job and products are `jobs.ExportJob`.

A graph that the training program left itself takes the place of the model, and of its own translation.

In this order, the cheap and telling ones first: weights loaded strictly, the PyTorch model's own answers at every
probed size (`export_eager`), the capture with every declared axis symbolic and the translation (`export_trace`), the
graph's form and its file (`export_graph`), and the file's answers on ONNX Runtime at the same sizes (`export_runtime`).
Only a graph that passed everything is left in `output`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

# onnxscript's and the exporter's logs mention optional packages that are none of the user's concern.
os.environ.setdefault("TORCH_LOGS", "-torch.onnx")

import onnx
import onnxruntime
import onnxscript
import torch
from torch import nn

from .axes import Axes, Examples
from .export_eager import Tolerance, eager_answers
from .export_graph import arrange, check_file, check_graph, clean, save, signature, sources
from .export_runtime import check_running
from .export_trace import to_onnx, trace
from .given_graph import GivenGraph, opset_of, read_graph
from .jobs import ExportJob
from .notes import Notes, Progress, write_json
from .recipe import Recipe
from .recipe_loading import load_recipe
from .weights import load_weights

DEFAULT_OPSET = 20
STEPS = ("load", "model checks", "capture", "translate", "graph checks", "runtime checks")


def main(job: ExportJob) -> None:
    notes = Notes()
    output, threads = Path(job["output"]), job.get("threads", 1)
    opset = job.get("opset_version", DEFAULT_OPSET)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    progress = Progress(len(STEPS), every=0.0)
    tolerance = Tolerance.of(job["parity"])
    axes = Axes(inputs=job["inputs"], shapes=job["shapes"])

    progress(0, STEPS[0])
    with notes.timed("load"):
        recipe = load_recipe(job["recipe"])
        given = read_graph(Path(job["onnx"]), recipe) if "onnx" in job else None
        if given is not None:  # its declarations are cheap to check, and tell more than an answer that fails
            opset = opset_of(given)
            _arrange(given, axes, [value.name for value in given.graph.output], recipe, opset)
        model = _model(recipe, job, axes, threads)
        model.eval()
        data = recipe.data("validation", list(axes.inputs))  # the test split is for gates only
        examples = Examples(recipe=recipe, axes=axes, dataset=data, split="validation")

    progress(1, STEPS[1])
    with notes.timed("model_checks"):
        answers = eager_answers(recipe, model, axes, examples, tolerance)

    sample = examples.make(axes.traced())
    names = recipe.output_names(model, sample)
    proto = given if given is not None else _translated(recipe, model, sample, axes, opset, notes, progress)

    progress(4, STEPS[4])
    with notes.timed("graph_checks"):
        places = sources(proto, recipe.folder)
        if given is None:
            _arrange(proto, axes, names, recipe, opset)
        path = save(proto, output)
        passed = False
        try:
            check_file(path, recipe.folder)
            found = signature(proto, axes)
            progress(5, STEPS[5])
            with notes.timed("runtime_checks"):
                largest = check_running(path, found, axes, answers, tolerance, places, threads=threads)
            passed = True
        finally:
            if not passed:  # what was refused is nobody's product
                for leftover in (path, path.with_name("model.onnx.data")):
                    leftover.unlink(missing_ok=True)
    write_json(output / "signature.json", found)
    progress(6, f"{len(answers)} sizes probed", {"max_abs_difference": largest})
    notes.environment = {
        "torch": torch.__version__,
        "onnxscript": onnxscript.__version__,
        "onnxruntime": onnxruntime.__version__,
        "threads": str(threads),
        "max_abs_difference": f"{largest:.3g}",
        "probes": str(len(answers)),
    }
    notes.write(Path(job["work"]))


def _model(recipe: Recipe, job: ExportJob, axes: Axes, threads: int) -> nn.Module:
    """What answers the probes before there is a file of ours."""
    if "onnx" in job:
        return GivenGraph(Path(job["onnx"]), threads=threads)
    model = recipe.model(list(axes.inputs))
    load_weights(model, Path(job["weights"]), kind="export refused")
    return model


def _arrange(proto: onnx.ModelProto, axes: Axes, names: Sequence[str], recipe: Recipe, opset: int) -> None:
    clean(proto)
    arrange(proto, axes, names, recipe.outputs)
    check_graph(proto, axes, opset)


def _translated(
    recipe: Recipe,
    model: nn.Module,
    sample: dict[str, torch.Tensor],
    axes: Axes,
    opset: int,
    notes: Notes,
    progress: Progress,
) -> onnx.ModelProto:
    """The model as a graph."""
    progress(2, STEPS[2])
    with notes.timed("capture"):
        program = trace(recipe, model, sample, axes)
    progress(3, STEPS[3])
    with notes.timed("translate"):
        return to_onnx(recipe, program, opset)
