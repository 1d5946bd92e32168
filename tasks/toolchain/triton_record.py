"""The record of a Triton server's process: written before the server runs, read to know whether it still does."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tasks.errors import StoreUnusable
from tasks.toolchain.processes import boot_id, start_time
from tasks.toolchain.triton_client import Address
from tasks.toolchain.triton_token import read_token

FORMAT = 1
"""Of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """A server process that was started."""

    path: Path
    """The record's own file; a staging server has none."""
    name: str
    pid: int
    """The server's; for a staging server its supervisor's, which lives as long."""
    start_time: int
    """Clock ticks after boot: with the boot id it tells the process from a later one of the same pid."""
    boot_id: str
    host: str
    http_port: int
    grpc_port: int
    metrics_port: int
    repository: Path
    models: tuple[str, ...]
    """The models that it loads at its start (`--load-model`)."""
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
        # What listens everywhere is reached at the loopback address from here.
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host  # noqa: S104
        token = read_token(self.path.with_suffix(".token"))
        return Address(host=host, http_port=self.http_port, grpc_port=self.grpc_port, token=token)


def observe(record: Path) -> ServerRecord | None:
    """The recorded server, if its process lives; None where there is no record or the process is gone.

    Raises StoreUnusable where the file is no record that this version reads.
    """
    found = read_record(record)
    return found if found is not None and lives(found) else None


def lives(record: ServerRecord) -> bool:
    """Whether the recorded process runs; what it answers is another question."""
    return record.boot_id == boot_id() and record.start_time == start_time(record.pid)


def read_record(path: Path) -> ServerRecord | None:
    """The record, whether its process lives or not; None where there is none. Raises StoreUnusable."""
    try:
        values = json.loads(path.read_text())
        if values.pop("format") != FORMAT:
            raise ValueError("its format is of another version")
        return from_json(path, values)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreUnusable(
            f"{path} is no server record that this version of Enginehouse reads: {error}\n"
            "end the server that it may belong to, and remove the file"
        ) from error


def from_json(path: Path, values: dict[str, Any]) -> ServerRecord:
    """The record that `path` holds, or would hold."""
    known = {field.name for field in fields(ServerRecord)} - {"path"}
    given = {name: value for name, value in values.items() if name in known}
    return ServerRecord(
        path=path,
        **{
            **given,
            "repository": Path(values["repository"]),
            "models": tuple(values["models"]),
            "argv": tuple(values["argv"]),
            "log": Path(values["log"]),
        },
    )
