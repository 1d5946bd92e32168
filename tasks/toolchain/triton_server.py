"""Starts, observes and ends Triton servers on this machine.

Both kinds run with explicit model control, and with

- `--disable-auto-complete-config`: what is served is what the release's config says, and nothing a backend guesses;
- `--exit-on-error=false`: a server that restarts serves every model that can be served, not none because of one; and on
  staging too, the server itself then tells why a model fails, where it otherwise had to be read from a log;
- `--strict-readiness=true`: ready means that all its models are.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.errors import CommandFailed, NotReady, Refused
from tasks.toolchain import triton_client, triton_token
from tasks.toolchain.command import last_lines
from tasks.toolchain.processes import boot_id, end, end_session, find_free_ports, is_free, listener, start_time
from tasks.toolchain.supervised import PROGRAMS
from tasks.toolchain.triton_installation import TritonInstallation
from tasks.toolchain.triton_record import FORMAT, ServerRecord, lives, read_record

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Triton's python backend puts its regions
PROTOCOLS = ("HTTP", "gRPC", "metrics")
"""In the order of the ports."""
DRAIN_SECONDS = 10
"""How long a server that ends waits for requests under way (`--exit-timeout-secs`; its default is 30)."""


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
    arguments: Sequence[str] = (),
) -> ServerRecord:
    """Starts a server that outlives us, recorded in `folder/<name>.json`, with its log in `folder/<name>.log`.

    It loads `models`. A port of None is chosen free. `arguments` go to tritonserver as they are. Returns when the
    process runs, not when it is ready. On an address that others can reach, it loads and lists models only for whoever
    has the token in `folder/<name>.token`, which is in no record and in no error.

    Raises NotReady for an occupied port (naming it and who listens), Refused where a server of that name runs already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    former = read_record(path)
    if former is not None and not lives(former):
        remove_shared_memory(former.shm_prefix)
    planned = plan(
        installation,
        repository=repository,
        models=models,
        log=folder / f"{name}.log",
        name=name,
        host=host,
        ports=_ports(host, http_port, grpc_port, metrics_port),
        prefix=f"enginehouse_served_{uuid.uuid4().hex[:8]}_",
        arguments=arguments,
    )
    # The mark keeps the supervisor of the run that starts it from ending it together with the run.
    environment = os.environ | dict(installation.environment) | {"ENGINEHOUSE_OUTLIVES": str(path.absolute())}
    token = path.with_suffix(".token")
    path.with_suffix(".token").unlink(missing_ok=True)
    secret = triton_token.arguments(triton_token.make_token(token)) if triton_token.is_exposed(host) else []
    order = {
        "argv": [*planned["argv"], *secret],
        "env": environment,
        "cwd": str(folder.absolute()),
        "log": planned["log"],
        "record": str(path.absolute()),
        "fields": {"format": FORMAT, **planned},
    }
    # A session of its own: what is sent to our process group while it starts must not tear it apart.
    launched = subprocess.run(
        [sys.executable, "-I", "-S", str(PROGRAMS / "launch.py")],
        input=json.dumps(order).encode(),
        env=environment,
        capture_output=True,
        timeout=60,
        start_new_session=True,
        check=False,
    )
    if launched.returncode != 0:
        _refuse(name, planned["argv"], launched)
    record = read_record(path)
    if record is None:
        raise NotReady(f"the Triton server {name} was started, and its record {path} removed by somebody else")
    return record


def wait_ready(record: ServerRecord, *, timeout: float) -> None:
    """Waits until the server answers and every model that it was started with is ready.

    Raises NotReady with the log's last lines as soon as the process has died or a model could not be loaded, or when
    `timeout` seconds have passed. Does not end the server.
    """
    deadline = time.monotonic() + timeout
    if not server_is_live(record, timeout=timeout):
        raise _not_live(record, timeout)
    while time.monotonic() < deadline:
        waiting = [model for model in record.models if not triton_client.model_ready(record.address, model)]
        if not waiting and triton_client.server_ready(record.address):
            return
        _raise_failed(record, waiting)
        if not lives(record):
            raise _not_live(record, timeout)
        time.sleep(0.05)
    raise NotReady(
        f"after {timeout:g} s the Triton server {record.name} is not ready",
        log=record.log,
        last_lines=last_lines(record.log),
    )


