"""The deploy target `docker`: Triton servers in containers, which a restart policy brings back serving the champion.

The model repository is mounted read-only. The containers read at each start what is released there
(`containers/triton/start.py`), so they need not be made anew for a release: they are moved like any other server. They
are made anew, one after the other, where the pipeline file's `deploy` asks for other containers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tasks.artifacts.digest import digest_of
from tasks.config import DeployConfig, Keyed, Pipeline, Placement, Port, PositiveInt, Text
from tasks.engines.passport import ServerFacts
from tasks.errors import NotReady
from tasks.events import Listener, note
from tasks.home import Home
from tasks.targets import Replica
from tasks.targets.process import server_name
from tasks.toolchain import probe, triton_client
from tasks.toolchain.docker_engine import PREFIX, engine, held, reported, require_image, tail
from tasks.toolchain.processes import boot_id, find_free_ports, is_free, listener, start_time
from tasks.toolchain.triton_client import Address
from tasks.toolchain.triton_token import is_exposed, make_token, read_token

REPOSITORY = "/models"
TOKEN = "/run/secrets/enginehouse-token"  # noqa: S105 - the path of a file
"""Where the containers see the model repository."""
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
"""Triton's, inside a container."""
STOP_SECONDS = 20
"""Triton drains for 10; then the engine kills."""
LABELS = {name: f"{PREFIX}{name}" for name in ("home", "repository", "replica", "spec", "staging")}


class DockerConfig(DeployConfig):
    """Triton servers in containers on this machine's Docker engine."""

    kind: Keyed[Literal["docker"]]
    """Containers."""
    image: Placement[Text] = "enginehouse/triton:cpu"
    """The image of the server; `containers/build triton` makes the default one."""
    replicas: Placement[PositiveInt] = 1
    """How many containers. A release moves them one after the other."""
    host: Placement[Text] = "127.0.0.1"
    """The address of this machine at which their ports are published. Anything but loopback exposes them."""
    http_port: Placement[Port | None] = None
    """The port of HTTP of the first container, the next one's is one higher; free ones if left out."""
    grpc_port: Placement[Port | None] = None
    """The same for gRPC."""
    metrics_port: Placement[Port | None] = None
    """The same for the metrics."""
    cpus: Placement[Annotated[float, Field(gt=0)] | None] = None
    """Processors that a container may use; all if left out."""
    memory: Placement[Annotated[str, Field(pattern=r"^[0-9]+[kmg]$")] | None] = None
    """Memory that a container may use, such as `2g`; all if left out."""
    shm_size: Placement[Annotated[str, Field(pattern=r"^[0-9]+[kmg]$")]] = "256m"
    """Its shared memory, through which Triton's Python backends are fed."""
    gpus: Placement[Literal["none", "all"] | PositiveInt] = "none"
    """GPUs: none, all, or how many."""
    network: Placement[Text | None] = None
    """A Docker network to join; the engine's default bridge if left out."""
    restart: Placement[Literal["no", "on-failure", "always", "unless-stopped"]] = "unless-stopped"
    """When the engine starts a container again that has ended."""
    ready_timeout_seconds: Placement[Annotated[float, Field(gt=0)]] = 120.0
    """How long a container may take until it answers."""


def container_options(
    config: DockerConfig,
    *,
    name: str,
    repository: Path,
    labels: Mapping[str, str],
    ports: Mapping[str, int],
    token: Path | None = None,
) -> dict[str, Any]:
    """What a container is made with, in the SDK's words. Pure, so that a plan can print it and a test compare it."""
    options: dict[str, Any] = {
        "image": config.image,
        "name": name,
        "detach": True,
        "labels": dict(labels),
        "ports": {f"{inside}/tcp": (config.host, ports[protocol]) for protocol, inside in PORTS.items()},
        "volumes": {str(repository): {"bind": REPOSITORY, "mode": "ro"}},
        "read_only": True,
        "tmpfs": {"/tmp": "size=64m"},  # noqa: S108 - inside the container
        "shm_size": config.shm_size,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "restart_policy": {"Name": config.restart},
    }
    if token is not None:  # as a file: what is in the environment or the arguments, `docker inspect` shows
        options["volumes"][str(token)] = {"bind": TOKEN, "mode": "ro"}
    if config.cpus is not None:
        options["nano_cpus"] = round(config.cpus * 1e9)
    if config.memory is not None:
        options["mem_limit"] = config.memory
    if config.network is not None:
        options["network"] = config.network
    if config.gpus != "none":
        count = -1 if config.gpus == "all" else config.gpus
        options["device_requests"] = [{"Driver": "nvidia", "Count": count, "Capabilities": [["gpu"]]}]
    return options


