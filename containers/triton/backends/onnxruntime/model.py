"""A CPU stand-in for Triton's `onnxruntime` backend, as a python-based backend.

A server whose backend directory holds this file as `onnxruntime/model.py` serves the very repository that NVIDIA's
native backend serves on a GPU machine: `platform: "onnxruntime_onnx"`, `<version>/model.onnx` and its external data. It
shows that a repository is right and that its answers are right. It shows nothing about speed, nor anything on a GPU.

It reads the native backend's names: `default_model_filename`, the parameters that `_session_options` lists, and
`optimization.graph.level`. Where no `intra_op_thread_count` is given it takes OMP_NUM_THREADS (the native backend: all
cores), so that several servers can share a small machine. It refuses, when the model is loaded, what it cannot do: GPU
instances, ragged batches, implicit state, decoupled answers, BF16. The configuration must be complete: there is no
auto-completion. It runs in Triton's python stub, which needs numpy below 2.

Interfaces: https://github.com/triton-inference-server/onnxruntime_backend and https://github.com/triton-inference-server/
python_backend.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read at import; without it 1.32 reports its use to its maker
import onnxruntime as ort

Feed = dict[str, Any]
"""Arrays by input name: one request's share of a batch."""
Member = tuple[int, Any, Feed]
"""A request's place in the call, the request, and its feed."""

