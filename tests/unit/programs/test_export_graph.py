"""The graph's form: names, axes, opset, operators, what does not belong in it, and how it lies on the disk."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser

from tasks.programs.axes import Axes
from tasks.programs.export_graph import arrange, check_file, check_graph, clean, save, sources

AXES = Axes(inputs={"x": {"dtype": "float32", "shape": ["batch", 4]}}, shapes={"batch": {"min": 1, "opt": 4, "max": 8}})


def graph(text: str, opset: int = 20) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}, "other" : 1]>\n{text}')


def run(proto: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


def test_an_inner_value_that_has_an_outputs_name_already_makes_way():
    proto = graph("g (float[batch,4] x) => (float[batch,4] div) { y = Exp(x)  y_1 = Neg(y)  div = Abs(y_1) }")
    arrange(proto, AXES, ["y"], ["y"])
    onnx.checker.check_model(proto)
    x = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(run(proto, x)[0], np.exp(x), rtol=1e-6)
    assert [value.name for value in proto.graph.output] == ["y"]


def test_outputs_come_in_the_declared_order_whatever_forward_returns():
    proto = graph("g (float[batch,4] x) => (float[batch,4] one, float[batch,4] two) { one = Exp(x)  two = Neg(x) }")
    arrange(proto, AXES, ["second", "first"], ["first", "second"])
    x = np.ones((2, 4), np.float32)
    first, second = run(proto, x)
    np.testing.assert_allclose(first, -x)
    np.testing.assert_allclose(second, np.exp(x), rtol=1e-6)


def test_outputs_may_swap_the_names_of_inner_values():
    proto = graph("g (float[batch,4] x) => (float[batch,4] a, float[batch,4] b) { a = Exp(x)  b = Neg(x) }")
    arrange(proto, AXES, ["b", "a"], ["a", "b"])
    onnx.checker.check_model(proto)
    x = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(run(proto, x)[0], -x)


def test_an_input_that_is_given_back_and_one_value_under_two_names_become_outputs_of_their_own():
    proto = graph("g (float[batch,4] x) => (float[batch,4] v, float[batch,4] w) { v = Exp(x)  w = Neg(x) }")
    values = [proto.graph.output[0], proto.graph.output[0], proto.graph.input[0]]
    copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in values]
    del proto.graph.output[:]
    proto.graph.output.extend(copies)
    arrange(proto, AXES, ["one", "same", "given"], ["one", "same", "given"])
    onnx.checker.check_model(proto)
    x = np.ones((2, 4), np.float32)
    one, same, given = run(proto, x)
    np.testing.assert_array_equal(one, same)
    np.testing.assert_array_equal(given, x)


def test_axes_get_their_declared_names_wherever_they_occur():
    proto = graph("g (float[s77,4] x) => (float[s77,4] y, float[c] z) { y = Exp(x)  z = Neg(x) }")
    proto.graph.output[1].type.tensor_type.shape.dim[0].dim_param = "2*s77"
    arrange(proto, AXES, ["y", "z"], ["y", "z"])
    shapes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.output]
    assert shapes == [["batch", 4], ["2*batch"]]


REFUSED = {
    "another opset": (
        graph("g (float[batch,4] x) => (float[batch,4] y) { y = Exp(x) }", opset=18),
        "export.opset_version",
        "opset 20 was asked for, and 18 was written",
        "set export.opset_version: 18",
    ),
    "an operator of one runtime": (
        graph("g (float[batch,4] x) => (float[batch,4] y) { [only] y = other.FusedThing(x) }"),
        "node only",
        "FusedThing is of the domain other",
        "torch's own operators",
    ),
    "random numbers": (
        graph("g (float[batch,4] x) => (float[batch,4] y) { [noise] r = RandomNormalLike(x)  y = Add(x, r) }"),
        "node noise",
        "draws random numbers (RandomNormalLike)",
        "F.dropout",
    ),
    "a fixed batch in the input": (
        graph("g (float[3,4] x) => (float[3,4] y) { y = Exp(x) }"),
        "input x, axis 0 (batch)",
        "declared is batch, but the graph has 3 there, for every request",
        "reshape to fixed sizes",
    ),
    "a fixed batch in the output": (
        graph("g (float[batch,4] x) => (float[3,4] y) { y = Exp(x) }"),
        "output y, axis 0 (batch)",
        "the first axis of every output must be batch; in the graph this one has the shape [3, 4]",
        "squeeze() without an axis",
    ),
    "another size": (
        graph("g (float[batch,5] x) => (float[batch,5] y) { y = Exp(x) }"),
        "input x, axis 1 (4)",
        "declared is 4, but the graph has 5",
        "another size than the pipeline file",
    ),
    "another dtype": (
        graph("g (double[batch,4] x) => (double[batch,4] y) { y = Exp(x) }"),
        "input x",
        "takes it as float64; declared is float32",
        "declare the dtype",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_that_is_not_what_was_declared_is_refused(name, failure_of):
    proto, where, says, hint = REFUSED[name]
    failure = failure_of(check_graph, proto, AXES, 20)
    assert failure.kind == "export refused"
    assert failure.where == where
    assert says in failure.message
    assert hint in failure.hint


def test_an_input_that_the_graph_lacks_is_refused(failure_of):
    proto = graph("g (float[batch,4] z) => (float[batch,4] y) { y = Exp(z) }")
    failure = failure_of(arrange, proto, AXES, ["y"], ["y"])
    assert "the graph takes z" in failure.message


def test_the_checkers_word_reaches_the_user(tmp_path, failure_of):
    proto = graph("g (float[batch,4] x) => (float[batch,4] y) { y = Exp(x) }")
    proto.graph.node[0].op_type = "Exb"
    failure = failure_of(check_file, save(proto, tmp_path), tmp_path / "user")
    assert "the ONNX checker refuses the graph" in failure.message
    assert "Exb" in failure.message


def test_a_graph_that_names_the_recipes_folder_is_refused(tmp_path, failure_of):
    proto = graph("g (float[batch,4] x) => (float[batch,4] y) { y = Exp(x) }")
    proto.graph.node[0].name = f"read {tmp_path}/user/words.txt"
    failure = failure_of(check_file, save(proto, tmp_path), tmp_path / "user")
    assert "would differ from machine to machine" in failure.message


def test_notes_of_the_exporter_tell_the_users_line_and_are_taken_out(tmp_path):
    proto = graph("g (float[batch,4] x) => (float[batch,4] y) { [first] y = Exp(x) }")
    entry = proto.graph.node[0].metadata_props.add()
    entry.key = "pkg.torch.onnx.stack_trace"
    entry.value = f'File "{tmp_path}/recipe.py", line 7, in forward\n    return x.exp()'
    proto.graph.doc_string = str(tmp_path)
    assert str(sources(proto, tmp_path)["first"]) == f"{tmp_path}/recipe.py:7"
    clean(proto)
    assert str(tmp_path).encode() not in proto.SerializeToString()


def test_large_weights_lie_beside_the_graph_and_are_found_there(tmp_path):
    weight = numpy_helper.from_array(np.arange(4096, dtype=np.float32).reshape(4, 1024), "w")
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 1024])
    proto = helper.make_model(
        helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight]),
        opset_imports=[helper.make_opsetid("", 20)],
    )
    small, large = tmp_path / "small", tmp_path / "large"
    for folder in (small, large):
        folder.mkdir()
    save(onnx.ModelProto.FromString(proto.SerializeToString()), small)
    save(onnx.ModelProto.FromString(proto.SerializeToString()), large, single_file_up_to=1000)
    assert [path.name for path in small.iterdir()] == ["model.onnx"]
    assert sorted(path.name for path in large.iterdir()) == ["model.onnx", "model.onnx.data"]
    first = (large / "model.onnx.data").read_bytes()
    save(onnx.ModelProto.FromString(proto.SerializeToString()), large, single_file_up_to=1000)
    assert (large / "model.onnx.data").read_bytes() == first  # written anew, not appended to
    check_file(large / "model.onnx", tmp_path / "user")
    moved = tmp_path / "moved"
    large.rename(moved)
    session = onnxruntime.InferenceSession(str(moved / "model.onnx"), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.ones((2, 4), np.float32)})[0].shape == (2, 1024)


def test_the_same_model_from_two_folders_is_the_same_bytes(bench):
    one, two = bench(), bench()
    files = [made.export() for made in (one, two)]
    assert [p.name for p in sorted(files[0].iterdir())] == ["model.onnx", "signature.json"]
    for name in ("model.onnx", "signature.json"):
        assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes()
    proto = onnx.load(files[0] / "model.onnx")
    assert not any(node.metadata_props for node in proto.graph.node)


def test_the_signature_says_what_the_graph_takes_and_gives(bench):
    output = bench().export(opset_version=19)
    assert json.loads((output / "signature.json").read_text()) == {
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 3]}],
        "batch_axis": "batch",
        "opset": 19,
        "ir_version": 10,
    }


def test_several_inputs_and_outputs_and_a_dynamic_length_keep_their_names(bench):
    model = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 6)

        def forward(self, mask, tokens):
            h = self.embedding(tokens) * mask.unsqueeze(-1)
            return {"embedding": h.sum(1), "doubled": torch.cat([h, h], 1)}
    """
    data = """
    def rows(count, seed):
        g = np.random.default_rng(seed)
        return [({"tokens": g.integers(1, 50, 7), "mask": np.ones(7, np.float32)}, 0) for _ in range(count)]
    """
    spec = {
        "tokens": {"dtype": "int64", "shape": ["batch", "sequence"]},
        "mask": {"dtype": "float32", "shape": ["batch", "sequence"]},
    }
    shapes = {"batch": {"min": 1, "opt": 2, "max": 4}, "sequence": {"min": 1, "opt": 7, "max": 20}}
    user = """
    class User:
        outputs = ("doubled", "embedding")
        def model(self): return Model()
        def train_data(self): return rows(50, 1)
        def validation_data(self): return rows(23, 2)
        def test_data(self): return rows(21, 3)
        def loss(self, outputs, targets): ...
        def metric(self): return Accuracy()
    """
    output = bench(model=model, data=data, inputs=spec, shapes=shapes, user=user).export()
    found = json.loads((output / "signature.json").read_text())
    assert [(t["name"], t["shape"]) for t in found["inputs"]] == [
        ("tokens", ["batch", "sequence"]),
        ("mask", ["batch", "sequence"]),
    ]
    assert [(t["name"], t["shape"]) for t in found["outputs"]] == [
        ("doubled", ["batch", "2*sequence", 6]),
        ("embedding", ["batch", 6]),
    ]


def test_a_fixed_batch_is_exported_as_such(bench):
    made = bench(inputs={"x": {"dtype": "float32", "shape": [5, 4]}}, shapes={})
    found = json.loads((made.export() / "signature.json").read_text())
    assert found["batch_axis"] is None
    assert found["outputs"][0]["shape"] == [5, 3]


def test_a_range_of_one_size_keeps_its_name(bench):
    made = bench(shapes={"batch": {"min": 1, "opt": 1, "max": 1}})
    assert json.loads((made.export() / "signature.json").read_text())["batch_axis"] == "batch"


def test_the_functions_of_a_subgraph_are_renamed_with_the_rest():
    proto = graph("""
        g (float[batch,4] x) => (float[batch,4] r) {
            c = Constant <value = bool {1}> ()
            y = Exp(x)
            r = If (c) <
                then_branch = t () => (float[batch,4] p) { p = Neg(y) },
                else_branch = e () => (float[batch,4] q) { q = Identity(y) }
            >
        }
    """)
    x = np.ones((2, 4), np.float32)
    before = run(proto, x)[0]
    arrange(proto, AXES, ["y"], ["y"])
    onnx.checker.check_model(proto)
    np.testing.assert_array_equal(run(proto, x)[0], before)
