"""The graph as a file: what does not belong is taken out, names are the declared ones, and it is what was asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

from .axes import Axes
from .export_eager import refused
from .failures import Place, places_in_text
from .jobs import Signature, Tensor

STACK_TRACE = "pkg.torch.onnx.stack_trace"
SINGLE_FILE_UP_TO = 1_500_000_000
"""Bytes. A protobuf ends at 2 GiB; below this everything is in one file, which cannot lose its other half."""

RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
OUTPUT_CAUSES = (
    "usual causes: squeeze() without an axis, a reshape to fixed sizes, a tensor made for the traced size "
    "(repeat(len(x), 1))"
)


def sources(proto: ModelProto, folder: Path) -> dict[str, Place]:
    """The user's line behind each node, as the exporter noted it; to be asked before `clean`."""
    found = {}
    for node in proto.graph.node:
        for entry in node.metadata_props:
            if entry.key == STACK_TRACE:
                places = places_in_text(entry.value, folder)
                if places:
                    found[node.name] = places[-1]
    return found


def clean(proto: ModelProto) -> None:
    """Take out what depends on the machine or on the code's place: metadata (stack traces with paths) and comments."""
    graph = proto.graph
    for part in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    for function in proto.functions:
        function.ClearField("metadata_props")
        function.ClearField("doc_string")
        for node in function.node:
            node.ClearField("metadata_props")
            node.ClearField("doc_string")


def arrange(proto: ModelProto, axes: Axes, returned: Sequence[str], declared: Sequence[str]) -> None:
    """Inputs and outputs by their declared names in the declared order, and axes by theirs wherever they occur.

    `returned` names the outputs in the order in which the graph has them. The exporter is not asked to name them: it
    does not look whether an inner value has that name already (each embedding layer's is called `embedding`).
    """
    graph = proto.graph
    if len(graph.output) != len(returned) or {value.name for value in graph.input} != set(axes.inputs):
        raise refused(
            f"the graph takes {', '.join(v.name for v in graph.input)} and gives {len(graph.output)} outputs; declared "
            f"are {', '.join(axes.inputs)} and {len(returned)} outputs",
            hint="an input that the model does not use, or an output that is None",
            where="inputs and outputs",
        )
    _name_outputs(proto, returned)
    for values, wanted in ((graph.input, list(axes.inputs)), (graph.output, list(declared))):
        by_name = {value.name: ValueInfoProto.FromString(value.SerializeToString()) for value in values}
        del values[:]
        values.extend(by_name[name] for name in wanted)
    _name_axes(proto, axes)


def _name_outputs(proto: ModelProto, names: Sequence[str]) -> None:
    graph = proto.graph
    made = {name for node in graph.node for name in node.output}
    taken = made | {value.name for value in graph.input} | {weight.name for weight in graph.initializer}
    renames: dict[str, str] = {}
    for value, name in zip(graph.output, names, strict=True):
        if value.name in made and value.name not in renames:
            renames[value.name] = name
        else:  # an input or a weight that is given back, or one value under two names
            graph.node.add(op_type="Identity", name=f"output_{name}", input=[value.name], output=[f"{name}/output"])
            renames[f"{name}/output"] = name
        value.name = name
    for inner in sorted(set(names) & taken - {old for old, new in renames.items() if old == new}):
        free = next(f"{inner}_{n}" for n in range(1, len(taken) + 2) if f"{inner}_{n}" not in taken)
        renames.setdefault(inner, free)
        taken.add(free)
    for node in graph.node:
        _rename_in(node, renames)
    for value in graph.value_info:
        value.name = renames.get(value.name, value.name)
    for weight in graph.initializer:
        weight.name = renames.get(weight.name, weight.name)


def _rename_in(node: NodeProto, renames: Mapping[str, str]) -> None:
    """Also in the bodies of `If` and `Loop`, which see the graph's values."""
    node.input[:] = [renames.get(name, name) for name in node.input]
    node.output[:] = [renames.get(name, name) for name in node.output]
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            for inner in body.node:
                _rename_in(inner, renames)
            for value in body.output:
                value.name = renames.get(value.name, value.name)


def _name_axes(proto: ModelProto, axes: Axes) -> None:
    graph = proto.graph
    renames: dict[str, str] = {}
    for value in graph.input:
        for dim, declared in zip(_dims(value), axes.inputs[value.name]["shape"], strict=False):
            if isinstance(declared, str) and dim.dim_param and dim.dim_param != declared:
                renames[dim.dim_param] = declared
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in _dims(value):
            if dim.dim_param:
                dim.dim_param = re.sub(r"[A-Za-z_]\w*", lambda m: renames.get(m[0], m[0]), dim.dim_param)
    for value in graph.output:  # an axis without size and name would print differently in every tool
        for axis, dim in enumerate(_dims(value)):
            if not dim.dim_param and not dim.HasField("dim_value"):
                dim.dim_param = f"{value.name}_axis{axis}"


