"""Keeps a process from going on with a run that is its no more: one that was cancelled, or resumed elsewhere."""

from prefect import get_client
from prefect.context import FlowRunContext

from tasks.errors import Refused


def require_ours() -> None:
    """Raise `Refused` where the run was taken from this process, as a machine that woke up again would find.

    Asked before each stage of a deployment's run. Each attempt at a run has its number, so a second one shows.
    """
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    if run is None or run.deployment_id is None:
        return
    with get_client(sync_client=True) as client:
        now = client.read_flow_run(run.id)
    if now.state is None or not now.state.is_running() or now.run_count != run.run_count:
        state = "unknown" if now.state is None else now.state.name
        raise Refused(f"the run {run.id} is {state} (attempt {now.run_count}): this process does not go on with it")
