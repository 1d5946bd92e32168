"""What is checked by running the file: at every probed size it answers, twice the same, what PyTorch answered."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from .axes import Axes, resolved, shown
from .batches import to_array, to_arrays
from .export_eager import Answer, Tolerance, refused
from .failures import Place, ProgramFailed
from .jobs import Signature
from .recipe import Array, Arrays
from .runtimes import onnx_session

NODE = re.compile(r"Name:'(?P<name>[^']+)'")
BAKED_CAUSES = (
    "usual causes: an if on a size that took the traced size's branch (squeeze when size(0) is 1), and a size taken as "
    "a Python number (repeat(len(x), 1), a reshape to fixed sizes)"
)
HALF_CAUSES = "fp16 ends at 65504: squares and sums in a norm or softmax overflow; keep those layers in fp32"


def check_running(
    path: Path,
    signature: Signature,
    axes: Axes,
    answers: Sequence[Answer],
    tolerance: Tolerance,
    sources: Mapping[str, Place],
    *,
    threads: int,
) -> float:
    """Every probe on ONNX Runtime; gives the largest absolute difference from PyTorch."""
    session = open_session(path, threads=threads)
    names = [output["name"] for output in signature["outputs"]]
    largest = 0.0
    for answer in answers:
        inputs = to_arrays(answer.inputs)
        got = run(session, names, inputs, answer, sources)
        again = run(session, names, inputs, answer, sources)
        for output in signature["outputs"]:
            name = output["name"]
            expected = to_array(answer.outputs[name])
            check_shape(name, got[name], expected, output["shape"], answer, axes)
            if not np.array_equal(got[name], again[name], equal_nan=got[name].dtype.kind == "f"):
                raise refused(
                    f"the same request twice gives different answers at {shown(answer.sizes)}",
                    hint="usual cause: F.dropout(x, p) without training=self.training",
                    where=f"output {name}",
                )
            check_finite(path, name, got[name], inputs, answer, sources, threads)
            largest = max(largest, check_close(name, got[name], expected, answer, tolerance, axes))
    return largest


def open_session(path: Path, *, threads: int) -> Any:
    try:
        return onnx_session(path, threads=threads)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        found = NODE.search(str(error))
        raise refused(
            f"ONNX Runtime cannot load the graph: {error}",
            hint="usual causes: an opset newer than this ONNX Runtime knows (lower export.opset_version), or a type "
            "that an operator does not take",
            where=f"node {found['name']}" if found else path.name,
        ) from error


def run(
    session: Any, names: Sequence[str], inputs: Arrays, answer: Answer, sources: Mapping[str, Place]
) -> dict[str, Array]:
    try:
        values = session.run(list(names), inputs)
    except Exception as error:
        node = NODE.search(str(error))
        place = sources.get(node["name"]) if node else None
        reason = str(error).split("Status Message:")[-1].strip()
        raise refused(
            f"the graph fails at {shown(answer.sizes)}, where PyTorch answers: {reason}"
            + (f"\n{place.described()}" if place else ""),
            hint=BAKED_CAUSES,
            where=f"node {node['name']}" if node else f"axes {', '.join(answer.sizes)}",
            place=place,
        ) from error
    return dict(zip(names, values, strict=True))


def check_shape(
    name: str, got: Array, expected: Array, declared: Sequence[int | str], answer: Answer, axes: Axes
) -> None:
    if got.shape != expected.shape:
        axis = next(
            (i for i, (a, b) in enumerate(zip(got.shape, expected.shape, strict=False)) if a != b),
            min(got.ndim, expected.ndim),
        )
        symbol = declared[axis] if axis < len(declared) else "?"
        raise refused(
            f"the graph gives the shape {list(got.shape)} at {shown(answer.sizes)}, PyTorch {list(expected.shape)}",
            hint=BAKED_CAUSES,
            where=f"output {name}, axis {axis} ({symbol})",
        )
    # An output axis that is a number in the graph has to be that number at every size.
    known = [size if isinstance(size, int) or size in axes.names else None for size in declared]
    sizes = resolved([0 if size is None else size for size in known], answer.sizes)
    for axis, (size, actual) in enumerate(zip(sizes, got.shape, strict=True)):
        if known[axis] is not None and size != actual:
            raise refused(
                f"the graph says {declared[axis]} for this axis, but it is {actual} at {shown(answer.sizes)}",
                hint=BAKED_CAUSES,
                where=f"output {name}, axis {axis} ({declared[axis]})",
            )


def check_finite(
    path: Path,
    name: str,
    got: Array,
    inputs: Arrays,
    answer: Answer,
    sources: Mapping[str, Place],
    threads: int,
) -> None:
    if got.dtype.kind != "f" or np.isfinite(got).all():
        return
    node, dtype = first_not_finite(path, inputs, threads=threads)
    place = sources.get(node)
    raise refused(
        f"the graph gives nan or infinity at {shown(answer.sizes)}, where PyTorch does not; it begins at node {node} "
        f"({dtype})" + (f"\n{place.described()}" if place else ""),
        hint=HALF_CAUSES if dtype == "float16" else "usual cause: a value that PyTorch clamps or casts on the way",
        where=f"output {name}, node {node}",
        place=place,
    )


def first_not_finite(path: Path, inputs: Arrays, *, threads: int) -> tuple[str, str]:
    """Name and dtype of the first node in the graph's order whose output is not finite."""
    proto: ModelProto = onnx.load(path)
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    types = {value.name: value for value in inferred.graph.value_info}
    present = {value.name for value in proto.graph.output}
    wanted = [n for node in proto.graph.node for n in node.output if n in types and n not in present]
    proto.graph.output.extend(types[n] for n in wanted)
    probe = path.with_name(f".{path.stem}.probe.onnx")
    probe.write_bytes(proto.SerializeToString())
    try:
        session = onnx_session(probe, threads=threads)
        names = [output.name for output in session.get_outputs()]
        values = dict(zip(names, session.run(names, inputs), strict=True))
    finally:
        probe.unlink()
    for node in proto.graph.node:
        for output in node.output:
            value = values.get(output)
            if value is not None and value.dtype.kind == "f" and not np.isfinite(value).all():
                return node.name, str(value.dtype)
    return "", ""


