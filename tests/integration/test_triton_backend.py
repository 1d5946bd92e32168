"""The CPU stand-in of Triton's onnxruntime backend, asked through a real server: layout, types, batches, refusals."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from tasks.errors import NotReady
from tasks.toolchain import triton, triton_client
from tasks.toolchain.processes import start_time
from tasks.toolchain.triton import ServerRecord, TritonInstallation
from tests.waiting import eventually

DTYPES = {
    "BOOL": (TensorProto.BOOL, np.array([[True, False], [False, True]])),
    "UINT8": (TensorProto.UINT8, np.array([[0, 255]], np.uint8)),
    "UINT16": (TensorProto.UINT16, np.array([[0, 65535]], np.uint16)),
    "UINT32": (TensorProto.UINT32, np.array([[0, 2**32 - 1]], np.uint32)),
    "UINT64": (TensorProto.UINT64, np.array([[0, 2**64 - 1]], np.uint64)),
    "INT8": (TensorProto.INT8, np.array([[-128, 127]], np.int8)),
    "INT16": (TensorProto.INT16, np.array([[-(2**15), 2**15 - 1]], np.int16)),
    "INT32": (TensorProto.INT32, np.array([[-(2**31), 2**31 - 1]], np.int32)),
    "INT64": (TensorProto.INT64, np.array([[-(2**63), 2**63 - 1]], np.int64)),
    "FP16": (TensorProto.FLOAT16, np.array([[0.1, -65504]], np.float16)),
    "FP32": (TensorProto.FLOAT, np.array([[0.1, np.inf], [np.nan, -0.0]], np.float32)),
    "FP64": (TensorProto.DOUBLE, np.array([[0.1, 1e308]], np.float64)),
    "BYTES": (TensorProto.STRING, np.array([[b"", "größer".encode()], [b"a\x00b", b"x" * 5000]], np.object_)),
}
"""Triton's name, ONNX's type, and values that a mistake in the conversion would change."""


@dataclass(frozen=True, kw_only=True)
class Io:
    """One input or output of a test's model: the axes of the graph, and what the config says of it."""

    name: str
    axes: Sequence[int | str]
    dims: Sequence[int]
    onnx_type: int = TensorProto.FLOAT
    data_type: str = "TYPE_FP32"
    more: str = ""

    def graph(self) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(self.name, self.onnx_type, self.axes)

    def config(self) -> str:
        return f'{{ name: "{self.name}" data_type: {self.data_type} dims: {list(self.dims)} {self.more} }}'


