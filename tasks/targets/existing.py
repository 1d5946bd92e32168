"""The deploy target `existing`: Triton servers that somebody else runs, reached by their addresses."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tasks.artifacts.digest import Digest
from tasks.config import DeployConfig, Keyed, Listed, Pipeline, Placement, Port, Settings, Text
from tasks.engines.passport import ServerFacts
from tasks.events import Listener
from tasks.home import Home
from tasks.targets import Replica, load_call
from tasks.targets.process import replica
from tasks.toolchain import triton, triton_client
from tasks.toolchain.triton_client import Address
from tasks.toolchain.triton_token import VARIABLE


class Endpoint(Settings):
    """One running server."""

    host: Placement[Text] = "127.0.0.1"
    """Its address."""
    http_port: Placement[Port] = 8000
    """Its port of HTTP."""
    grpc_port: Placement[Port] = 8001
    """Its port of gRPC."""


class ExistingConfig(DeployConfig):
    """Triton servers that run already. They must read the model repository that `publish` writes, and run in explicit
    model-control mode with `--load-model` for what they shall serve after a restart."""

    kind: Keyed[Literal["existing"]]
    """Servers that run already."""
    endpoints: Placement[Annotated[Listed[Endpoint], Field(min_length=1)]]
    """Where they are. A release moves them in this order."""
    ready_timeout_seconds: Placement[Annotated[float, Field(gt=0)]] = 120.0
    """How long the staging server may take until it answers."""


class ExistingTarget:
    """Servers that are moved, and neither started nor stopped."""

    Config: ClassVar[type[DeployConfig]] = ExistingConfig

    def __init__(self, pipeline: Pipeline, home: Home) -> None:
        del home
        assert isinstance(pipeline.deploy, ExistingConfig)
        self._config: ExistingConfig = pipeline.deploy

    @property
    def size(self) -> int:
        """As many as the pipeline file lists."""
        return len(self._config.endpoints)

    @property
    def reads_repository(self) -> bool:
        """They do."""
        return True

    def check(self) -> None:
        """Raise `ToolMissing` when there is no Triton for staging on this machine."""
        triton.find_installation()

    def facts(self) -> ServerFacts:
        """Return the version that the first one tells; which GPUs they have is not known here."""
        found = self.observe()
        version = str(triton_client.server_metadata(found[0].address)["version"]) if found else "unknown"
        return ServerFacts.of(
            "the Triton servers of `deploy.endpoints`", server_version=version, compute_capabilities=[]
        )

    def observe(self) -> Sequence[Replica]:
        """Return those that answer."""
        return tuple(r for r in self._replicas() if triton_client.server_live(r.address))

    def plan(self) -> Sequence[str]:
        """Nothing: they are not ours to start."""
        return ()

    def ensure(self, models: Sequence[str], listener: Listener) -> Sequence[Replica]:
        """Return all of them; whether they answer is asked before the first is moved."""
        del models, listener
        return self._replicas()

    def move(self, replica: Replica, model: str, config: str | None, *, timeout: float) -> None:
        """By a load call."""
        load_call(replica, model, config, timeout=timeout)

    @contextmanager
    def staging(self, repository: Path, model: str, folder: Path) -> Iterator[Replica]:
        """Run this machine's Triton on free ports: the nearest to theirs that there is here."""
        with triton.staging(
            triton.find_installation(),
            repository=repository,
            models=[model],
            folder=folder,
            timeout=self._config.ready_timeout_seconds,
        ) as record:
            yield replica(record)

    def clear_leftovers(self) -> Sequence[str]:
        """Nothing: a staging process ends with its maker, and the next one tidies up."""
        return ()

    def forget(self, model: str, versions: Mapping[int, Digest]) -> Sequence[str]:  # noqa: ARG002  # as every target's
        """Nothing: the model repository is all there is."""
        return ()

    def stop(self) -> Sequence[Replica]:
        """They are not ours to end."""
        return ()

    def _replicas(self) -> Sequence[Replica]:
        return tuple(
            Replica(
                name=f"{endpoint.host}-{endpoint.http_port}",
                address=Address(
                    host=endpoint.host,
                    http_port=endpoint.http_port,
                    grpc_port=endpoint.grpc_port,
                    token=os.environ.get(VARIABLE),
                ),
                log=None,
            )
            for endpoint in self._config.endpoints
        )
