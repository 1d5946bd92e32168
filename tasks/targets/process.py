"""The deploy target `process`: a Triton server on this machine, which outlives the command that starts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tasks.artifacts.digest import Digest, digest_of
from tasks.config import DeployConfig, Keyed, Pipeline, Placement, Port, Text
from tasks.engines.passport import ServerFacts
from tasks.errors import NotReady
from tasks.events import Listener
from tasks.home import Home
from tasks.targets import Replica, load_call
from tasks.toolchain import probe, triton
from tasks.toolchain.command import last_lines
from tasks.toolchain.triton import ServerRecord


class ProcessConfig(DeployConfig):
    """A Triton server on this machine, which outlives the command that starts it."""

    kind: Keyed[Literal["process"]] = "process"
    """A process on this machine."""
    host: Placement[Text] = "127.0.0.1"
    """The address that the server listens on. Anything but the loopback address exposes it to the network."""
    http_port: Placement[Port | None] = None
    """The port of HTTP; a free one if left out."""
    grpc_port: Placement[Port | None] = None
    """The port of gRPC; a free one if left out."""
    metrics_port: Placement[Port | None] = None
    """The port of the metrics; a free one if left out."""
    ready_timeout_seconds: Placement[Annotated[float, Field(gt=0)]] = 120.0
    """How long the server may take until it answers."""


class ProcessTarget:
    """One server per model repository: pipelines that publish into the same repository share it."""

    Config: ClassVar[type[DeployConfig]] = ProcessConfig

    def __init__(self, pipeline: Pipeline, home: Home) -> None:
        assert isinstance(pipeline.deploy, ProcessConfig)
        self._config: ProcessConfig = pipeline.deploy
        self._repository = pipeline.repository.resolve()
        self._folder = home.serve
        self._name = server_name(self._repository)

    @property
    def size(self) -> int:
        """One for each repository."""
        return 1

    @property
    def reads_repository(self) -> bool:
        """They do."""
        return True

    def check(self) -> None:
        """Raise `ToolMissing` when there is no Triton server that could be started."""
        triton.find_installation()

    def facts(self) -> ServerFacts:
        """Return the TensorRT of the Triton that would be started, by its version, and this machine's GPUs."""
        installation = triton.find_installation()
        return ServerFacts.of(
            "the Triton server on this machine",
            server_version=installation.version,
            compute_capabilities=[gpu.compute_capability for gpu in probe.gpus()],
            has_tensorrt=False if installation.backends == "cpu stand-in" else None,
        )

    def observe(self) -> Sequence[Replica]:
        """Return the recorded server, if it lives."""
        record = self._record()
        return () if record is None else (replica(record),)

    def plan(self) -> Sequence[str]:
        """That the server would be started, unless it runs."""
        return () if self._record() else (f"start a Triton server of {self._repository} at {self._config.host}",)

    def ensure(self, models: Sequence[str], listener: Listener) -> Sequence[Replica]:
        """Start the server unless it runs, and wait until it is ready."""
        record = self._record()
        if record is None:
            record = triton.start(
                triton.find_installation(),
                repository=self._repository,
                models=models,
                folder=self._folder,
                name=self._name,
                host=self._config.host,
                http_port=self._config.http_port,
                grpc_port=self._config.grpc_port,
                metrics_port=self._config.metrics_port,
            )
            listener({"type": "note", "text": f"started a Triton server at {record.address.http_url}"})
            try:
                triton.wait_ready(record, timeout=self._config.ready_timeout_seconds)
            except NotReady:
                triton.stop(record)  # ours, and of no use: leave nothing behind that nobody asked for
                raise
        elif not triton.server_is_live(record, timeout=self._config.ready_timeout_seconds):
            raise NotReady(
                f"the Triton server of {self._repository} (pid {record.pid}) runs but does not answer at "
                f"{record.address.http_url}\nend it with `enginehouse serve stop` and run again",
                log=record.log,
                last_lines=last_lines(record.log),
            )
        return (replica(record),)

    def move(self, replica: Replica, model: str, config: str | None, *, timeout: float) -> None:
        """By a load call."""
        load_call(replica, model, config, timeout=timeout)

    @contextmanager
    def staging(self, repository: Path, model: str, folder: Path) -> Iterator[Replica]:
        """Run the same binary on free ports, for as long as the `with` lasts."""
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
        """End the server."""
        record = self._record()
        if record is None:
            return ()
        triton.stop(record)
        return (replica(record),)

    def _record(self) -> ServerRecord | None:
        return triton.observe(self._folder / f"{self._name}.json")


def server_name(repository: Path) -> str:
    """The name under which the server of a repository is recorded; distinct for repositories of the same name."""
    return f"{repository.name}-{digest_of(str(repository)).hex[:8]}"


def servers(home: Home) -> list[ServerRecord]:
    """Every recorded server that lives."""
    found = (triton.observe(path) for path in sorted(home.serve.glob("*.json")))
    return [record for record in found if record is not None]


def replica(record: ServerRecord) -> Replica:
    """What the deploy stage needs of a recorded server."""
    return Replica(name=record.name, address=record.address, log=record.log)
