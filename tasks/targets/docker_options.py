"""The fields of `deploy: {kind: docker}`, and what a container is made with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tasks.artifacts.digest import digest_of
from tasks.config import DeployConfig, Keyed, Placement, Port, PositiveInt, Text
from tasks.toolchain.docker_engine import PREFIX

REPOSITORY = "/models"
"""Where the containers see the model repository."""
TOKEN = "/run/secrets/enginehouse-token"  # noqa: S105 - the path of a file
"""Where they see the token without which they load nothing: other containers reach them wherever they are published."""
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
"""Triton's, inside a container."""
STOP_SECONDS = 20
"""Triton drains for 10; then the engine kills."""
LABELS = {name: f"{PREFIX}{name}" for name in ("home", "repository", "replica", "spec", "staging", "token")}


class DockerConfig(DeployConfig):
    """Triton servers in containers on this machine's Docker engine."""

    kind: Keyed[Literal["docker"]]
    """Containers."""
    image: Placement[Text] = "enginehouse/triton:cpu"
    """The image of the server; `containers/build triton` makes the default one."""
    baked: Placement[Text | None] = None
    """The name of an image, such as `registry:5000/digits`, into which every release is baked: server, versions and
    config as one immutable unit, pushed where the name begins with a registry. Containers are then replaced, one after
    the other, by those of the new image. If left out they see the model repository, and a release moves them as they
    are."""
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
    image: str,
    repository: Path | None,
    labels: Mapping[str, str],
    ports: Mapping[str, int],
    token: Path,
) -> dict[str, Any]:
    """What a container is made with, in the SDK's words. Pure, so that a plan can print it and a test compare it.

    Without a `repository` the image holds the models.
    """
    options: dict[str, Any] = {
        "image": image,
        "name": name,
        "detach": True,
        "labels": {**labels, LABELS["token"]: str(token)},
        "ports": {f"{inside}/tcp": (config.host, ports[protocol]) for protocol, inside in PORTS.items()},
        # As a file: what is in the environment or the arguments, `docker inspect` shows.
        "volumes": {str(token): {"bind": TOKEN, "mode": "ro"}},
        "read_only": True,
        "tmpfs": {"/tmp": "size=64m"},  # noqa: S108 - inside the container
        "shm_size": config.shm_size,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "restart_policy": {"Name": config.restart},
    }
    if repository is not None:
        options["volumes"][str(repository)] = {"bind": REPOSITORY, "mode": "ro"}
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
    return digest_of({**fields, "image_id": image_id, "token": True}).short
