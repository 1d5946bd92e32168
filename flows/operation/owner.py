"""Which process a deployment's run belongs to: written at its start, so that others can tell whether it still lives.

Prefect knows a run's process by its number alone, and not on which machine. A process that was taken for dead, as on a
machine that woke up again, finds that the run is its no more and goes no further.
"""

import os
import socket
from pathlib import Path

import httpx
from prefect import get_client, get_run_logger
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import Abort

from tasks.toolchain.processes import start_time

OWNER = "enginehouse.owner"
"""The label of a run: machine, process and when that began."""


def sign() -> None:
    """Write down that this process runs the present run, where that is a deployment's."""
    run = _present()
    if run is not None:
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(run.id, {OWNER: f"{_machine()} {_life(os.getpid())}"})


def owner_lives(run: FlowRun) -> bool | None:
    """Whether the process that runs it lives; `None` where that is another machine's, or it has not begun."""
    machine, _, life = str(run.labels.get(OWNER, "")).rpartition(" ")
    if machine != _machine():
        return None
    pid = int(life.partition("@")[0])
    return life == _life(pid)


def require_ours() -> None:
    """End this process's part where the run was taken from it: cancelled, or resumed elsewhere.

    Asked before each stage of a deployment's run. Each attempt at a run has its number, so a second one shows. Prefect
    is told nothing (`Abort`): what becomes of the run is for whoever has it now to say.
    """
    run = _present()
    if run is None:
        return
    try:
        with get_client(sync_client=True) as client:
            now = client.read_flow_run(run.id)
    except httpx.TransportError:  # a server that restarts takes nothing away
        return
    if now.state is None or not now.state.is_running() or now.run_count != run.run_count:
        state = "unknown" if now.state is None else now.state.name
        told = f"the run {run.id} is {state} (attempt {now.run_count}): this process does not go on with it"
        get_run_logger().warning(told)
        raise Abort(told)


def _present() -> FlowRun | None:
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    return None if run is None or run.deployment_id is None else run


def _machine() -> str:
    # Containers of one machine have hosts' names and process numbers of their own; and a restart ends all processes.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"


def _life(pid: int) -> str:
    # Counted from the boot: by the clock, a process would have begun at another time once the clock is set right.
    return f"{pid}@{start_time(pid)}"
