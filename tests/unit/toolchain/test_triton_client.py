"""What the client makes of answers and of their absence; a real server's are in tests/integration."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tasks.errors import ConfigError, NotReady
from tasks.toolchain import triton_client
from tasks.toolchain.processes import find_free_ports
from tasks.toolchain.triton_client import Address, config_json

CONFIG = """
name: "digits"
platform: "onnxruntime_onnx"
max_batch_size: 32
input [{ name: "image" data_type: TYPE_FP32 dims: [1, 8, 8] }]
output [{ name: "logits" data_type: TYPE_FP32 dims: [10] }]
version_policy { specific { versions: [1, 2] } }
dynamic_batching { max_queue_delay_microseconds: 500 }
"""


@pytest.fixture
def stranger() -> Iterator[Address]:
    """Some other web server on the port that was meant to be Triton's."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b"<html>not here</html>")

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Address(host="127.0.0.1", http_port=server.server_port, grpc_port=1)
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_config_becomes_the_json_of_a_load_call() -> None:
    told = json.loads(config_json(CONFIG))
    assert told["max_batch_size"] == 32
    assert told["input"] == [{"name": "image", "data_type": "TYPE_FP32", "dims": ["1", "8", "8"]}]
    assert told["version_policy"] == {"specific": {"versions": ["1", "2"]}}
    assert "maxBatchSize" not in config_json(CONFIG)


def test_a_text_that_is_no_config_is_refused_before_any_server_is_asked() -> None:
    with pytest.raises(ConfigError, match="max_batch_sizes"):
        triton_client.load(
            Address(host="127.0.0.1", http_port=1, grpc_port=1), "digits", config_text="max_batch_sizes: 3"
        )


def test_nobody_there_is_not_ready_and_no_traceback() -> None:
    http_port, grpc_port = find_free_ports(2)
    address = Address(host="127.0.0.1", http_port=http_port, grpc_port=grpc_port)
    assert not triton_client.server_live(address)
    assert not triton_client.server_ready(address)
    assert not triton_client.model_ready(address, "digits")
    with pytest.raises(NotReady, match=f"no Triton server answers at http://127.0.0.1:{http_port}"):
        triton_client.ready_versions(address, "digits")
    with pytest.raises(NotReady, match=f"loading digits on the Triton server at 127.0.0.1:{grpc_port} failed"):
        triton_client.load(address, "digits", timeout=5)


def test_another_web_server_on_the_port_is_told_from_triton(stranger: Address) -> None:
    assert not triton_client.server_live(stranger)
    with pytest.raises(NotReady, match="is no Triton server"):
        triton_client.model_config(stranger, "digits")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Internal: TritonModelException: m: wrong\n\nAt:\n  /x/model.py(67): initialize\n", "Internal: m: wrong"),
        (
            "version 1 is at UNAVAILABLE state: Internal: m: wrong\n\nAt:\n  /x(1): a\n  /x(2): b\n;\n",
            "version 1 is at UNAVAILABLE state: Internal: m: wrong",
        ),
        ("failed to load 'm', no version is available", "failed to load 'm', no version is available"),
    ],
)
def test_the_servers_words_are_told_without_the_backends_places(said: str, told: str) -> None:
    assert triton_client._message(said) == told


def test_reading_imports_neither_tritonclient_nor_numpy_nor_grpc() -> None:
    code = """
import sys
from tasks.toolchain import triton, triton_client
address = triton_client.Address(host="127.0.0.1", http_port=1, grpc_port=1)
assert not triton_client.model_ready(address, "digits", 1)
print([name for name in ("numpy", "tritonclient", "grpc", "google.protobuf", "psutil", "torch") if name in sys.modules])
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
