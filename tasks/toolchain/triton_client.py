"""Questions to a Triton server, and loading: reads over plain HTTP (standard library only), control over gRPC.

Control goes over gRPC because an HTTP load call stalls every HTTP client on its thread for as long as the load takes.
Reads stay clear of tritonclient, grpc and numpy, whose imports would cost a run in which nothing changed more than the
rest of it. The protocol is https://github.com/triton-inference-server/server/tree/main/docs/protocol.
"""

from __future__ import annotations

import http
import http.client
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tasks.errors import NotReady
from tasks.toolchain.command import last_lines
from tasks.toolchain.config_pbtxt import parse
from tasks.toolchain.triton_token import KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens."""

    host: str
    http_port: int
    grpc_port: int
    token: str | None = field(default=None, repr=False, compare=False)
    """What the server wants to see before it loads or lists models, where it is exposed."""

    @property
    def http_url(self) -> str:
        """Such as `http://127.0.0.1:8000`."""
        return f"http://{self.host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """Such as `127.0.0.1:8001`, as tritonclient.grpc wants it."""
        return f"{self.host}:{self.grpc_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """One row of the repository index."""

    name: str
    version: int | None
    """None for a model of which no version was ever loaded."""
    state: str | None
    """`READY`, `LOADING`, `UNLOADING` or `UNAVAILABLE`; None for a model that was never loaded."""
    reason: str | None
    """Why it is unavailable, in the server's words."""


def server_live(address: Address, *, timeout: float = 2.0) -> bool:
    """Whether a server answers at all, also when some model is not ready."""
    return _is_ok(address, "/v2/health/live", timeout)


def server_ready(address: Address, *, timeout: float = 2.0) -> bool:
    """Whether a server answers, and all its loaded models are ready."""
    return _is_ok(address, "/v2/health/ready", timeout)


def model_ready(address: Address, model: str, version: int | None = None, *, timeout: float = 2.0) -> bool:
    """Whether that version (None: any) can be asked."""
    return _is_ok(address, f"{_path(model, version)}/ready", timeout)


def server_metadata(address: Address, *, timeout: float = 5.0) -> dict[str, Any]:
    """`{"name": "triton", "version": "2.51.0", "extensions": […]}`. Raises NotReady, as all that follow."""
    answer: dict[str, Any] = _get(address, "/v2", timeout)
    return answer


def model_metadata(address: Address, model: str, version: int | None = None, *, timeout: float = 5.0) -> dict[str, Any]:
    """`{"name", "versions": ["1"], "platform", "inputs": [{"name", "datatype": "FP32", "shape": [-1, 3]}], "outputs"}`.

    `versions` are all that are ready, also where one is asked for.
    """
    answer: dict[str, Any] = _get(address, _path(model, version), timeout)
    return answer


def model_config(address: Address, model: str, version: int | None = None, *, timeout: float = 5.0) -> dict[str, Any]:
    """The configuration with which that version (None: the highest) was loaded, with the defaults that the server
    filled in, as the JSON of ModelConfig.

    A later load reloads only what must change, so of `version_policy` and `instance_group` it may show a former state:
    ask `ready_versions` which versions serve.
    """
    answer: dict[str, Any] = _get(address, f"{_path(model, version)}/config", timeout)
    return answer


def repository_index(address: Address, *, ready_only: bool = False, timeout: float = 5.0) -> tuple[ModelState, ...]:
    """Every model in the repository. Entries of failed loads stay in it: read the one of the version you asked for."""
    rows = _request(address, "POST", "/v2/repository/index", timeout, {"ready": ready_only})
    return tuple(
        ModelState(
            name=row["name"],
            version=int(row["version"]) if row.get("version") else None,
            state=row.get("state"),
            reason=_message(row["reason"]) if row.get("reason") else None,
        )
        for row in rows
    )


def ready_versions(address: Address, model: str, *, timeout: float = 5.0) -> tuple[int, ...]:
    """The versions of a model that can be asked, ascending; none where none is loaded.

    Raises NotReady where no server answers.
    """
    states = repository_index(address, ready_only=True, timeout=timeout)
    return tuple(sorted(s.version for s in states if s.name == model and s.version is not None and s.state == "READY"))