def spec_of(config: DockerConfig, image_id: str) -> str:
    """Changes when a container has to be made anew: another image, limit, port, address or policy."""
    fields = {
        field: getattr(config, field)
        for field in type(config).model_fields
        if field not in ("replicas", "ready_timeout_seconds")
    }
    return digest_of({**fields, "image_id": image_id}).short


class DockerTarget:
    """The containers of one model repository."""

    Config: ClassVar[type[DeployConfig]] = DockerConfig

    def __init__(self, pipeline: Pipeline, home: Home) -> None:
        assert isinstance(pipeline.deploy, DockerConfig)
        self._config: DockerConfig = pipeline.deploy
        self._repository = pipeline.repository.resolve()
        self._home = home
        self._name = f"enginehouse-{server_name(self._repository)}"

    @property
    def size(self) -> int:
        """As many as the pipeline file says."""
        return self._config.replicas

    def check(self) -> None:
        """Raise `ToolMissing` when there is no engine or no image."""
        require_image(self._config.image)

    def facts(self) -> ServerFacts:
        """Return this machine's GPUs; the image's version where it says so."""
        version = require_image(self._config.image).labels.get(f"{PREFIX}triton", "unknown")
        gpus = [] if self._config.gpus == "none" else [gpu.compute_capability for gpu in probe.gpus()]
        return ServerFacts.of(f"Triton in {self._config.image}", server_version=version, compute_capabilities=gpus)

    def observe(self) -> Sequence[Replica]:
        """Return the containers that run."""
        return tuple(replica(c) for c in self._containers() if c.status == "running")

    def ensure(self, models: Sequence[str], listener: Listener) -> Sequence[Replica]:
        """Start what does not run, make anew what is not as the pipeline file says, end what is too much.

        One container at a time, each ready before the next is touched, so that the others go on serving.
        """
        image = require_image(self._config.image)
        self._repository.mkdir(parents=True, exist_ok=True)
        (self._home.serve / "docker").mkdir(parents=True, exist_ok=True)
        spec = spec_of(self._config, image.id)
        there = {int(c.labels[LABELS["replica"]]): c for c in self._containers()}
        for index in sorted(set(there) - set(range(self._config.replicas))):
            note(listener, f"ends {there[index].name}, which is more than {self._config.replicas} replicas")
            _remove(there.pop(index))
        found = []
        for index in range(self._config.replicas):
            container = there.get(index)
            if container is not None and container.labels[LABELS["spec"]] != spec:
                note(listener, f"makes {container.name} anew, as the pipeline file says")
                _remove(container)
                container = None
            with reported(f"starting container {index} of {self._name}"):
                if container is None:
                    container = self._create(index, spec)
                    note(listener, f"started {container.name} at {replica(container).address.http_url}")
                elif container.status != "running":
                    container.start()
            self._wait_ready(container, models)
            found.append(container)
        return tuple(map(replica, found))

    @contextmanager
    def staging(self, repository: Path, model: str, folder: Path) -> Iterator[Replica]:
        """A container of the same image on another repository. It ends by itself when this process does, however that
        ends; what is left of it is removed by whatever comes next."""
        del folder  # the log is the engine's
        image = require_image(self._config.image)
        remove_orphans()
        ports = dict(zip(PORTS, find_free_ports(len(PORTS)), strict=True))
        pid = os.getpid()
        labels = {LABELS["staging"]: f"{boot_id()} {pid} {start_time(pid)}", LABELS["spec"]: image.short_id}
        changed = {"restart": "no", "host": "127.0.0.1"}
        options = container_options(
            self._config.model_copy(update=changed),
            name=f"enginehouse-staging-{digest_of([str(repository), pid]).hex[:8]}",
            repository=repository.resolve(),
            labels=labels,
            ports=ports,
        ) | {"detach": False, "stdin_open": True, "environment": {"ENGINEHOUSE_ENDS_WITH_STDIN": "1"}}
        with reported("the staging container"):
            container = engine().containers.create(**options)
        try:
            with held(container):
                self._wait_ready(container, [model])
                container.reload()
                yield replica(container)
        finally:
            container.remove(force=True)

    def clear_leftovers(self) -> Sequence[str]:
        """Remove staging containers that ended when their makers were killed."""
        return [f"removed {name}, which a process that died has left" for name in remove_orphans()]

    def stop(self) -> Sequence[Replica]:
        """Let the containers drain, and remove them."""
        return stop(self._containers())

    def _containers(self) -> list[Any]:
        with reported("looking for containers"):
            found = engine().containers.list(all=True, filters={"label": f"{LABELS['repository']}={self._repository}"})
        return sorted(found, key=lambda c: int(c.labels[LABELS["replica"]]))

    def _create(self, index: int, spec: str) -> Any:
        labels = {
            LABELS["home"]: str(self._home.root),
            LABELS["repository"]: str(self._repository),
            LABELS["replica"]: str(index),
            LABELS["spec"]: spec,
        }
        options = container_options(
            self._config,
            token=self._token() if is_exposed(self._config.host) else None,
            name=f"{self._name}-{index}",
            repository=self._repository,
            labels=labels,
            ports=self._ports(index),
        )
        return engine().containers.run(**options)

    def _token(self) -> Path:
        file = token_file(self._home.root, self._repository)
        make_token(file)
        file.chmod(0o444)  # for nobody's root in the container; here its folder keeps others out
        return file

    def _ports(self, index: int) -> dict[str, int]:
        # Chosen here and not by the engine, which would choose others when it restarts the container.
        given = (self._config.http_port, self._config.grpc_port, self._config.metrics_port)
        free = iter(find_free_ports(len(given), self._config.host))
        ports = [next(free) if first is None else first + index for first in given]
        for port, protocol, first in zip(ports, PORTS, given, strict=True):
            if first is not None and not is_free(port, self._config.host):
                who = listener(port)
                raise NotReady(
                    f"port {port} on {self._config.host}, which container {index} shall publish for {protocol}, is "
                    f"taken{f' by {who}' if who else ''}\nend that process, or name another `deploy.{protocol}_port`"
                )
        return dict(zip(PORTS, ports, strict=True))

    def _wait_ready(self, container: Any, models: Sequence[str]) -> None:
        deadline = time.monotonic() + self._config.ready_timeout_seconds
        while True:
            container.reload()
            if container.status in ("exited", "dead"):
                why = f"ended (exit status {container.attrs['State']['ExitCode']})"
                break
            if container.status == "running":
                address = replica(container).address
                if triton_client.server_live(address):
                    failed = [m for m in models if not triton_client.model_ready(address, m)]
                    if not failed:
                        return
                    # It answers nobody before it has tried all that it was started with.
                    if reasons := _reasons(address, failed):
                        why = f"could not load {reasons}"
                        break
            if time.monotonic() > deadline:
                why = f"is not ready after {self._config.ready_timeout_seconds:g} s"
                break
            time.sleep(0.1)
        refused = why.startswith("could not load")
        raise NotReady(f"the container {container.name} {why}", last_lines=tail(container), passes=not refused)


