"""The places where a model answers: PyTorch, ONNX Runtime, a Triton server. Each takes and gives arrays by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .batches import to_arrays
from .failures import ProgramFailed
from .jobs import EvaluateJob, TritonTarget
from .recipe import Arrays, Recipe
from .weights import load_weights

Infer = Callable[[Mapping[str, np.ndarray[Any, np.dtype[Any]]]], Arrays]
"""Answer one batch. The arrays that it gives are owned by the caller."""

TRITON_TYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
DEFAULT_TIMEOUT = 60.0


def runtime_of(job: EvaluateJob, recipe: Recipe) -> Infer:
    """What the job asks for."""
    threads = job.get("threads", 1)
    if job["runtime"] == "pytorch":
        return pytorch(recipe, list(job["inputs"]), Path(job["weights"]))
    if job["runtime"] == "onnxruntime":
        session = onnx_session(Path(job["onnx"]), threads=threads)
        check_outputs(recipe, [output.name for output in session.get_outputs()], job["onnx"])
        return lambda inputs: dict(zip(recipe.outputs, session.run(list(recipe.outputs), dict(inputs)), strict=True))
    return triton(job["triton"], recipe)


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


def triton(target: TritonTarget, recipe: Recipe) -> Infer:
    """A client of a running server, over gRPC."""
    import tritonclient.grpc as grpcclient
    from tritonclient.utils import InferenceServerException

    # A proxy that the environment names is not for servers of ours.
    client = grpcclient.InferenceServerClient(target["url"], channel_args=[("grpc.enable_http_proxy", 0)])
    version = target.get("version")
    model_version = "" if version is None else str(version)
    timeout = target.get("timeout", DEFAULT_TIMEOUT)
    asked = [grpcclient.InferRequestedOutput(name) for name in recipe.outputs]
    where = f"{target['model']}{'/' + model_version if model_version else ''} at {target['url']}"

    def infer(arrays: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> Arrays:
        sent = []
        for name, value in arrays.items():
            tensor = grpcclient.InferInput(name, list(value.shape), TRITON_TYPES[str(value.dtype)])
            tensor.set_data_from_numpy(value)
            sent.append(tensor)
        try:
            answer = client.infer(
                target["model"], sent, model_version=model_version, outputs=asked, client_timeout=timeout
            )
        except InferenceServerException as error:
            raise ProgramFailed(
                "not ready",
                f"Triton does not answer a request of {shapes(arrays)}: {error.message() or error}",
                hint="is the server up, and does it serve this version? enginehouse serve status",
                where=where,
            ) from error
        outputs: Arrays = {}
        for name in recipe.outputs:
            value = answer.as_numpy(name)
            if value is None:
                raise ProgramFailed("not ready", f"the answer lacks the output {name}", where=where)
            outputs[name] = value
        return outputs

    return infer


def shapes(arrays: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> str:
    """Such as `image float32[3, 1, 8, 8]`."""
    return ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in arrays.items())
