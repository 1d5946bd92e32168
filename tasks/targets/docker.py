"""The deploy target `docker`: Triton servers in containers, which a restart policy brings back serving the champion.

The model repository is mounted read-only. The containers read at each start what is released there
(`containers/triton/start.py`), so they need not be made anew for a release: they are moved like any other server. They
are made anew, one after the other, where the pipeline file's `deploy` asks for other containers; and for every release
where it asks for images that hold what they serve (`baked`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tasks.artifacts.digest import Digest, digest_of
from tasks.config import DeployConfig, Pipeline
from tasks.engines.passport import ServerFacts
from tasks.errors import NotReady
from tasks.events import Listener, note
from tasks.home import Home
from tasks.targets import Replica, load_call
from tasks.targets.docker_baked import released_image, remove_images
from tasks.targets.docker_options import LABELS, PORTS, STOP_SECONDS, DockerConfig, container_options, spec_of
from tasks.targets.process import server_name
from tasks.toolchain import probe, triton_client
from tasks.toolchain.docker_engine import PREFIX, containers_with, engine, held, remove, reported, require_image, tail
from tasks.toolchain.model_repository import Repository
from tasks.toolchain.processes import boot_id, find_free_ports, is_free, listener, start_time
from tasks.toolchain.triton_client import Address
from tasks.toolchain.triton_token import make_token, read_token

KEEP, START, MAKE = "keep {}", "start {}", "make {}"
ANEW = "make {} anew, as the pipeline file says"
END = "end {}, which is more than the pipeline file asks for"
"""What has to be done to a container."""


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

    @property
    def reads_repository(self) -> bool:
        """Unless their image holds what they serve."""
        return self._config.baked is None

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

    def plan(self) -> Sequence[str]:
        """Which containers would be ended, made or started; and that a release replaces them, where it does."""
        config = self._config
        # Baking is doing: whether the containers are of another image than would be baked is not asked here.
        spec = None if config.baked is not None else spec_of(config, require_image(config.image).id)
        steps = [what.format(f"{self._name}-{index}") for index, _, what in self._differences(spec) if what != KEEP]
        if config.baked is None:
            return steps
        return [*steps, f"bake what is released into {config.baked}, and replace the containers one after the other"]

    def ensure(self, models: Sequence[str], listener: Listener) -> Sequence[Replica]:
        """Start what does not run, make anew what is not as the pipeline file says, end what is too much.

        One container at a time, each ready before the next is touched, so that the others go on serving.
        """
        self._repository.mkdir(parents=True, exist_ok=True)
        (self._home.serve / "docker").mkdir(parents=True, exist_ok=True)
        image = self._image({})
        if self._config.baked is not None and self._config.replicas == 1:
            note(listener, "the only replica is replaced for a release: nothing answers until the new one is ready")
        found = []
        for index, former, what in self._differences(spec_of(self._config, image.id)):
            container, ports = former, None
            if what != KEEP:
                note(listener, what.format(f"{self._name}-{index}"))
            if what in (END, ANEW):
                ports = ports_of(former)
                remove(former, drain_seconds=STOP_SECONDS)
            if what == END:
                continue
            with reported(f"starting container {index} of {self._name}"):
                if what in (MAKE, ANEW):
                    container = self._create(index, image, ports)
                    note(listener, f"started {container.name} at {replica(container).address.http_url}")
                elif what == START:
                    container.start()
            self._wait_ready(container, models)
            found.append(container)
        return tuple(map(replica, found))

    def _differences(self, spec: str | None) -> Iterator[tuple[int, Any, str]]:
        """Each container by its number, and what has to be done to it; a `spec` of `None` is not compared."""
        there = {int(c.labels[LABELS["replica"]]): c for c in self._containers()}
        for index in sorted(set(there) - set(range(self._config.replicas))):
            yield index, there[index], END
        for index in range(self._config.replicas):
            container = there.get(index)
            if container is None:
                yield index, None, MAKE
            elif spec is not None and container.labels[LABELS["spec"]] != spec:
                yield index, container, ANEW
            else:
                yield index, container, KEEP if container.status == "running" else START

    def move(self, replica: Replica, model: str, config: str | None, *, timeout: float) -> None:
        """By a load call; a container whose image holds what it serves is replaced by one of another image, at the same
        ports."""
        if self._config.baked is None:
            load_call(replica, model, config, timeout=timeout)
            return
        image = self._image({model: config})
        index = int(replica.name.rpartition("-")[2])
        ports = {"http": replica.address.http_port, "grpc": replica.address.grpc_port}
        for former in [c for c in self._containers() if c.name == replica.name]:
            if former.status == "running" and former.labels[LABELS["spec"]] == spec_of(self._config, image.id):
                return
            ports = ports_of(former)
            remove(former, drain_seconds=STOP_SECONDS)
        with reported(f"starting container {index} of {self._name}"):
            container = self._create(index, image, ports)
        self._wait_ready(container, [] if config is None else [model])

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
            image=self._config.image,
            name=f"enginehouse-staging-{digest_of([str(repository), pid]).hex[:8]}",
            repository=repository.resolve(),
            labels=labels,
            ports=ports,
            token=self._token(),
        ) | {"detach": False, "stdin_open": True, "environment": {"ENGINEHOUSE_ENDS_WITH_STDIN": "1"}}
        with reported("the staging container"):
            container = engine().containers.create(**options)
        try:
            with held(container):
                self._wait_ready(container, [model])
                container.reload()
                yield replica(container)
        finally:
            remove(container)

    def clear_leftovers(self) -> Sequence[str]:
        """Remove staging containers that ended when their makers were killed."""
        return [f"removed {name}, which a process that died has left" for name in remove_orphans()]

    def forget(self, model: str, versions: Mapping[int, Digest]) -> Sequence[str]:
        """Remove from this engine, not from a registry, the images into which one of the versions is baked."""
        if self._config.baked is None:
            return ()
        labels = {f"content.{model}.{version}": str(content) for version, content in versions.items()}
        gone = remove_images(self._config.baked, labels)
        return [f"removed the image {tag}" for tag in gone]

    def stop(self) -> Sequence[Replica]:
        """Let the containers drain, and remove them."""
        return stop(self._containers())

    def _containers(self) -> list[Any]:
        found = containers_with(LABELS["repository"], str(self._repository))
        return sorted(found, key=lambda c: int(c.labels[LABELS["replica"]]))

    def _image(self, changed: Mapping[str, str | None]) -> Any:
        """What the containers are made from; with what is released, or would be with `changed`, where it is baked."""
        if self._config.baked is None:
            return require_image(self._config.image)
        return released_image(
            self._config.baked, base=self._config.image, repository=Repository(self._repository), changed=changed
        )

    def _create(self, index: int, image: Any, former: Mapping[str, int] | None) -> Any:
        baked = self._config.baked is not None
        labels = {
            LABELS["home"]: str(self._home.root),
            LABELS["repository"]: str(self._repository),
            LABELS["replica"]: str(index),
            LABELS["spec"]: spec_of(self._config, image.id),
        }
        options = container_options(
            self._config,
            token=self._token(),
            name=f"{self._name}-{index}",
            image=_reference(image, self._config.baked) if baked else self._config.image,
            repository=None if baked else self._repository,
            labels=labels,
            ports=self._ports(index, former or {}),
        )
        return engine().containers.run(**options)

    def _token(self) -> Path:
        file = token_file(self._home.root, self._repository)
        make_token(file)
        file.chmod(0o444)  # for nobody's root in the container; here its folder keeps others out
        return file

    def _ports(self, index: int, former: Mapping[str, int]) -> dict[str, int]:
        # Chosen here and not by the engine, which would choose others when it restarts the container; and those of the
        # container that it takes the place of, since clients know them: also where that was removed by a process that
        # then died, or by somebody else.
        given = (self._config.http_port, self._config.grpc_port, self._config.metrics_port)
        file = ports_file(self._home.root, f"{self._name}-{index}")
        former = former or _free_of(_read_ports(file), self._config.host)
        free = iter(find_free_ports(len(given), self._config.host))
        ports = [
            former.get(protocol, next(free)) if first is None else first + index
            for protocol, first in zip(PORTS, given, strict=True)
        ]
        for port, protocol, first in zip(ports, PORTS, given, strict=True):
            if first is not None and not is_free(port, self._config.host):
                who = listener(port)
                raise NotReady(
                    f"port {port} on {self._config.host}, which container {index} shall publish for {protocol}, is "
                    f"taken{f' by {who}' if who else ''}\nend that process, or name another `deploy.{protocol}_port`"
                )
        chosen = dict(zip(PORTS, ports, strict=True))
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".new")
        partial.write_text(json.dumps(chosen))
        partial.replace(file)
        return chosen

    def _wait_ready(self, container: Any, models: Sequence[str]) -> None:
        deadline = time.monotonic() + self._config.ready_timeout_seconds
        while True:
            with reported(f"waiting for {container.name}"):
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
    ports = ports_of(container)
    host = container.attrs["HostConfig"]["PortBindings"][f"{PORTS['http']}/tcp"][0]["HostIp"]
    return Replica(
        name=container.name,
        address=Address(
            host="127.0.0.1" if host in ("", "0.0.0.0") else host,  # noqa: S104 - where it is reached from here
            http_port=ports["http"],
            grpc_port=ports["grpc"],
            token=_token_of(container),
        ),
        log=None,
    )


def ports_of(container: Any) -> dict[str, int]:
    """The ports at which a container is published, by protocol."""
    bound = container.attrs["HostConfig"]["PortBindings"]
    return {protocol: int(bound[f"{inside}/tcp"][0]["HostPort"]) for protocol, inside in PORTS.items()}


def _reference(image: Any, name: str | None) -> str:
    """`NAME@sha256:…` where it was pushed, else the tag."""
    pushed = [digest for digest in image.attrs["RepoDigests"] if digest.startswith(f"{name}@")]
    found: str = (pushed or image.tags)[0]
    return found


def ports_file(home: Path, container: str) -> Path:
    """Where the ports are kept at which a container of that name was published last."""
    return home / "serve" / "docker" / "ports" / f"{container}.json"


def _read_ports(file: Path) -> dict[str, int]:
    try:
        told = json.loads(file.read_bytes())
        return {protocol: int(told[protocol]) for protocol in PORTS}
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # none, or no record of ours: others are chosen
        return {}


def _free_of(ports: Mapping[str, int], host: str) -> Mapping[str, int]:
    return ports if all(is_free(port, host) for port in ports.values()) else {}


def token_file(home: Path, repository: Path) -> Path:
    """Where the token of a repository's containers lies; readable by the home's owner alone."""
    return home / "serve" / "docker" / "tokens" / f"{server_name(repository)}.token"


def _token_of(container: Any) -> str | None:
    file = container.labels.get(LABELS["token"])
    return None if file is None else read_token(Path(file))


def containers(home: Home) -> list[Any]:
    """Every container that runs of this home made; asks no engine where it never made one."""
    if not (home.serve / "docker").is_dir():
        return []
    return containers_with(LABELS["home"], str(home.root))


def stop(found: Sequence[Any]) -> Sequence[Replica]:
    """Let containers drain, all at once, and remove them; those that ran."""
    ran = tuple(replica(c) for c in found if c.status == "running")
    for container in found:
        remove(container, drain_seconds=STOP_SECONDS)
    return ran


def remove_orphans() -> list[str]:
    """Remove staging containers whose makers are gone; their names."""
    removed = []
    for container in containers_with(LABELS["staging"]):
        boot, pid, started = container.labels[LABELS["staging"]].split()
        if boot != boot_id() or str(start_time(int(pid))) != started:
            remove(container)
            removed.append(container.name)
    return removed


def _reasons(address: Address, models: Sequence[str]) -> str:
    states = triton_client.repository_index(address)
    failed = []
    for model in models:
        own = [state for state in states if state.name == model]
        if not any(state.state in ("READY", "LOADING") for state in own):
            said = "; ".join(state.reason for state in own if state.reason)
            failed.append(f"{model} ({said or 'its config.pbtxt is refused, or it is not there'})")
    return ", ".join(failed)