def server_is_live(record: ServerRecord, *, timeout: float) -> bool:
    """Waits until the server answers over HTTP; False as soon as its process has died, or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not triton_client.server_live(record.address):
        if not lives(record) or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def stop(record: ServerRecord, *, grace: float = 15.0) -> None:
    """Ends the server: SIGTERM, after `grace` seconds SIGKILL, in any case the processes that ran its models; then
    removes what it left in /dev/shm, and its record. What is gone already is no error.

    Raises Refused where it belongs to another user.
    """
    if record.boot_id == boot_id():
        try:
            end(record.pid, record.start_time, grace=grace)
            if start_time(record.pid) is None:
                end_session(record.pid)
        except PermissionError:
            raise Refused(
                f"the Triton server {record.name} (pid {record.pid}) belongs to another user; end it as that one"
            ) from None
    remove_shared_memory(record.shm_prefix)
    with contextlib.suppress(FileNotFoundError):
        current = read_record(record.path)
        if current is not None and (current.pid, current.start_time) == (record.pid, record.start_time):
            record.path.unlink()


def plan(
    installation: TritonInstallation,
    *,
    repository: Path,
    models: Sequence[str],
    log: Path,
    name: str,
    host: str,
    ports: Sequence[int],
    prefix: str,
    arguments: Sequence[str],
) -> dict[str, Any]:
    """A record's JSON without the process's identity."""
    http_port, grpc_port, metrics_port = ports
    return {
        "name": name,
        "host": host,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "metrics_port": metrics_port,
        "repository": str(repository.absolute()),
        "models": list(models),
        "argv": [
            str(installation.tritonserver),
            *installation.arguments,
            f"--model-repository={repository.absolute()}",
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in models),
            "--disable-auto-complete-config",
            "--exit-on-error=false",
            "--strict-readiness=true",
            f"--exit-timeout-secs={DRAIN_SECONDS}",
            *(f"--{protocol}-address={host}" for protocol in ("http", "grpc", "metrics")),
            *(f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"),
            f"--backend-config=python,shm-region-prefix-name={prefix}",
            *arguments,
        ],
        "log": str(log.absolute()),
        "version": installation.version,
        "backends": installation.backends,
        "shm_prefix": prefix,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _ports(host: str, *wanted: int | None) -> list[int]:
    """The ports to use, HTTP, gRPC and metrics; free ones for those that are not given."""
    for port, protocol in zip(wanted, PROTOCOLS, strict=True):
        if port is not None and not is_free(port, host):
            raise NotReady(_occupied(host, port, protocol))
    free = iter(find_free_ports(len(wanted), host))
    return [next(free) if port is None else port for port in wanted]


def _occupied(host: str, port: int, protocol: str) -> str:
    who = listener(port)
    return (
        f"port {port} on {host}, which the Triton server shall use for {protocol}, is taken"
        f"{f' by {who}' if who else ''}\nend that process, name another port, or name none to have a free one chosen"
    )


def _refuse(name: str, argv: Sequence[str], launched: subprocess.CompletedProcess[bytes]) -> None:
    try:
        said = json.loads(launched.stdout)
    except ValueError:
        said = {"error": launched.stderr.decode(errors="replace").strip() or f"exit status {launched.returncode}"}
    if "running" in said:
        raise Refused(f"a Triton server {name} runs already (pid {said['running']}): end it first")
    raise CommandFailed(f"starting the Triton server {name}", argv=argv, ended=f"could not be started: {said['error']}")


def _not_live(record: ServerRecord, timeout: float) -> NotReady:
    tail = last_lines(record.log)
    if lives(record):
        message = f"after {timeout:g} s the Triton server {record.name} does not answer at {record.address.http_url}"
    else:
        message = f"the Triton server {record.name} ended before it was ready"
        ports = zip((record.http_port, record.grpc_port, record.metrics_port), PROTOCOLS, strict=True)
        taken = [_occupied(record.host, port, protocol) for port, protocol in ports if not is_free(port, record.host)]
        message = "\n".join([message, *taken])
    return NotReady(message, log=record.log, last_lines=tail)


def _raise_failed(record: ServerRecord, waiting: Sequence[str]) -> None:
    """Raises NotReady where the server will not get any of these models ready by itself.

    It answers no one before it has tried all that it was started with, so what is not loading by now has failed.
    """
    states = triton_client.repository_index(record.address)
    failed = []
    for model in waiting:
        own = [state for state in states if state.name == model]
        if any(state.state in ("READY", "LOADING") for state in own):
            continue
        failed += [f"{model} version {state.version}: {state.reason}" for state in own if state.reason] or [
            f"{model}: {'its config.pbtxt is refused' if own else f'it is not in {record.repository}'}"
        ]
    if failed:
        raise NotReady(
            f"the Triton server {record.name} could not load\n" + "\n".join(failed),
            log=record.log,
            last_lines=last_lines(record.log),
            passes=False,
        )


def remove_shared_memory(prefix: str) -> None:
    """Removes what Triton's python backend left; only after its processes are gone."""
    for file in SHARED_MEMORY.glob(f"{prefix}*"):
        file.unlink(missing_ok=True)
