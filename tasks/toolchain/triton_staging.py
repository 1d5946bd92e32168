"""A Triton server for the time of a test: on free ports, and gone with the block that asked for it, or with us."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasks.toolchain.processes import boot_id, find_free_ports, start_time
from tasks.toolchain.supervised import Supervised
from tasks.toolchain.triton_installation import TritonInstallation
from tasks.toolchain.triton_record import ServerRecord, from_json
from tasks.toolchain.triton_server import SHARED_MEMORY, plan, remove_shared_memory, wait_ready


@contextmanager
def staging(
    installation: TritonInstallation,
    *,
    repository: Path,
    models: Sequence[str] = (),
    folder: Path,
    name: str = "staging",
    timeout: float = 120.0,
    arguments: Sequence[str] = (),
) -> Iterator[ServerRecord]:
    """A ready server on free ports that dies with the block, and with us however we die. Log: `folder/<name>.log`.

    Raises NotReady as `wait_ready` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_orphaned_shared_memory()
    log = folder / f"{name}.log"
    planned = plan(
        installation,
        repository=repository,
        models=models,
        log=log,
        name=name,
        host="127.0.0.1",
        ports=find_free_ports(3),
        prefix=f"enginehouse_staging_{os.getpid()}_{start_time(os.getpid())}_{uuid.uuid4().hex[:8]}_",
        arguments=arguments,
    )
    try:
        with (
            log.open("wb") as output,
            Supervised(
                planned["argv"],
                what=f"Triton {name}",
                output=output,
                env=os.environ | dict(installation.environment),
                # Nobody waits for its answers any more, and it would take four seconds to say goodbye.
                grace=0.0,
            ) as server,
        ):
            identity = {"pid": server.pid, "start_time": start_time(server.pid) or 0, "boot_id": boot_id()}
            record = from_json(folder / f"{name}.json", {**planned, **identity})
            wait_ready(record, timeout=timeout)
            yield record
    finally:
        remove_shared_memory(planned["shm_prefix"])


def _remove_orphaned_shared_memory() -> None:
    """What staging servers left whose starter was killed: their supervisor ended them, but nobody tidied up."""
    for file in SHARED_MEMORY.glob("enginehouse_staging_*"):
        found = re.match(r"enginehouse_staging_(\d+)_(\d+)_", file.name)
        if found and start_time(int(found[1])) != int(found[2]):
            file.unlink(missing_ok=True)
