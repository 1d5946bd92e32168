"""Runs a graph node by node as hardware with low-precision tensors would: every product in fp32, every tensor that is
declared fp16, bf16, int8 or fp8 rounded to that type when it is written.

ONNX Runtime on a CPU cannot stand in for that: it has no bf16 arithmetic, and it silently computes chains of fp16 nodes
in fp32, so that an overflow that a GPU would have does not happen (measured: `sqrt(mean((300 x)^2))` is finite there,
with every optimisation off too). Here each node is a session of its own, and nothing survives between two nodes but
what the type can hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]

_ROUNDED: dict[int, Any] = {
    TensorProto.FLOAT16: np.float16,
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
}
LOW: dict[str, int] = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
_INTEGERS: dict[int, tuple[int, int]] = {TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255)}
_FLOATS8: dict[int, tuple[Any, float]] = {
    TensorProto.FLOAT8E4M3FN: (ml_dtypes.float8_e4m3fn, 448.0),
    TensorProto.FLOAT8E5M2: (ml_dtypes.float8_e5m2, 57344.0),
}


def rounded(values: Array, element_type: int) -> Array:
    """fp32 values as `element_type` can hold them; what is too large becomes infinite."""
    with np.errstate(over="ignore"):
        result: Array = values.astype(_ROUNDED[element_type]).astype(np.float32)
    return result


@dataclass
class Graph:
    """A graph, ready to be run. Values of low-precision floating types are held as fp32 that the type can hold."""

    model: onnx.ModelProto
    types: dict[str, int] = field(default_factory=dict)
    """By tensor, its element type."""
    constants: Arrays = field(default_factory=dict)
    _sessions: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inferred = onnx.shape_inference.infer_shapes(self.model).graph
        for value in (*inferred.input, *inferred.output, *inferred.value_info):
            self.types[value.name] = value.type.tensor_type.elem_type
        for tensor in self.model.graph.initializer:
            self.types[tensor.name] = tensor.data_type
            self.constants[tensor.name] = _array(tensor)

    @property
    def nodes(self) -> Sequence[onnx.NodeProto]:
        """In the order of the file, which is an order in which they can run."""
        found: Sequence[onnx.NodeProto] = self.model.graph.node
        return found

    def run(self, inputs: Mapping[str, Array], *, low: Collection[str] = (), to: int = TensorProto.FLOAT16) -> Arrays:
        """The outputs. Nodes named in `low` read and write their fp32 tensors as `to` too."""
        values = {**self.constants, **self._entered(inputs)}
        for _ in self.steps(values, low=low, to=to):
            pass
        return {output.name: values[output.name] for output in self.model.graph.output}

    def steps(
        self, values: Arrays, *, low: Collection[str] = (), to: int = TensorProto.FLOAT16
    ) -> Iterator[onnx.NodeProto]:
        """Run node after node on `values`, giving each node after it ran."""
        for index, node in enumerate(self.nodes):
            values.update(self.outputs_of(index, values, to if node.name in low else None))
            yield node

    def outputs_of(self, index: int, values: Arrays, low: int | None = None) -> Arrays:
        """What one node answers; `low` rounds its fp32 inputs and outputs to that type."""
        node = self.nodes[index]
        given = {name: values[name] for name in (*node.input, *_captured(node)) if name}
        if low is not None:
            given = {name: _low(value, low) for name, value in given.items()}
        outputs = self._by_hand(node, given)
        if outputs is None:
            outputs = self._by_runtime(index, given)
        for name, value in outputs.items():
            declared = self.types.get(name, 0)
            if declared in _ROUNDED and value.dtype == np.float32:
                outputs[name] = rounded(value, declared)
            elif low is not None:
                outputs[name] = _low(value, low)
        return outputs

    def _entered(self, inputs: Mapping[str, Array]) -> Arrays:
        """Inputs of a low type come as fp32 and are rounded like everything else."""
        return {
            name: rounded(value.astype(np.float32), self.types[name]) if self.types.get(name) in _ROUNDED else value
            for name, value in inputs.items()
        }

    def _by_hand(self, node: onnx.NodeProto, given: Arrays) -> Arrays | None:
        """What ONNX Runtime cannot take as fp32: casts to low types, constants of them, and (de)quantisation."""
        name = node.output[0]
        attributes = {a.name: a for a in node.attribute}
        match node.op_type:
            case "Cast" | "CastLike" if self.types.get(name) in _ROUNDED:
                return {name: given[node.input[0]].astype(np.float32)}
            case "Constant" if "value" in attributes:
                return {name: _array(attributes["value"].t)}
            case "QuantizeLinear" | "DequantizeLinear":
                return {name: self._quantized(node, given, {n: a.i for n, a in attributes.items()})}
        return None

    def _quantized(self, node: onnx.NodeProto, given: Arrays, attributes: Mapping[str, int]) -> Array:
        values, scale = given[node.input[0]], given[node.input[1]].astype(np.float32)
        zero_name = node.input[2] if len(node.input) > 2 else ""
        zero = given[zero_name].astype(np.float32) if zero_name else np.float32(0)
        if attributes.get("block_size"):
            raise ValueError(f"{node.name}: quantisation by blocks is not run here")
        if scale.ndim == 1 and scale.size > 1:
            shape = [1] * values.ndim
            shape[attributes.get("axis", 1)] = -1
            scale, zero = scale.reshape(shape), np.reshape(zero, shape) if np.ndim(zero) else zero
        if node.op_type == "DequantizeLinear":
            result: Array = ((values.astype(np.float32) - zero) * scale).astype(np.float32)
            return result
        kind = self.types.get(zero_name) or attributes.get("output_dtype") or TensorProto.UINT8
        if kind in _FLOATS8:
            dtype, largest = _FLOATS8[kind]
            eight: Array = np.clip(values / scale, -largest, largest).astype(dtype).astype(np.float32)
            return eight
        low, high = _INTEGERS[kind]
        integers: Array = np.clip(np.rint(values / scale) + zero, low, high).astype(np.float32)
        return integers

    def _by_runtime(self, index: int, given: Arrays) -> Arrays:
        node = self.nodes[index]
        outputs = [name for name in node.output if name]
        key = index, tuple(value.dtype.str for value in given.values())
        if key not in self._sessions:
            self._sessions[key] = _session(self.model, node, given, outputs)
        return dict(zip(outputs, self._sessions[key].run(outputs, given), strict=True))


def _session(model: onnx.ModelProto, node: onnx.NodeProto, given: Arrays, outputs: Sequence[str]) -> Any:
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    for attribute in alone.attribute:
        if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type in _ROUNDED:
            attribute.t.CopyFrom(numpy_helper.from_array(_array(attribute.t), attribute.t.name))
        elif attribute.name in ("to", "dtype") and attribute.i in _ROUNDED:
            attribute.i = TensorProto.FLOAT
    graph = helper.make_graph(
        [alone],
        "node",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), None)
            for name, value in given.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
    )
    single = helper.make_model(graph, opset_imports=list(model.opset_import))
    # onnxruntime reads no newer IR than its own onnx, whatever wrote the graph.
    single.ir_version = min(model.ir_version, 10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(single.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _array(tensor: onnx.TensorProto) -> Array:
    array: Array = numpy_helper.to_array(tensor)
    return array.astype(np.float32) if tensor.data_type in (*_ROUNDED, *_FLOATS8) else array


def _low(value: Array, to: int) -> Array:
    return rounded(value, to) if value.dtype == np.float32 else value


def _captured(node: onnx.NodeProto) -> list[str]:
    """The outer tensors that the branches of an If or the body of a Loop read."""
    found: list[str] = []
    for attribute in node.attribute:
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            made = {v.name for v in graph.input} | {t.name for t in graph.initializer}
            made |= {o for n in graph.node for o in n.output}
            used = [name for n in graph.node for name in (*n.input, *_captured(n))]
            found += [name for name in used if name and name not in made and name not in found]
    return found
