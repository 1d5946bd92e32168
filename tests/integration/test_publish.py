"""A real Triton server serves what publishing placed, and loads again only what a release changed."""

from __future__ import annotations

import http.client
import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tasks.config import Serve
from tasks.publish import Repository, commit, observe, place_version, plan, release_config
from tasks.toolchain import triton, triton_client
from tasks.toolchain.model_writing import clear_leftovers, commit_config
from tasks.triton_config import Signature, model_config
from tests.waiting import eventually

_spec = spec_from_file_location("publishing", Path(__file__).parent.parent / "unit" / "publishing.py")
publishing = module_from_spec(_spec)
_spec.loader.exec_module(publishing)

MODEL = publishing.MODEL
CONFIG = model_config(
    model=MODEL,
    platform="onnxruntime_onnx",
    signature=Signature.from_json(
        {
            "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 1]}],
            "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 1]}],
        }
    ),
    serve=Serve(max_batch_size=8),
    shapes={},
)


def adding(number: float) -> dict[str, bytes]:
    """The files of a model that adds `number`."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "number"], ["y"])],
        "adding",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1])],
        [helper.make_tensor("number", TensorProto.FLOAT, [1], [number])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return {"model.onnx": model.SerializeToString()}


def place(repository: Repository, files: dict[str, bytes]):
    wanted = publishing.wanted(files, config=CONFIG)
    place_version(plan(observe(repository, MODEL), wanted), publishing.source_of(files))
    return plan(observe(repository, MODEL), wanted)


def ask(server: triton.ServerRecord, version: int | None = None) -> float:
    path = f"/v2/models/{MODEL}" + (f"/versions/{version}" if version else "")
    asked = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [0.5]}]}
    connection = http.client.HTTPConnection(server.host, server.http_port, timeout=30)
    connection.request("POST", f"{path}/infer", json.dumps(asked))
    answer = json.load(connection.getresponse())
    connection.close()
    return answer["outputs"][0]["data"][0]


def answered(server: triton.ServerRecord, version: int, expected: int) -> bool:
    """Whether a version has answered so many requests since it was loaded: loading it again begins at 0.

    A request is counted a moment after it was answered.
    """

    def counted() -> int:
        (found,) = triton_client.statistics(server.address, MODEL, version)
        return int(found["inference_count"])

    return eventually(lambda: counted() == expected, 5)


@pytest.fixture
def repository(tmp_path) -> Repository:
    return Repository(tmp_path / "models")


def test_a_release_moves_the_server_without_loading_again_what_stays(repository, triton_installation, tmp_path):
    folder = repository.folder(MODEL)
    commit(place(repository, adding(1)))
    with triton.staging(
        triton_installation, repository=repository.path, models=[MODEL], folder=tmp_path / "server"
    ) as server:
        assert ask(server) == 1.5
        second = place(repository, adding(2))
        assert ask(server) == 1.5, "a placed version is served to nobody"
        assert answered(server, 1, 2)

        triton_client.load(server.address, MODEL, config_text=second.config_text)
        commit(second)
        assert answered(server, 1, 2), "neither provenance nor staging made the version that stays load again"
        assert (ask(server), ask(server, 1), ask(server, 2)) == (2.5, 1.5, 2.5)

        triton_client.load(server.address, MODEL)
        assert answered(server, 1, 3), "the disk says what the call had said"
        assert answered(server, 2, 2)

        back = release_config(CONFIG, 1, None)
        triton_client.load(server.address, MODEL, config_text=back)
        commit_config(folder, back, replacing=second.config_text)
        assert answered(server, 1, 3), "going back loads nothing"
        assert ask(server) == 1.5


def test_a_leftover_would_make_the_server_load_again_what_stays(repository, triton_installation, tmp_path):
    """Why leftovers go before a load. Should a later Triton be wiser, this test and that haste can go."""
    folder = repository.folder(MODEL)
    commit(place(repository, adding(1)))
    with triton.staging(
        triton_installation, repository=repository.path, models=[MODEL], folder=tmp_path / "server"
    ) as server:
        assert ask(server) == 1.5
        leftover = folder / ".staging-1-00"
        leftover.mkdir()
        config = observe(repository, MODEL).config
        triton_client.load(server.address, MODEL, config_text=config)
        assert answered(server, 1, 0)
        assert ask(server) == 1.5

        leftover.rmdir()
        leftover.mkdir()
        assert clear_leftovers(folder) == (leftover.name,)
        triton_client.load(server.address, MODEL, config_text=config)
        assert answered(server, 1, 1)