def add_model(
    repository: Path,
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Io],
    outputs: Sequence[Io],
    *,
    max_batch_size: int = 8,
    constants: Mapping[str, np.ndarray] | None = None,
    config: str = "",
    external: bool = False,
) -> str:
    graph = helper.make_graph(
        nodes,
        name,
        [io.graph() for io in inputs],
        [io.graph() for io in outputs],
        [onnx.numpy_helper.from_array(value, key) for key, value in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    onnx.save(
        model, folder / "model.onnx", save_as_external_data=external, location="model.onnx.data", size_threshold=0
    )
    text = (
        f'name: "{name}"\nplatform: "onnxruntime_onnx"\nmax_batch_size: {max_batch_size}\n'
        f"input [{', '.join(io.config() for io in inputs)}]\n"
        f"output [{', '.join(io.config() for io in outputs)}]\n{config}"
    )
    (repository / name / "config.pbtxt").write_text(text)
    return text


def identity(kind: str, onnx_type: int) -> tuple[onnx.NodeProto, Io, Io]:
    data_type = "TYPE_STRING" if kind == "BYTES" else f"TYPE_{kind}"
    return (
        helper.make_node("Identity", [f"in_{kind}"], [f"out_{kind}"]),
        Io(name=f"in_{kind}", axes=["batch", "width"], dims=[-1], onnx_type=onnx_type, data_type=data_type),
        Io(name=f"out_{kind}", axes=["batch", "width"], dims=[-1], onnx_type=onnx_type, data_type=data_type),
    )


EXTERNAL = "model.onnx.data"
DELAY = "dynamic_batching { max_queue_delay_microseconds: 100000 }\n"


def build(repository: Path) -> None:
    for kind, (onnx_type, _) in DTYPES.items():
        node, given, answered = identity(kind, onnx_type)
        add_model(repository, f"same_{kind.lower()}", [node], [given], [answered])
    # Two named inputs of variable length and two outputs, as a small transformer has them.
    tokens = Io(name="tokens", axes=["batch", "length"], dims=[-1], onnx_type=TensorProto.INT64, data_type="TYPE_INT64")
    mask = Io(name="mask", axes=["batch", "length"], dims=[-1])
    add_model(
        repository,
        "text",
        [
            helper.make_node("Gather", ["table", "tokens"], ["each"], axis=0),
            helper.make_node("Mul", ["each", "mask"], ["kept"]),
            helper.make_node("ReduceSum", ["kept", "last"], ["sum"], keepdims=1),
        ],
        [tokens, mask],
        [Io(name="sum", axes=["batch", 1], dims=[1]), Io(name="kept", axes=["batch", "length"], dims=[-1])],
        constants={"table": np.arange(10, dtype=np.float32) * 10, "last": np.array([1], np.int64)},
        config=DELAY,
    )
    add_model(
        repository,
        "unbatched",
        [helper.make_node("Transpose", ["x"], ["y"])],
        [Io(name="x", axes=["rows", 3], dims=[-1, 3])],
        [Io(name="y", axes=[3, "rows"], dims=[3, -1])],
        max_batch_size=0,
    )
    # One number per row: Triton knows no empty dims, so its config says [1] and reshapes to none.
    scalar = "reshape { shape: [] }"
    add_model(
        repository,
        "scalar",
        [helper.make_node("Mul", ["x", "two"], ["y"])],
        [Io(name="x", axes=["batch"], dims=[1], more=scalar)],
        [Io(name="y", axes=["batch"], dims=[1], more=scalar)],
        constants={"two": np.array(2, np.float32)},
        config=DELAY,
    )
    add_model(
        repository,
        "external",
        [helper.make_node("MatMul", ["x", "weights"], ["y"])],
        [Io(name="x", axes=["batch", 4], dims=[4])],
        [Io(name="y", axes=["batch", 2], dims=[2])],
        constants={"weights": np.arange(8, dtype=np.float32).reshape(4, 2)},
        external=True,
        config="instance_group [{ kind: KIND_CPU count: 2 }]\n"
        'parameters { key: "intra_op_thread_count" value { string_value: "3" } }\n',
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, triton_installation: TritonInstallation) -> Iterator[ServerRecord]:
    root = tmp_path_factory.mktemp("backend")
    build(root / "repository")
    models = sorted(path.name for path in (root / "repository").iterdir())
    with triton.staging(
        triton_installation, repository=root / "repository", models=models, folder=root / "serve"
    ) as server:
        yield server


@pytest.fixture
def ask(server: ServerRecord) -> Iterator[Any]:
    """Asks a model; answers by output name."""
    client = grpc.InferenceServerClient(server.address.grpc_url)

    def ask(model: str, outputs: Sequence[str] = (), **inputs: np.ndarray) -> dict[str, np.ndarray]:
        given = []
        for name, array in inputs.items():
            kind = "BYTES" if array.dtype == np.object_ else _kind(array)
            given.append(grpc.InferInput(name, list(array.shape), kind))
            given[-1].set_data_from_numpy(array)
        result = client.infer(
            model, given, outputs=[grpc.InferRequestedOutput(name) for name in outputs] or None, client_timeout=60
        )
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}

    yield ask
    client.close()


def _kind(array: np.ndarray) -> str:
    from tritonclient.utils import np_to_triton_dtype

    return str(np_to_triton_dtype(array.dtype))


@pytest.mark.parametrize("kind", DTYPES)
def test_every_type_comes_back_as_it_was_sent(ask: Any, kind: str) -> None:
    _, array = DTYPES[kind]
    answer = ask(f"same_{kind.lower()}", **{f"in_{kind}": array})[f"out_{kind}"]
    assert answer.dtype == array.dtype
    assert answer.shape == array.shape
    assert answer.tolist() == array.tolist() if kind == "BYTES" else answer.tobytes() == array.tobytes()


def test_text_that_is_not_utf8_is_refused_and_named(ask: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"input 'in_BYTES' holds bytes that are not UTF-8"):
        ask("same_bytes", in_BYTES=np.array([[b"\xff"]], np.object_))


def test_requests_of_different_sizes_share_a_batch_and_each_gets_its_own_rows(ask: Any, server: ServerRecord) -> None:
    before = executions(server, "text")

    def one(index: int) -> None:
        rows, length = 1 + index % 3, 4
        tokens = np.full((rows, length), index % 10, np.int64)
        mask = np.arange(rows * length, dtype=np.float32).reshape(rows, length) + index
        answer = ask("text", tokens=tokens, mask=mask)
        assert set(answer) == {"sum", "kept"}
        expected = mask * (index % 10) * 10
        np.testing.assert_array_equal(answer["kept"], expected)
        np.testing.assert_allclose(answer["sum"], expected.sum(axis=1, keepdims=True))

    together(one, 24)
    # A request is counted a moment after it was answered.
    assert eventually(lambda: executions(server, "text")[0] - before[0] == 48, 5)
    batches = executions(server, "text")[1] - before[1]
    assert batches < 24, "nothing was batched, so the test shows nothing"


def test_requests_of_different_lengths_are_answered_each_in_its_length(ask: Any) -> None:
    def one(index: int) -> None:
        rows, length = 1 + index % 2, 1 + index % 5
        answer = ask(
            "text", tokens=np.full((rows, length), index % 10, np.int64), mask=np.ones((rows, length), np.float32)
        )
        assert answer["kept"].shape == (rows, length)
        assert (answer["sum"] == index % 10 * 10 * length).all()

    together(one, 20)


def test_a_request_that_the_model_cannot_answer_fails_alone(ask: Any) -> None:
    refused = []

    def one(index: int) -> None:
        token = 99 if index % 4 == 0 else index % 10
        given = {"tokens": np.full((1, 3), token, np.int64), "mask": np.ones((1, 3), np.float32)}
        if token == 99:
            with pytest.raises(InferenceServerException, match=r"text: .*(indices|out of)"):
                ask("text", **given)
            refused.append(index)
        else:
            assert ask("text", **given)["sum"] == token * 30

    together(one, 16)
    assert len(refused) == 4


def together(one: Any, count: int) -> None:
    """Calls `one(index)` from as many threads, all at once, so that the server has something to batch."""
    gate = threading.Barrier(count)

    def call(index: int) -> None:
        gate.wait(timeout=30)
        one(index)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(call, index) for index in range(count)]:
            done.result(timeout=60)