def check_graph(proto: ModelProto, axes: Axes, opset: int) -> None:
    """Opset, operators, and the types and axes of inputs and outputs are those that were declared."""
    opsets = {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import}
    if opsets.get("ai.onnx") != opset:
        written = opsets.get("ai.onnx")
        raise refused(
            f"opset {opset} was asked for, and {written} was written",
            hint=f"torch's exporter writes opset 18 and later; set export.opset_version: {written}",
            where="export.opset_version",
        )
    known = {function.domain for function in proto.functions} | {"", "ai.onnx"}
    for node in proto.graph.node:
        if node.domain not in known:
            raise refused(
                f"the operator {node.op_type} is of the domain {node.domain}, which only one runtime has",
                hint="use torch's own operators in forward",
                where=f"node {node.name}",
            )
        random = node.op_type in RANDOM or (node.op_type == "Dropout" and len(node.input) > 2 and node.input[2])
        if random:
            raise refused(
                f"the graph draws random numbers ({node.op_type}), so the same request gives different answers",
                hint="usual cause: F.dropout(x, p) without training=self.training",
                where=f"node {node.name}",
            )
    check_values(proto, axes)


def check_values(proto: ModelProto, axes: Axes) -> None:
    for value in proto.graph.input:
        declared = axes.inputs[value.name]
        dtype = _dtype(value)
        if dtype != declared["dtype"]:
            raise refused(
                f"the graph takes it as {dtype}; declared is {declared['dtype']}",
                hint="declare the dtype that the data has",
                where=f"input {value.name}",
            )
        for axis, (dim, size) in enumerate(zip(_shape(value), declared["shape"], strict=True)):
            if dim != size:
                fixed = isinstance(size, str)
                raise refused(
                    f"declared is {size}, but the graph has {dim} there" + (", for every request" if fixed else ""),
                    hint=OUTPUT_CAUSES if fixed else "the recipe's data has another size than the pipeline file",
                    where=f"input {value.name}, axis {axis} ({size})",
                )
    for value in proto.graph.output:
        first = _shape(value)[:1]
        if axes.batch is not None and first != [axes.batch]:
            raise refused(
                f"the first axis of every output must be {axes.batch}; in the graph this one has the shape "
                f"{_shape(value)}",
                hint=OUTPUT_CAUSES,
                where=f"output {value.name}, axis 0 ({axes.batch})",
            )


def save(proto: ModelProto, folder: Path, *, single_file_up_to: int = SINGLE_FILE_UP_TO) -> Path:
    """Write `model.onnx`; weights beyond `single_file_up_to` bytes go to `model.onnx.data` beside it."""
    path = folder / "model.onnx"
    weights = sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    if weights > single_file_up_to:
        (folder / "model.onnx.data").unlink(missing_ok=True)  # onnx appends to it
        onnx.save_model(
            proto, path, save_as_external_data=True, all_tensors_to_one_file=True, location="model.onnx.data"
        )
    else:
        path.write_bytes(proto.SerializeToString(deterministic=True))
    return path


def check_file(path: Path, folder: Path) -> None:
    """The ONNX checker's word on the file as it lies there, and nothing in it that names the recipe's folder."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise refused(
            f"the ONNX checker refuses the graph: {error}",
            hint="an operator of the model is exported wrongly; another export.opset_version may do",
            where=path.name,
        ) from error
    if str(folder).encode() in path.read_bytes():
        raise refused(
            f"the graph holds the recipe's folder {folder}, so it would differ from machine to machine",
            hint="a file name is used as a constant or a name in the model",
            where=path.name,
        )


def signature(proto: ModelProto, axes: Axes) -> Signature:
    def tensors(values: Sequence[ValueInfoProto]) -> list[Tensor]:
        return [{"name": value.name, "dtype": _dtype(value), "shape": _shape(value)} for value in values]

    return {
        "inputs": tensors(proto.graph.input),
        "outputs": tensors(proto.graph.output),
        "batch_axis": axes.batch,
        "opset": next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")),
        "ir_version": proto.ir_version,
    }


def _dims(value: ValueInfoProto) -> Sequence[onnx.TensorShapeProto.Dimension]:
    return value.type.tensor_type.shape.dim


def _shape(value: ValueInfoProto) -> list[int | str]:
    return [dim.dim_param or int(dim.dim_value) for dim in _dims(value)]


def _dtype(value: ValueInfoProto) -> str:
    kind = value.type.tensor_type.elem_type
    if kind == TensorProto.BFLOAT16:
        return "bfloat16"
    return str(onnx.helper.tensor_dtype_to_np_dtype(kind))
