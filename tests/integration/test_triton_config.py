"""A real Triton server judges the configs that we write, and those that we refuse.

Without a GPU no backend can load a `tensorrt_plan`, so here no backend loads anything: the server validates a config
before it looks for the backend, and says of a valid one that the backend is missing, of an invalid one that polling
the repository failed. That is as far as such a config can be proven without TensorRT.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tasks.errors import NotReady
from tasks.toolchain import triton, triton_client
from tasks.toolchain.config_pbtxt import check, listed_versions, parse

GOLDEN = Path(__file__).parent.parent / "golden" / "triton_config"
VALID = r"unable to find backend library for backend '{}'"
INVALID = "failed to poll from model repository"
BACKENDS = {"onnxruntime_onnx": "onnxruntime", "tensorrt_plan": "tensorrt"}

BASE = (
    'name: "NAME"\nplatform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
    'input { name: "x" data_type: TYPE_FP32 dims: [4] }\noutput { name: "y" data_type: TYPE_FP32 dims: [2] }\n'
)
INVALID_CONFIGS = {
    "axis_of_no_size": BASE.replace("dims: [4]", "dims: [0]"),
    "no_dims": BASE.replace(" dims: [4]", ""),
    "no_type": BASE.replace("data_type: TYPE_FP32 dims: [4]", "dims: [4]"),
    "no_name": BASE.replace('name: "x" ', ""),
    "misspelt_field": BASE + "dynamic_batchin { }\n",
    "misspelt_type": BASE.replace("TYPE_FP32 dims: [4]", "TYPE_FP23 dims: [4]"),
    "two_schedulers": BASE + "dynamic_batching { }\nsequence_batching { }\n",
    "byte_order_mark": "\ufeff" + BASE,
    "negative_batch": BASE.replace("max_batch_size: 8", "max_batch_size: -8"),
    "reshape_to_nothing_without_batches": BASE.replace("max_batch_size: 8", "max_batch_size: 0").replace(
        "dims: [4] }", "dims: [1] reshape { } }"
    ),
    "preferred_batch_above_the_largest": BASE + "dynamic_batching { preferred_batch_size: [16] }\n",
}


@pytest.fixture(scope="module")
def judge(triton_installation, tmp_path_factory) -> Iterator[triton.ServerRecord]:
    """A server without backends over a repository of every config."""
    folder = tmp_path_factory.mktemp("judge")
    backends = folder / "no_backends"
    backends.mkdir()
    configs = {path.stem: path.read_text() for path in GOLDEN.glob("*.pbtxt")}
    configs |= {name: text.replace("NAME", name) for name, text in INVALID_CONFIGS.items()}
    assert len(configs) > 20
    for name, text in configs.items():
        for version in (listed_versions(text) if name in GOLDENS else None) or (1,):
            (folder / "models" / name / str(version)).mkdir(parents=True)
        (folder / "models" / name / "config.pbtxt").write_text(text)
    blind = replace(triton_installation, arguments=(f"--backend-directory={backends}",))
    with triton.staging(blind, repository=folder / "models", folder=folder / "server") as server:
        yield server


GOLDENS = sorted(path.stem for path in GOLDEN.glob("*.pbtxt"))


@pytest.mark.parametrize("name", GOLDENS)
def test_the_server_accepts_what_we_write_as_far_as_it_goes_without_a_backend(judge, name):
    platform = parse((GOLDEN / f"{name}.pbtxt").read_text()).platform
    with pytest.raises(NotReady, match=VALID.format(BACKENDS[platform])):
        triton_client.load(judge.address, name)


@pytest.mark.parametrize("name", GOLDENS)
def test_the_server_accepts_it_in_the_load_call_too(judge, name):
    text = (GOLDEN / f"{name}.pbtxt").read_text()
    with pytest.raises(NotReady, match=VALID.format(BACKENDS[parse(text).platform])):
        triton_client.load(judge.address, name, config_text=text)


@pytest.mark.parametrize("name", INVALID_CONFIGS)
def test_what_the_server_refuses_our_check_refuses_before(judge, name):
    with pytest.raises(NotReady, match=INVALID):
        triton_client.load(judge.address, name)
    assert check(INVALID_CONFIGS[name]) != []


def test_a_scalar_of_each_row_is_served_with_an_axis_of_one(triton_installation, tmp_path):
    """The golden config `reshape`, and a graph of that signature: the axis of one goes, and comes back."""
    graph = helper.make_graph(
        [
            helper.make_node("Identity", ["temperature"], ["score"]),
            helper.make_node("Unsqueeze", ["temperature", "one"], ["column"]),
            helper.make_node("MatMul", ["column", "row"], ["logits"]),
        ],
        "scalars",
        [helper.make_tensor_value_info("temperature", TensorProto.FLOAT, ["batch"])],
        [
            helper.make_tensor_value_info("score", TensorProto.FLOAT, ["batch"]),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10]),
        ],
        [
            helper.make_tensor("one", TensorProto.INT64, [1], [1]),
            helper.make_tensor("row", TensorProto.FLOAT, [1, 10], [float(n) for n in range(10)]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    version = tmp_path / "models" / "reshape" / "1"
    version.mkdir(parents=True)
    onnx.save(model, version / "model.onnx")
    (version.parent / "config.pbtxt").write_text((GOLDEN / "reshape.pbtxt").read_text())
    with triton.staging(
        triton_installation, repository=tmp_path / "models", models=["reshape"], folder=tmp_path / "server"
    ) as server:
        asked = [{"name": "temperature", "shape": [2, 1], "datatype": "FP32", "data": [0.5, -2.0]}]
        connection = http.client.HTTPConnection(server.host, server.http_port, timeout=30)
        connection.request("POST", "/v2/models/reshape/infer", json.dumps({"inputs": asked}))
        answer = json.load(connection.getresponse())
        connection.close()
    outputs = {output["name"]: (output["shape"], output["data"]) for output in answer["outputs"]}
    assert outputs["score"] == ([2, 1], [0.5, -2.0])
    assert outputs["logits"] == ([2, 10], [0.5 * n for n in range(10)] + [-2.0 * n for n in range(10)])
