"""Small ONNX graphs that TensorRT must refuse, or must take though they look odd; each is made here, from nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper

Sizes = Sequence[int]
Profile = Mapping[str, tuple[Sizes, Sizes, Sizes]]


@dataclass(frozen=True)
class Case:
    """One graph, and what becomes of it."""

    name: str
    make: Callable[[Path], None]
    profile: Profile
    refused: str | None
    """A pattern of the refusal; None where the graph compiles."""


def value(name: str, kind: int, shape: Sequence[int | str | None]) -> onnx.ValueInfoProto:
    return h.make_tensor_value_info(name, kind, list(shape))


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Mapping[str, Any] | None = None,
    *,
    opset: int = 20,
    others: Mapping[str, int] | None = None,
    tensors: Sequence[onnx.TensorProto] = (),
) -> Callable[[Path], None]:
    """A function that writes the graph to a path."""

    def make(path: Path) -> None:
        initializers = [numpy_helper.from_array(np.asarray(v), k) for k, v in (weights or {}).items()]
        made = h.make_graph(list(nodes), "case", list(inputs), list(outputs), [*initializers, *tensors])
        imports = [h.make_opsetid("", opset), *(h.make_opsetid(d, v) for d, v in (others or {}).items())]
        model = h.make_model(made, opset_imports=imports)
        model.ir_version = 10
        path.write_bytes(model.SerializeToString())

    return make


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "culprit", **attributes: Any) -> Any:
    return h.make_node(kind, list(inputs), list(outputs), name=name, **attributes)


B3 = {"x": ((1, 3), (4, 3), (8, 3))}
B33 = {"x": ((1, 3, 3), (4, 3, 3), (8, 3, 3))}
IMAGE = {"x": ((1, 1, 8, 8), (4, 1, 8, 8), (8, 1, 8, 8))}
X, Y = value("x", T.FLOAT, ["b", 3]), value("y", T.FLOAT, ["b", 3])
NEG = node("Neg", ["x"], ["y"], "fine")
RNG = np.random.default_rng(0)
KERNEL = RNG.standard_normal((4, 1, 3, 3)).astype(np.float32)


def _conv_int8(zero: int) -> Callable[[Path], None]:
    """A convolution between quantisation nodes, as QDQ tools write it."""
    return graph(
        [
            node("QuantizeLinear", ["x", "sx", "zx"], ["qx"], "quantize_x"),
            node("DequantizeLinear", ["qx", "sx", "zx"], ["dx"], "dequantize_x"),
            node("QuantizeLinear", ["w", "sw", "zw"], ["qw"], "quantize_w"),
            node("DequantizeLinear", ["qw", "sw", "zw"], ["dw"], "dequantize_w"),
            node("Conv", ["dx", "dw"], ["y"], "conv", pads=[1, 1, 1, 1]),
        ],
        [value("x", T.FLOAT, ["b", 1, 8, 8])],
        [value("y", T.FLOAT, ["b", 4, 8, 8])],
        {
            "w": KERNEL,
            "sx": np.float32(0.02),
            "zx": np.int8(zero),
            "sw": np.float32(0.02),
            "zw": np.int8(0),
        },
    )


def _cut(make: Callable[[Path], None], keep: float) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        make(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * keep)])

    return cut


def _without_weights(path: Path) -> None:
    weight = numpy_helper.from_array(RNG.standard_normal((3, 3)).astype(np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = T.EXTERNAL
    for key, text in (("location", "gone.data"), ("offset", "0"), ("length", "36")):
        weight.external_data.add(key=key, value=text)
    graph([node("MatMul", ["x", "w"], ["y"])], [X], [Y], tensors=[weight])(path)


def _branches(other: int) -> Callable[[Path], None]:
    """An If whose else-branch answers in another number of columns."""

    def branch(name: str, columns: int) -> onnx.GraphProto:
        constant = numpy_helper.from_array(np.zeros((2, columns), np.float32), f"{name}_value")
        out = value(f"{name}_out", T.FLOAT, [2, columns])
        return h.make_graph([h.make_node("Constant", [], [f"{name}_out"], value=constant)], name, [], [out])

    return graph(
        [
            node("ReduceSum", ["x"], ["s"], "sum", keepdims=0),
            node("Greater", ["s", "zero"], ["c"], "greater"),
            node("If", ["c"], ["y"], "choice", then_branch=branch("yes", 3), else_branch=branch("no", other)),
        ],
        [X],
        [value("y", T.FLOAT, [2, None])],
        {"zero": np.float32(0)},
    )


CASES: tuple[Case, ...] = (
    # Operators without a layer.
    Case(
        "an operator for texts",
        graph([node("StringNormalizer", ["x"], ["y"])], [value("x", T.STRING, ["b"])], [value("y", T.STRING, ["b"])]),
        {"x": ((1,), (2,), (4,))},
        r"data type|StringNormalizer",
    ),
    Case(
        "a determinant",
        graph([node("Det", ["x"], ["y"])], [value("x", T.FLOAT, ["b", 3, 3])], [value("y", T.FLOAT, ["b"])]),
        B33,
        r"culprit \(Det\)",
    ),
    Case(
        "unique values",
        graph([node("Unique", ["x"], ["y"])], [X], [value("y", T.FLOAT, [None])]),
        B3,
        r"culprit \(Unique\)",
    ),
    Case(
        "an operator of ONNX Runtime's own",
        graph(
            [node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft")],
            [X],
            [Y],
            {"w": np.eye(3, dtype=np.float32)},
            others={"com.microsoft": 1},
        ),
        B3,
        r"FusedMatMul",
    ),
    Case(
        "an operator that nobody knows",
        graph([node("Frobnicate", ["x"], ["y"], domain="example.org")], [X], [Y], others={"example.org": 1}),
        B3,
        r"Frobnicate",
    ),
    Case(
        "two operators without a layer",
        graph(
            [node("Det", ["x"], ["a"], "first"), node("Unique", ["a"], ["y"], "second")],
            [value("x", T.FLOAT, ["b", 3, 3])],
            [value("y", T.FLOAT, [None])],
        ),
        B33,
        r"first \(Det\)(.|\n)*second \(Unique\)",
    ),
    Case(
        "integer convolution in the old form",
        graph(
            [node("ConvInteger", ["x", "w"], ["y"])],
            [value("x", T.INT8, ["b", 1, 8, 8])],
            [value("y", T.INT32, ["b", 4, 6, 6])],
            {"w": np.ones((4, 1, 3, 3), np.int8)},
        ),
        IMAGE,
        r"ConvInteger",
    ),
    Case(
        "dynamic quantisation",
        graph(
            [
                node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
                node("DequantizeLinear", ["q", "s", "z"], ["y"], "back"),
            ],
            [X],
            [Y],
        ),
        B3,
        r"DynamicQuantizeLinear|back|UINT8|uint8",
    ),
    Case(
        "a sequence of tensors",
        graph(
            [node("SequenceConstruct", ["x", "x"], ["s"]), node("ConcatFromSequence", ["s"], ["y"], "join", axis=0)],
            [X],
            [value("y", T.FLOAT, [None, 3])],
        ),
        B3,
        r"Sequence",
    ),
    # Types and shapes.
    Case(
        "two types in one sum",
        graph([node("Cast", ["x"], ["h"], "cast", to=T.FLOAT16), node("Add", ["h", "x"], ["y"])], [X], [Y]),
        B3,
        r"culprit \(Add\).*types",
    ),
    Case(
        "a product that does not fit",
        graph(
            [node("MatMul", ["x", "w"], ["y"])],
            [X],
            [value("y", T.FLOAT, ["b", 4])],
            {"w": np.zeros((5, 4), np.float32)},
        ),
        B3,
        r"culprit \(MatMul\).*must match",
    ),
    Case(
        "a reshape to another size",
        graph(
            [node("Reshape", ["x", "s"], ["y"])],
            [value("x", T.FLOAT, [2, 3])],
            [value("y", T.FLOAT, [4, 2])],
            {"s": np.array([4, 2], np.int64)},
        ),
        {},
        r"reshape|Reshape|volume",
    ),
    Case(
        "a batch of one baked in",
        graph(
            [node("Reshape", ["x", "s"], ["y"])], [X], [value("y", T.FLOAT, [1, 3])], {"s": np.array([1, 3], np.int64)}
        ),
        B3,
        r"reshape|Reshape|volume|profile|culprit",
    ),
    Case("quantisation around another zero", _conv_int8(3), IMAGE, r"zero|symmetric|quantize_x"),
    # Profiles.
    Case("min above opt", graph([NEG], [X], [Y]), {"x": ((4, 3), (1, 3), (8, 3))}, r"MIN<=OPT<=MAX"),
    Case("a profile for another input", graph([NEG], [X], [Y]), {"z": ((1, 3), (1, 3), (1, 3))}, r'no input "z"'),
    Case("no profile for a dynamic input", graph([NEG], [X], [Y]), {}, r'"x" is dynamic'),
    Case("a profile of another rank", graph([NEG], [X], [Y]), {"x": ((1,), (2,), (4,))}, r'of "x" is \[1\]'),
    Case(
        "a profile against a fixed size", graph([NEG], [X], [Y]), {"x": ((1, 5), (2, 5), (4, 5))}, r"declares \[-1, 3\]"
    ),
    Case(
        "two inputs that never fit",
        graph([node("Add", ["x", "z"], ["y"])], [X, value("z", T.FLOAT, ["c", 3])], [Y]),
        {"x": ((2, 3), (4, 3), (8, 3)), "z": ((3, 3), (5, 3), (7, 3))},
        r"culprit|profile|dimension",
    ),
    # Files.
    Case(
        "a file that was cut off",
        _cut(graph([node("MatMul", ["x", "w"], ["y"])], [X], [Y], {"w": np.eye(3, dtype=np.float32)}), 0.6),
        B3,
        r"parse|graph",
    ),
    Case("weights left behind", _without_weights, B3, r"weights|gone\.data|external|file"),
    # What looks odd, and compiles.
    Case(
        "texts apart, int64 all the way",
        graph(
            [node("Gather", ["w", "x"], ["y"], "look_up")],
            [value("x", T.INT64, ["b", 3])],
            [value("y", T.FLOAT, ["b", 3, 2])],
            {"w": np.zeros((5, 2), np.float32)},
        ),
        B3,
        None,
    ),
    Case(
        "doubles",
        graph(
            [
                node("Cast", ["x"], ["d"], "up", to=T.DOUBLE),
                node("Mul", ["d", "k"], ["e"], "times"),
                node("Cast", ["e"], ["y"], "down", to=T.FLOAT),
            ],
            [X],
            [Y],
            {"k": np.float64(2)},
        ),
        B3,
        None,
    ),
    Case(
        "a shape that depends on the data",
        graph([node("NonZero", ["x"], ["y"])], [X], [value("y", T.INT64, [2, None])]),
        B3,
        r"NonZero",
    ),
    Case("an If with equal branches", _branches(3), {"x": ((2, 3), (2, 3), (2, 3))}, None),
    Case("an If whose branches differ in shape", _branches(4), {"x": ((2, 3), (2, 3), (2, 3))}, None),
    Case(
        "a graph without dynamic axes",
        graph([NEG], [value("x", T.FLOAT, [2, 3])], [value("y", T.FLOAT, [2, 3])]),
        {},
        None,
    ),
    Case("int8 by quantisation nodes", _conv_int8(0), IMAGE, None),
    Case(
        "fp16 inside, fp32 outside",
        graph(
            [
                node("Cast", ["x"], ["h"], "in", to=T.FLOAT16),
                node("Neg", ["h"], ["n"], "neg"),
                node("Cast", ["n"], ["y"], "out", to=T.FLOAT),
            ],
            [X],
            [Y],
        ),
        B3,
        None,
    ),
    Case("an opset newer than the parser", graph([NEG], [X], [Y], opset=27), B3, None),
)
