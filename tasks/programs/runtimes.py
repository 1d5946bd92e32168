"""The places where a model answers: PyTorch, ONNX Runtime, a Triton server. Each takes and gives arrays by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .batches import to_arrays
from .failures import ProgramFailed
from .jobs import EvaluateJob
from .recipe import Arrays, Recipe
from .triton_requests import Infer, triton
from .weights import load_weights


def runtime_of(job: EvaluateJob, recipe: Recipe) -> Infer:
    """What the job asks for."""
    threads = job.get("threads", 1)
    if job["runtime"] == "pytorch":
        return pytorch(recipe, list(job["inputs"]), Path(job["weights"]))
    if job["runtime"] == "onnxruntime":
        session = onnx_session(Path(job["onnx"]), threads=threads)
        check_outputs(recipe, [output.name for output in session.get_outputs()], job["onnx"])
        return lambda inputs: dict(zip(recipe.outputs, session.run(list(recipe.outputs), dict(inputs)), strict=True))
    return triton(job["triton"], recipe.outputs)


def pytorch(recipe: Recipe, inputs: list[str], weights: Path) -> Infer:
    model = recipe.model(inputs)
    load_weights(model, weights, kind="configuration")
    model.eval()

    def infer(arrays: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> Arrays:
        with torch.no_grad():
            outputs = recipe.forward(model, {name: torch.from_numpy(value) for name, value in arrays.items()})
        return to_arrays(outputs)

    return infer


def onnx_session(path: Path, *, threads: int) -> Any:
    """A session on the CPU. Graph optimisations stay in memory: nothing of ours is written back."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # warnings are about constants it folds and shapes it merges
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def check_outputs(recipe: Recipe, given: list[str], where: str) -> None:
    missing = [name for name in recipe.outputs if name not in given]
    if missing:
        raise ProgramFailed(
            "configuration",
            f"the model gives {', '.join(given)}, but the recipe's outputs are {', '.join(recipe.outputs)}",
            hint="export it again, or serve the version that belongs to this recipe",
            where=where,
        )