def executions(server: ServerRecord, model: str) -> tuple[int, int]:
    (stats,) = triton_client.statistics(server.address, model, 1)
    return stats["inference_count"], stats["execution_count"]


def test_only_the_outputs_that_were_asked_for_are_answered(ask: Any) -> None:
    given = {"tokens": np.ones((2, 3), np.int64), "mask": np.ones((2, 3), np.float32)}
    assert set(ask("text", ["sum"], **given)) == {"sum"}


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        ("external", {"x": np.zeros((2, 5), np.float32)}, "unexpected shape for input 'x'"),
        ("external", {"x": np.zeros((2, 4), np.float64)}, "data-type"),
        ("external", {"x": np.zeros((9, 4), np.float32)}, "batch-size must be <= 8"),
        ("external", {"wrong": np.zeros((2, 4), np.float32)}, "unexpected inference input 'wrong'"),
        ("text", {"tokens": np.zeros((2, 4), np.int64)}, "expected 2 inputs but got 1"),
        (
            "text",
            {"tokens": np.zeros((2, 4), np.int64), "mask": np.zeros((2, 3), np.float32)},
            "text: .*",
        ),
        (
            "text",
            {"tokens": np.zeros((2, 4), np.int64), "mask": np.zeros((3, 4), np.float32)},
            "batch size",
        ),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong_and_the_model_goes_on(
    ask: Any, model: str, inputs: dict[str, np.ndarray], reason: str
) -> None:
    with pytest.raises(InferenceServerException, match=reason):
        ask(model, **inputs)
    assert ask("external", x=np.ones((1, 4), np.float32))["y"].tolist() == [[12.0, 16.0]]


def test_a_model_without_batches_takes_its_shapes_as_they_are(ask: Any) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(ask("unbatched", x=array)["y"], array.T)


