"""Steady traffic to servers of the lab's model, in a process of its own; every request is noted.

    traffic.py '{"http": ["http://127.0.0.1:8000"], "grpc": ["127.0.0.1:8001"], "pause": 0.01, "out": "answers.json"}'

For each server four clients: HTTP and gRPC, each once without a version and once pinned to one. Commands on stdin, a
line each: `pin 3` (answered by `pinned` when no pinned request of before is under way any more), `stop`. Then `out`
holds a list of [start, seconds, kind, asked version or 0, answered version, answered number, error or null].
`start` is CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import numpy as np

MODEL = "adding"
Ask = Callable[[int], tuple[int, float]]
"""Asks that version (0: none); the version that answered, and the number that it added."""


def over_http(url: str) -> Ask:
    address = urlsplit(url)
    connection: list[http.client.HTTPConnection] = []

    def ask(version: int) -> tuple[int, float]:
        if not connection:
            connection.append(http.client.HTTPConnection(address.hostname or "", address.port, timeout=10))
        path = f"/v2/models/{MODEL}" + (f"/versions/{version}" if version else "") + "/infer"
        body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [0.5]}]}
        try:
            connection[0].request("POST", path, json.dumps(body))
            response = connection[0].getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException):
            connection.pop().close()
            raise
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{response.status}: {answer}")
        return int(answer["model_version"]), answer["outputs"][0]["data"][0] - 0.5

    return ask


def over_grpc(url: str) -> Ask:
    from tritonclient import grpc

    client = grpc.InferenceServerClient(url, channel_args=[("grpc.enable_http_proxy", 0)])
    tensor = grpc.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.full((1, 1), 0.5, dtype=np.float32))

    def ask(version: int) -> tuple[int, float]:
        got = client.infer(MODEL, [tensor], model_version=str(version) if version else "", client_timeout=10)
        return int(got.get_response().model_version), float(got.as_numpy("y")[0, 0]) - 0.5

    return ask


class Traffic:
    """The clients, each on a thread."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.pause = order["pause"]
        self.pin = 0
        self.stopped = threading.Event()
        self.answers: list[list[Any]] = []
        self.using: dict[str, int] = {}
        self.threads = []
        for kind, make in (("http", over_http), ("grpc", over_grpc)):
            for number, url in enumerate(order[kind]):
                for pinned in (False, True):
                    name = f"{kind} {number} {'pinned' if pinned else 'unversioned'}"
                    thread = threading.Thread(target=self.drive, args=(name, kind, make(url), pinned), daemon=True)
                    self.threads.append(thread)

    def drive(self, name: str, kind: str, ask: Ask, pinned: bool) -> None:
        while not self.stopped.is_set():
            version = self.pin if pinned else 0
            if pinned:
                self.using[name] = version
                if not version:
                    time.sleep(0.01)
                    continue
            began, error, answered, number = time.monotonic(), None, 0, 0.0
            try:
                answered, number = ask(version)
            except Exception as failure:  # noqa: BLE001 - whatever it is, it is a request that was not answered
                error = f"{type(failure).__name__}: {failure}"
            self.answers.append([began, time.monotonic() - began, kind, version, answered, number, error])
            time.sleep(self.pause)

    def repin(self, version: int) -> None:
        self.pin = version
        while set(self.using.values()) != {version}:
            time.sleep(0.002)


def main() -> None:
    order = json.loads(sys.argv[1])
    traffic = Traffic(order)
    for thread in traffic.threads:
        thread.start()
    for line in sys.stdin:
        word, _, value = line.strip().partition(" ")
        if word == "stop":
            break
        traffic.repin(int(value))
        print("pinned", flush=True)
    traffic.stopped.set()
    for thread in traffic.threads:
        thread.join(15)
    with open(order["out"], "w") as file:
        json.dump(traffic.answers, file)


if __name__ == "__main__":
    main()
