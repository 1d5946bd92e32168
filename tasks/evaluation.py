"""How a model is measured: the jobs for the `evaluate` program, on whichever runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.config import Pipeline, as_json

BATCH_SIZE = 64
"""Rows per call; the program lowers it to the largest declared batch."""


WEIGHTS, GRAPH = "model.safetensors", "model.onnx"
"""What the product of `train` is: weights for the recipe's model, or a graph that a program of the user's left."""


def trained_graph(trained: Path) -> Path | None:
    """The graph in a product of `train`, where there is one; it has no weights then."""
    graph = trained / GRAPH
    return graph if graph.is_file() else None


def recipe_spec(pipeline: Pipeline) -> str:
    """`/abs/recipe.py:Digits`, as every program takes it."""
    return f"{pipeline.recipe_file}:{pipeline.recipe_attribute}"


def tensors(pipeline: Pipeline) -> dict[str, Any]:
    """The declared inputs and axes, as every program takes them."""
    return {"inputs": as_json(pipeline.inputs), "shapes": as_json(pipeline.shapes)}


def job(pipeline: Pipeline) -> dict[str, Any]:
    """Return the part of an `EvaluateJob` (tasks/programs/jobs.py) that is the same for every runtime."""
    return {
        "recipe": recipe_spec(pipeline),
        **tensors(pipeline),
        "batch_size": BATCH_SIZE,
        "rtol": pipeline.gates.parity.rtol,
    }


def timeout_seconds(pipeline: Pipeline) -> float:
    """The deadline of one evaluation."""
    return 60 * pipeline.gates.timeout_minutes


GOLDEN = "golden.safetensors"
"""Inputs, and PyTorch's answers to them, in the product of `validate`."""
REQUEST = "request.json"
"""One example request in the JSON of Triton's HTTP protocol, in the product of `validate`."""


def golden_file(product: Path) -> str:
    """The golden answers in a product of `validate`, as a job takes them."""
    return str(product / GOLDEN)
