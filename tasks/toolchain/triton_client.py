"""Questions to a Triton server, and loading: reads over plain HTTP (standard library only), control over gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens."""

    host: str
    http_port: int
    grpc_port: int

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
    version: str | None
    """None for a model of which no version was loaded."""
    state: str | None
    """`READY`, `LOADING`, `UNLOADING`, `UNAVAILABLE`; None for a model that was never loaded."""
    reason: str | None
    """Why it is unavailable, in the server's words."""


def server_live(address: Address, *, timeout: float = 2.0) -> bool:
    """Whether a server answers at all (also when some model is not ready). False on a refused or reset connection."""
    raise NotImplementedError


def server_ready(address: Address, *, timeout: float = 2.0) -> bool:
    """Whether the server and all its loaded models are ready. False on a refused or reset connection."""
    raise NotImplementedError


def model_ready(address: Address, model: str, version: int | None = None, *, timeout: float = 2.0) -> bool:
    """Whether that version (None: any) can be asked. False on a refused or reset connection."""
    raise NotImplementedError


def server_metadata(address: Address, *, timeout: float = 5.0) -> dict[str, Any]:
    """`{"name": "triton", "version": "2.51.0", "extensions": […]}`."""
    raise NotImplementedError


def model_metadata(address: Address, model: str, version: int | None = None, *, timeout: float = 5.0) -> dict[str, Any]:
    """`{"name", "versions": ["1"], "platform", "inputs": [{"name", "datatype": "FP32", "shape": [-1, …]}], "outputs"}`."""
    raise NotImplementedError


def model_config(address: Address, model: str, version: int | None = None, *, timeout: float = 5.0) -> dict[str, Any]:
    """The configuration in force, as the server's JSON of ModelConfig (with the defaults it filled in)."""
    raise NotImplementedError


def repository_index(address: Address, *, ready_only: bool = False, timeout: float = 5.0) -> tuple[ModelState, ...]:
    """Every model in the repository. Entries of failed loads stay in it: read the one of the version you asked for."""
    raise NotImplementedError


def ready_versions(address: Address, model: str, *, timeout: float = 5.0) -> tuple[int, ...]:
    """The versions of a model that are ready, ascending; none where nothing of it is loaded or no server answers."""
    raise NotImplementedError


def statistics(address: Address, model: str, version: int | None = None, *, timeout: float = 5.0) -> list[dict[str, Any]]:
    """Per version: `inference_count`, `execution_count`, `inference_stats`, `batch_stats`…"""
    raise NotImplementedError


def config_json(config_text: str) -> str:
    """A `config.pbtxt`'s text as the JSON that a load call takes. Raises ConfigError where the text is no ModelConfig."""
    raise NotImplementedError


def load(
    address: Address,
    model: str,
    *,
    config_text: str | None = None,
    files: Mapping[str, bytes] | None = None,
    timeout: float = 120.0,
) -> None:
    """Loads or reloads a model over gRPC, with a configuration other than the one on disk if `config_text` is given.

    Raises NotReady with the server's own words, or when `timeout` (seconds) passes.
    """
    raise NotImplementedError


def unload(address: Address, model: str, *, timeout: float = 60.0) -> None:
    """Unloads every version of a model over gRPC; requests to it fail from then on. Raises NotReady."""
    raise NotImplementedError