def test_one_number_per_row_is_reshaped_both_ways(ask: Any) -> None:
    def one(index: int) -> None:
        array = np.arange(1 + index % 3, dtype=np.float32).reshape(-1, 1) + index
        np.testing.assert_array_equal(ask("scalar", x=array)["y"], array * 2)

    together(one, 6)


def test_external_weights_are_found_and_each_instance_has_a_process_and_its_threads(
    ask: Any, server: ServerRecord
) -> None:
    assert (server.repository / "external" / "1" / EXTERNAL).stat().st_size == 32
    assert ask("external", x=np.eye(4, dtype=np.float32))["y"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(stubs(server, "external")) == 2
    # Two threads beside the one that asks; the stub's own are the same everywhere.
    others = [threads(pid) for pid in stubs(server, "scalar")]
    assert [threads(pid) for pid in stubs(server, "external")] == [others[0] + 2] * 2


def stubs(server: ServerRecord, model: str) -> list[int]:
    path = f"{server.repository}/{model}/1/model.onnx"
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if folder.name.isdecimal() and path in (folder / "cmdline").read_text(errors="replace"):
                found.append(int(folder.name))
    return [pid for pid in found if start_time(pid) is not None]


def threads(pid: int) -> int:
    return len(list(Path("/proc", str(pid), "task").iterdir()))


GOOD = {
    "input": '{ name: "x" data_type: TYPE_FP32 dims: [4] }',
    "output": '{ name: "y" data_type: TYPE_FP32 dims: [2] }',
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"input": '{ name: "z" data_type: TYPE_FP32 dims: [4] }'},
            r"input 'z' is not in the model, which has \['x'\]",
        ),
        ({"output": '{ name: "z" data_type: TYPE_FP32 dims: [2] }'}, "output 'z' is not in the model"),
        ({"input": '{ name: "x" data_type: TYPE_FP64 dims: [4] }'}, r"TYPE_FP64 in the configuration, tensor\(float\)"),
        ({"input": '{ name: "x" data_type: TYPE_BF16 dims: [4] }'}, "TYPE_BF16 in the configuration"),
        ({"input": '{ name: "x" data_type: TYPE_FP32 dims: [5] }'}, r"\[-1, 5\] by the configuration.*\[-1, 4\] in"),
        ({"input": '{ name: "x" data_type: TYPE_FP32 dims: [-1] }'}, r"\[-1, -1\] by the configuration"),
        ({"input": '{ name: "x" data_type: TYPE_FP32 dims: [1, 4] }'}, r"\[-1, 1, 4\] by the configuration"),
        ({"more": "instance_group [{ kind: KIND_GPU }]"}, "GPU"),
        ({"more": 'default_model_filename: "other.onnx"'}, r"unable to find '.*other\.onnx'"),
        ({"more": "model_transaction_policy { decoupled: true }"}, "does not support decoupled answers"),
        (
            {"input": '{ name: "x" data_type: TYPE_FP32 dims: [4] allow_ragged_batch: true }'},
            "does not support allow_ragged_batch",
        ),
    ],
)
def test_a_config_that_does_not_fit_the_model_is_refused_when_it_is_loaded(
    server: ServerRecord, changes: dict[str, str], reason: str
) -> None:
    parts = GOOD | {"more": ""} | changes
    config = (
        f'name: "external"\nplatform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
        f"input [{parts['input']}]\noutput [{parts['output']}]\n{parts['more']}\n"
    )
    with pytest.raises(NotReady, match=reason):
        triton_client.load(server.address, "external", config_text=config, log=server.log)
    assert triton_client.ready_versions(server.address, "external") == (1,)


def test_a_model_with_a_fixed_batch_is_refused_under_a_batching_config(server: ServerRecord) -> None:
    config = add_model(
        server.repository,
        "fixed",
        [helper.make_node("Identity", ["x"], ["y"])],
        [Io(name="x", axes=[1, 4], dims=[4])],
        [Io(name="y", axes=[1, 4], dims=[4])],
    )
    with pytest.raises(NotReady, match=r"\[-1, 4\] by the configuration \(the first one is the batch\), \[1, 4\] in"):
        triton_client.load(server.address, "fixed", config_text=config)
