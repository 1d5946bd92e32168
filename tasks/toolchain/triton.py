"""Triton servers on this machine: find or set up an installation; start, observe and stop servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.toolchain.triton_client import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonInstallation:
    """A `tritonserver` that can be started."""

    tritonserver: Path
    version: str
    """Of the server, such as `2.51.0`."""
    backends: Literal["cpu stand-in", "native"]
    """`cpu stand-in`: made by `setup`, serves ONNX models with our python-based backend; `native`: NVIDIA's own backends."""
    arguments: tuple[str, ...]
    """What every start of it needs (backend directory…)."""
    environment: tuple[tuple[str, str], ...]
    """Environment variables to set on top of ours (LD_LIBRARY_PATH, PATH)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """A server process that was started; read back by `observe`."""

    path: Path
    """The record's own file."""
    name: str
    pid: int
    start_time: int
    """Clock ticks after boot, from /proc/<pid>/stat: with the boot id it tells a process from a later one of the same pid."""
    boot_id: str
    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    repository: Path
    models: tuple[str, ...]
    """The models it loads at its start (`--load-model`)."""
    argv: tuple[str, ...]
    log: Path
    version: str
    backends: str
    shm_prefix: str
    """The prefix of its files in /dev/shm."""
    started: str
    """ISO time, UTC."""

    @property
    def address(self) -> Address:
        return Address(host=self.host, http_port=self.http_port, grpc_port=self.grpc_port)


def default_folder() -> Path:
    """`<sys.prefix>/share/enginehouse/triton`."""
    raise NotImplementedError


def find_installation() -> TritonInstallation:
    """$ENGINEHOUSE_TRITON (a folder made by `setup`, or a tritonserver binary), `tritonserver` on the PATH, or the default
    folder, in this order. Raises ToolMissing."""
    raise NotImplementedError


def setup(folder: Path, *, say: Callable[[str], None]) -> TritonInstallation:
    """Builds an environment with a real Triton for this machine's processor in `folder` (about 450 MB); returns at once
    where the same one is there. `say` gets a line per step. Raises ToolMissing, CommandFailed."""
    raise NotImplementedError


def find_free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """That many TCP ports that nothing on `host` listens on, outside the range that outgoing connections use."""
    raise NotImplementedError


def start(
    installation: TritonInstallation,
    *,
    repository: Path,
    models: Sequence[str],
    folder: Path,
    name: str,
    host: str = "127.0.0.1",
    http_port: int | None = None,
    grpc_port: int | None = None,
    metrics_port: int | None = None,
    threads: int = 1,
    arguments: Sequence[str] = (),
) -> ServerRecord:
    """Starts a server that outlives us, recorded in `folder/<name>.json`, with its log in `folder/<name>.log`.

    Explicit model control, loading `models`. A port of None is chosen free. Does not wait until it is ready.
    Raises NotReady for an occupied port (naming it and who listens), Refused where a server of that name runs.
    """
    raise NotImplementedError


def observe(record: Path) -> ServerRecord | None:
    """The recorded server, if its process still runs; None where there is no record or the process is gone."""
    raise NotImplementedError


def wait_ready(record: ServerRecord, *, timeout: float) -> None:
    """Waits until the server answers and every model it was started with is ready.

    Raises NotReady with the log's last lines: as soon as the process has died or one of its models failed to load, or when
    `timeout` seconds have passed. Does not stop it.
    """
    raise NotImplementedError


def stop(record: ServerRecord, *, grace: float = 15.0) -> None:
    """Ends the server: SIGTERM, after `grace` seconds SIGKILL; then removes what it left in /dev/shm, and the record.
    Returns at once where it is gone already."""
    raise NotImplementedError


@contextmanager
def staging(
    installation: TritonInstallation,
    *,
    repository: Path,
    models: Sequence[str] = (),
    folder: Path,
    name: str = "staging",
    threads: int = 1,
    timeout: float = 120.0,
    arguments: Sequence[str] = (),
) -> Iterator[ServerRecord]:
    """A ready server on free ports that dies with the block, and with us however we die. Log: `folder/<name>.log`."""
    raise NotImplementedError
    yield