def check_close(name: str, got: Array, expected: Array, answer: Answer, tolerance: Tolerance, axes: Axes) -> float:
    """The largest absolute difference; refused if an element lies outside the tolerance."""
    if not got.size:
        return 0.0
    if got.dtype != expected.dtype and got.dtype.kind != expected.dtype.kind:
        raise refused(
            f"the graph gives {got.dtype}, PyTorch {expected.dtype}",
            hint="cast it explicitly in forward",
            where=f"output {name}",
        )
    one, other = got.astype(np.float64), expected.astype(np.float64)
    difference = np.abs(one - other)
    allowed = tolerance.atol + tolerance.rtol * np.abs(other) if got.dtype.kind == "f" else np.zeros_like(other)
    if (difference <= allowed).all():
        return float(difference.max())
    raise _differs(name, one, other, difference, answer, tolerance, axes)


def _differs(
    name: str,
    got: Array,
    expected: Array,
    difference: Array,
    answer: Answer,
    tolerance: Tolerance,
    axes: Axes,
) -> ProgramFailed:
    worst = np.unravel_index(int(np.argmax(difference)), difference.shape)
    rows = np.unique(np.nonzero(difference > tolerance.atol + tolerance.rtol * np.abs(expected))[0])
    mixed = _rows_of_another(got, expected, tolerance)
    return refused(
        f"the graph answers otherwise than PyTorch at {shown(answer.sizes)}: largest difference "
        f"{difference.max():.3g} at {[int(i) for i in worst]} ({got[worst]:.6g} instead of {expected[worst]:.6g}; "
        f"allowed: {tolerance}), in {len(rows)} of {got.shape[0]} rows" + (f"; {mixed}" if mixed else ""),
        hint=f"{BAKED_CAUSES}; if the difference is small everywhere, gates.parity is too tight for this model",
        where=f"output {name}" + (f", axis 0 ({axes.batch})" if mixed and axes.batch else ""),
    )


def _rows_of_another(got: Array, expected: Array, tolerance: Tolerance) -> str | None:
    """Whether the graph's rows are PyTorch's in another order or one and the same: axes or rows are mixed up."""
    rows = got.shape[0]
    if rows < 2 or rows > 64:
        return None
    found = []
    for row in got:
        near = [
            i for i, other in enumerate(expected) if np.allclose(row, other, rtol=tolerance.rtol, atol=tolerance.atol)
        ]
        if not near:
            return None
        found.append(near[0])
    return f"its rows are PyTorch's rows {found}"