def replica(container: Any) -> Replica:
    """What the deploy stage needs of a container."""
    bound = container.attrs["HostConfig"]["PortBindings"]
    ports = {protocol: int(bound[f"{inside}/tcp"][0]["HostPort"]) for protocol, inside in PORTS.items()}
    host = bound[f"{PORTS['http']}/tcp"][0]["HostIp"]
    return Replica(
        name=container.name,
        address=Address(
            host="127.0.0.1" if host in ("", "0.0.0.0") else host,  # noqa: S104 - where it is reached from here
            http_port=ports["http"],
            grpc_port=ports["grpc"],
            token=_token_of(container) if is_exposed(host) else None,
        ),
        log=None,
    )


def token_file(home: Path, repository: Path) -> Path:
    """Where the token of a repository's containers lies; readable by the home's owner alone."""
    return home / "serve" / "docker" / "tokens" / f"{server_name(repository)}.token"


def _token_of(container: Any) -> str | None:
    labels = container.labels
    if LABELS["home"] not in labels:
        return None
    return read_token(token_file(Path(labels[LABELS["home"]]), Path(labels[LABELS["repository"]])))


def containers(home: Home) -> list[Any]:
    """Every container that runs of this home made; asks no engine where it never made one."""
    if not (home.serve / "docker").is_dir():
        return []
    found: list[Any] = engine().containers.list(all=True, filters={"label": f"{LABELS['home']}={home.root}"})
    return found


def stop(found: Sequence[Any]) -> Sequence[Replica]:
    """Let containers drain, all at once, and remove them; those that ran."""
    ran = tuple(replica(c) for c in found if c.status == "running")
    for container in found:
        _remove(container)
    return ran


def remove_orphans() -> list[str]:
    """Remove staging containers whose makers are gone; their names."""
    removed = []
    for container in engine().containers.list(all=True, filters={"label": LABELS["staging"]}):
        boot, pid, started = container.labels[LABELS["staging"]].split()
        if boot != boot_id() or str(start_time(int(pid))) != started:
            container.remove(force=True)
            removed.append(container.name)
    return removed


def _remove(container: Any) -> None:
    with reported(f"removing {container.name}"):
        container.stop(timeout=STOP_SECONDS)
        container.remove(force=True)


def _reasons(address: Address, models: Sequence[str]) -> str:
    states = triton_client.repository_index(address)
    failed = []
    for model in models:
        own = [state for state in states if state.name == model]
        if not any(state.state in ("READY", "LOADING") for state in own):
            said = "; ".join(state.reason for state in own if state.reason)
            failed.append(f"{model} ({said or 'its config.pbtxt is refused, or it is not there'})")
    return ", ".join(failed)