ONNX_TYPES = {
    "TYPE_BOOL": "tensor(bool)",
    "TYPE_UINT8": "tensor(uint8)",
    "TYPE_UINT16": "tensor(uint16)",
    "TYPE_UINT32": "tensor(uint32)",
    "TYPE_UINT64": "tensor(uint64)",
    "TYPE_INT8": "tensor(int8)",
    "TYPE_INT16": "tensor(int16)",
    "TYPE_INT32": "tensor(int32)",
    "TYPE_INT64": "tensor(int64)",
    "TYPE_FP16": "tensor(float16)",
    "TYPE_FP32": "tensor(float)",
    "TYPE_FP64": "tensor(double)",
    "TYPE_STRING": "tensor(string)",
}
GRAPH_LEVELS = {
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
"""`optimization.graph.level` as the native backend reads it."""


class TritonPythonModel:
    """One instance of a model: one process with one ONNX Runtime session."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Opens the session; what is wrong with the configuration or the file becomes the load's error."""
        config = json.loads(args["model_config"])
        self.name = args["model_name"]
        self._refuse_unsupported(config, args["model_instance_kind"])
        path = _model_path(config, Path(args["model_repository"]), args["model_version"])
        self.session = ort.InferenceSession(str(path), _session_options(config), providers=["CPUExecutionProvider"])
        self.batching = int(config.get("max_batch_size", 0)) > 0
        self.inputs = [item["name"] for item in config["input"]]
        self.outputs = [item["name"] for item in config["output"]]
        self.optional = {item["name"] for item in config["input"] if item.get("optional")}
        self.text = {item["name"] for item in config["input"] if item["data_type"] == "TYPE_STRING"}
        self._check("input", config["input"], self.session.get_inputs())
        self._check("output", config["output"], self.session.get_outputs())
        missing = {node.name for node in self.session.get_inputs()} - set(self.inputs)
        if missing:
            raise pb_utils.TritonModelException(
                f"{self.name}: the model's inputs {sorted(missing)} are not in the configuration"
            )

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answers each request; those that fit together go through the session as one batch."""
        answers: list[Any] = [None] * len(requests)
        together: dict[Any, list[Member]] = {}
        for index, request in enumerate(requests):
            try:
                feed = self._feed(request)
            except ValueError as error:
                answers[index] = _refusal(error)
                continue
            shapes = tuple((name, array.shape[1:]) for name, array in feed.items())
            key = shapes if self.batching else index
            together.setdefault(key, []).append((index, request, feed))
        for members in together.values():
            for index, answer in self._answer(members):
                answers[index] = answer
        return answers

    def finalize(self) -> None:
        """Frees the session when the model is unloaded."""
        self.session = None

    def _answer(self, members: Sequence[Member]) -> list[tuple[int, Any]]:
        names = [n for n in self.outputs if any(n in request.requested_output_names() for _, request, _ in members)]
        feeds = [feed for _, _, feed in members]
        try:
            parts = self._run(names, feeds)
        except Exception as error:  # noqa: BLE001 - ONNX Runtime raises classes of its own, all under Exception
            if len(members) == 1:
                return [(members[0][0], _refusal(f"{self.name}: {error}"))]
            # One request of the batch is at fault: asked one by one, the others get their answers.
            return [answer for member in members for answer in self._answer([member])]
        return [
            (index, _response(part, request.requested_output_names()))
            for (index, request, _), part in zip(members, parts, strict=True)
        ]

    def _run(self, names: Sequence[str], feeds: Sequence[Feed]) -> list[Feed]:
        """One call of the session for all feeds; per feed the outputs by name."""
        if len(feeds) == 1:
            merged = feeds[0]
        else:
            merged = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
        arrays = dict(zip(names, self.session.run(names, merged), strict=True))
        if not self.batching:
            return [arrays]
        sizes = [len(next(iter(feed.values()))) for feed in feeds]
        for name, array in arrays.items():
            if array.ndim == 0 or len(array) != sum(sizes):
                raise ValueError(f"output '{name}' has shape {list(array.shape)} for a batch of {sum(sizes)}")
        ends = np.cumsum(sizes)[:-1]
        split = {name: np.split(array, ends) for name, array in arrays.items()}
        return [{name: parts[i] for name, parts in split.items()} for i in range(len(feeds))]

    def _feed(self, request: Any) -> Feed:
        feed: Feed = {}
        for name in self.inputs:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is None:
                if name in self.optional:
                    continue
                raise ValueError(f"{self.name}: input '{name}' is missing")
            array = tensor.as_numpy()
            feed[name] = _decoded(array, name) if name in self.text else array
        sizes = {name: array.shape[0] for name, array in feed.items() if array.ndim} if self.batching else {}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"{self.name}: the inputs' batch sizes differ: {sizes}")
        return feed

    def _check(self, kind: str, declared: Sequence[Mapping[str, Any]], nodes: Sequence[Any]) -> None:
        """The configuration against the graph, as the native backend checks it."""
        graph = {node.name: node for node in nodes}
        for item in declared:
            name = item["name"]
            where = f"{self.name}: {kind} '{name}'"
            if name not in graph:
                raise pb_utils.TritonModelException(f"{where} is not in the model, which has {sorted(graph)}")
            expected = ONNX_TYPES.get(item["data_type"])
            if expected != graph[name].type:
                raise pb_utils.TritonModelException(
                    f"{where} is {item['data_type']} in the configuration, {graph[name].type} in the model"
                )
            dims = [int(d) for d in (item["reshape"].get("shape", []) if "reshape" in item else item["dims"])]
            declared_shape = [-1, *dims] if self.batching else dims
            shape = [d if isinstance(d, int) else -1 for d in graph[name].shape]
            fits = len(shape) == len(declared_shape) and all(
                want in (-1, have) for want, have in zip(shape, declared_shape, strict=True)
            )
            if not fits or (self.batching and shape[0] != -1):
                raise pb_utils.TritonModelException(
                    f"{where} has shape {declared_shape} by the configuration"
                    f"{' (the first one is the batch)' if self.batching else ''}, {shape} in the model"
                )

    def _refuse_unsupported(self, config: Mapping[str, Any], kind: str) -> None:
        refused = {
            "GPU instances": kind == "GPU",
            "allow_ragged_batch": any(item.get("allow_ragged_batch") for item in config["input"]),
            "implicit state": bool(config.get("sequence_batching", {}).get("state")),
            "decoupled answers": bool(config.get("model_transaction_policy", {}).get("decoupled")),
        }
        for what, asked in refused.items():
            if asked:
                raise pb_utils.TritonModelException(f"{self.name}: the CPU stand-in does not support {what}")


def _model_path(config: Mapping[str, Any], model: Path, version: str) -> Path:
    """`<version>/<default_model_filename>`; where that is a folder (a model in several files), `model.onnx` in it."""
    path = model / version / (config.get("default_model_filename") or "model.onnx")
    if path.is_dir():
        path = path / "model.onnx"
    if not path.is_file():
        raise pb_utils.TritonModelException(f"unable to find '{path}'")
    return path


def _session_options(config: Mapping[str, Any]) -> ort.SessionOptions:
    given = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
    options = ort.SessionOptions()
    options.intra_op_num_threads = int(given.get("intra_op_thread_count") or os.environ.get("OMP_NUM_THREADS") or 0)
    options.inter_op_num_threads = int(given.get("inter_op_thread_count") or 0)
    if given.get("execution_mode") == "1":
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = given.get("enable_mem_arena", "1") != "0"
    options.enable_mem_pattern = given.get("enable_mem_pattern", "1") != "0"
    # Threads that wait for work sleep instead of spinning: other servers share the processor.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    options.graph_optimization_level = GRAPH_LEVELS.get(level, GRAPH_LEVELS[0])
    return options


def _decoded(array: Any, name: str) -> Any:
    """Triton's BYTES as the text that ONNX Runtime wants."""
    try:
        texts = [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel()]
    except UnicodeDecodeError as error:
        raise ValueError(f"input '{name}' holds bytes that are not UTF-8: {error}") from error
    return np.array(texts, dtype=np.object_).reshape(array.shape)


def _response(arrays: Feed, wanted: Sequence[str]) -> Any:
    tensors = []
    for name in wanted:
        array = arrays[name]
        if array.dtype == np.object_:
            encoded = [str(text).encode() for text in array.ravel()]
            array = np.array(encoded, dtype=np.object_).reshape(array.shape)
        tensors.append(pb_utils.Tensor(name, array))
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _refusal(error: object) -> Any:
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))