def statistics(
    address: Address, model: str, version: int | None = None, *, timeout: float = 5.0
) -> list[dict[str, Any]]:
    """Per version: `inference_count` (rows), `execution_count` (batches), `inference_stats`, `batch_stats`…"""
    stats: list[dict[str, Any]] = _get(address, f"{_path(model, version)}/stats", timeout)["model_stats"]
    return stats


def config_json(config_text: str) -> str:
    """A `config.pbtxt`'s text as the JSON that a load call takes. Raises ConfigError where it is no ModelConfig."""
    from google.protobuf import json_format

    return json_format.MessageToJson(parse(config_text), preserving_proto_field_name=True, indent=None)


def load(
    address: Address,
    model: str,
    *,
    config_text: str | None = None,
    log: Path | None = None,
    timeout: float = 120.0,
) -> None:
    """Loads or reloads a model over gRPC; with `config_text` under that configuration, whatever lies on disk.

    Give `config_text` whenever it matters: without it, a server whose files have not changed since its last load does
    nothing, and so keeps what an earlier call gave it. With it, no `config.pbtxt` needs to exist and none is looked at.
    It is not remembered: after a restart the server reads the disk. Of the listed versions the server reloads those
    whose own files have changed; or all, where the configuration differs from the former load's in more than
    `version_policy`, or where a newer entry lies beside them whose name is no number. What is not listed any more
    unloads after this has returned, within seconds. A listed version that does not exist is no error to the server.

    Raises NotReady with the server's own words, and with the end of its `log` where only that holds the reason, or when
    `timeout` (seconds) has passed; then the server may still be loading. After an error it serves what it served
    before (and Triton 2.51 will need its whole `--exit-timeout-secs` to end).
    """
    config = None if config_text is None else config_json(config_text)
    _control(
        address,
        f"loading {model}",
        log,
        lambda client: client.load_model(model, headers=_metadata(address), config=config, client_timeout=timeout),
    )


def unload(address: Address, model: str, *, log: Path | None = None, timeout: float = 60.0) -> None:
    """Unloads every version of a model over gRPC; requests to it fail from then on. Raises NotReady as `load` does."""
    _control(
        address,
        f"unloading {model}",
        log,
        lambda client: client.unload_model(model, headers=_metadata(address), client_timeout=timeout),
    )


def _metadata(address: Address) -> dict[str, str] | None:
    return None if address.token is None else {f"triton-grpc-protocol-{KEY}": address.token}


def _path(model: str, version: int | None) -> str:
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{version}" if version is not None else "")


def _is_ok(address: Address, path: str, timeout: float) -> bool:
    """Whether the answer is 200; False where nobody answers."""
    connection = http.client.HTTPConnection(address.host, address.http_port, timeout=timeout)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _get(address: Address, path: str, timeout: float) -> Any:
    return _request(address, "GET", path, timeout)


def _request(address: Address, method: str, path: str, timeout: float, body: object = None) -> Any:
    connection = http.client.HTTPConnection(address.host, address.http_port, timeout=timeout)
    try:
        headers = {} if address.token is None else {KEY: address.token}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read() or b"null")
    except (OSError, http.client.HTTPException) as error:
        raise NotReady(
            f"no Triton server answers at {address.http_url}: {str(error) or type(error).__name__}"
        ) from error
    except ValueError as error:
        raise NotReady(f"what answers at {address.http_url} is no Triton server: {error}") from error
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        said = answer.get("error") if isinstance(answer, dict) else None
        raise NotReady(f"{address.http_url}{path}: {_message(said or response.reason)}")
    return answer


def _control(address: Address, what: str, log: Path | None, call: Callable[[Any], object]) -> None:
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException

    # A proxy that the environment names would otherwise stand even between us and 127.0.0.1.
    client = grpc.InferenceServerClient(address.grpc_url, channel_args=[("grpc.enable_http_proxy", 0)])
    try:
        call(client)
    except InferenceServerException as error:
        said = _message(error.message() or str(error))
        raise NotReady(
            f"{what} on the Triton server at {address.grpc_url} failed: {said}",
            log=log,
            last_lines=last_lines(log, 3) if log is not None and "failed to poll" in said else (),
            passes="failed to load" not in said and "failed to poll" not in said,
        ) from error
    finally:
        client.close()


def _message(text: str) -> str:
    """The server's words without the place in the backend's code and the exception's name."""
    return re.sub(r"\n*At:\n(?:  [^\n]*\n?)*", "", text).replace("TritonModelException: ", "").strip().removesuffix(";")
