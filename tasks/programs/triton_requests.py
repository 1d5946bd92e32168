"""A client of a running Triton server, over gRPC. No torch here: what only asks a server starts fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .failures import ProgramFailed
from .jobs import TritonTarget

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
"""By the name of an input or output."""
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


def triton(target: TritonTarget, names: Sequence[str]) -> Infer:
    """Asks the outputs `names` of the model that `target` says."""
    import tritonclient.grpc as grpcclient
    from tritonclient.utils import InferenceServerException

    # A proxy that the environment names is not for servers of ours.
    client = grpcclient.InferenceServerClient(target["url"], channel_args=[("grpc.enable_http_proxy", 0)])
    version = target.get("version")
    model_version = "" if version is None else str(version)
    timeout = target.get("timeout", DEFAULT_TIMEOUT)
    asked = [grpcclient.InferRequestedOutput(name) for name in names]
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
        for name in names:
            value = answer.as_numpy(name)
            if value is None:
                raise ProgramFailed("not ready", f"the answer lacks the output {name}", where=where)
            outputs[name] = value
        return outputs

    return infer


def shapes(arrays: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> str:
    """Such as `image float32[3, 1, 8, 8]`."""
    return ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in arrays.items())
