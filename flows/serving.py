"""The servers that runs of a home have started, of whichever kind: `enginehouse serve status` and `stop`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tasks.home import Home
from tasks.targets import Replica, docker, process
from tasks.targets.docker_options import LABELS
from tasks.toolchain import triton, triton_client


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """One server, and how to end it."""

    replica: Replica
    where: str
    """Such as `pid 4711` or `container 3f2a9c…`."""
    stop: Callable[[], object]
    """Lets it drain, and ends it."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What only this kind of server has."""

    @property
    def name(self) -> str:
        """As it is recorded."""
        return self.replica.name

    def to_json(self) -> dict[str, Any]:
        """For `--json`; asks the server what it serves."""
        address = self.replica.address
        index = triton_client.repository_index(address) if triton_client.server_live(address) else ()
        return {
            "name": self.name,
            "state": "answers" if triton_client.server_ready(address) else "does not answer",
            "http": address.http_url,
            "grpc": address.grpc_url,
            "models": sorted(f"{m.name} {m.version}" for m in index if m.state == "READY"),
            **self.facts,
        }


def running(home: Home) -> list[RunningServer]:
    """Every server of the home that runs."""
    found = [
        RunningServer(
            replica=process.replica(record),
            where=f"pid {record.pid}",
            stop=partial(triton.stop, record),
            facts={
                "pid": record.pid,
                "metrics": f"http://{record.host}:{record.metrics_port}/metrics",
                "repository": str(record.repository),
                "log": str(record.log),
                "started": record.started,
            },
        )
        for record in process.servers(home)
    ]
    for container in docker.containers(home):
        found.append(
            RunningServer(
                replica=docker.replica(container),
                where=f"container {container.short_id}",
                stop=partial(docker.stop, [container]),
                facts={
                    "container": container.short_id,
                    "image": ", ".join(container.image.tags),
                    "repository": container.labels[LABELS["repository"]],
                    "log": f"docker logs {container.name}",
                    "started": container.attrs["State"]["StartedAt"],
                },
            )
        )
    return found
