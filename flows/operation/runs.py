"""Flow runs on a Prefect server: found, started, followed, resumed, cancelled, decided on."""

import getpass
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    FlowRunFilter,
    FlowRunFilterState,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.sorting import FlowRunSort, LogSort
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.states import Cancelled, Cancelling, Crashed, Scheduled

from flows.operation.api import page, refusals
from flows.operation.owner import owner_lives
from tasks import errors
from tasks.errors import ConfigError, EnginehouseError, NotReady, Problem, Refused, Told

HEARTBEAT = timedelta(seconds=30)
"""What `prefect.yaml` sets as PREFECT_FLOWS_HEARTBEAT_FREQUENCY."""
MISSED = 3
"""A run that has missed so many heartbeats is taken for dead."""
GRACE = 75.0
"""Seconds in which a cancelled run's processes have ended: Prefect kills the flow 30 s after it asked it to end, the
supervisor kills what the flow had started, and a worker looks for cancellations every few seconds."""
POLL = 0.5
STARTS_WITHIN = timedelta(minutes=2)
"""A run that a worker has taken, and that has not begun by then, is taken for dead."""
CRASH_SETTLES = timedelta(seconds=15)
TAKEN_WITHIN = 30.0
"""Seconds after which whoever follows a run is told that no worker has taken it: they look every 10 or 15."""
SILENT_FOR = 60.0
"""Seconds for which a server may be away under a run that is followed."""
LATE_LINES = 10.0
"""Seconds in which the last lines of a run that has ended arrive: Prefect sends them every two. They are waited for
only where the line does not come that is the last of a run that was not ended from outside."""

FAILURES = ("Failed", "TimedOut")
ENDS = ("Completed", *FAILURES, "Cancelled", "Crashed", errors.Rejected.__name__)
WAITS = ("Suspended", "Paused", "Scheduled", "AwaitingRetry", "Late", "AwaitingConcurrencySlot", "Resuming")
"""A run in one of these states has no process that could give a sign of life."""
NAMES = (*ENDS, *WAITS, "Running", "Retrying", "Pending", "Submitting", "Cancelling")
"""What Prefect calls the states that our runs come through; one type of state has several names."""

UNDER_WAY = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)
WITHOUT_PROCESS = (StateType.SCHEDULED, StateType.PAUSED)
AGAIN = (StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)

_SHORT = re.compile(r"[0-9a-f]{4,}(-[0-9a-f-]*)?")
_LONG = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DEPLOYMENTS = (
    "`prefect deployment ls` shows those there are, `prefect deploy --all` beside a prefect.yaml registers more"
)
_FINISHED = "Finished in state"
"""In the last line of a run that was not ended from outside."""
_RAISED = re.compile(r"exception: (\w+): ")


def state_of(run: FlowRun) -> State[Any]:
    """A run's state; one that was just made has none for a moment."""
    return run.state or Scheduled()


def listing(client: SyncPrefectClient, *, states: Sequence[str] = (), limit: int = 20) -> list[dict[str, Any]]:
    """The newest runs, newest first."""
    wanted = None
    if states:
        wanted = FlowRunFilter(state=in_states(states))
    runs = client.read_flow_runs(flow_run_filter=wanted, sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=limit)
    named = names_of_deployments(client, {run.deployment_id for run in runs if run.deployment_id})
    return [described(run, named) for run in runs]


def in_states(states: Sequence[str]) -> FlowRunFilterState:
    """What picks runs in these states, each by its name as `listing` shows it or by its type.

    A rejected run is of Prefect's type of failed ones, and is none: it has its own name only.
    """
    types = {kind.value.lower(): kind for kind in StateType if kind != StateType.FAILED}
    names = {name.lower(): [name] for name in NAMES if name.lower() not in types} | {"failed": [*FAILURES]}
    if unknown := [state for state in states if state.lower() not in {*types, *names}]:
        raise ConfigError(Problem(f"no state {unknown[0]}", hint=f"one of {', '.join([*types, *names])}"))
    either = {
        "type": {"any_": [types[state.lower()] for state in states if state.lower() in types]},
        "name": {"any_": [name for state in states for name in names.get(state.lower(), ())]},
    }
    return FlowRunFilterState.model_validate({**either, "operator": "or_"})


def names_of_deployments(client: SyncPrefectClient, ids: set[UUID]) -> Mapping[UUID, str]:
    """The names of deployments, by their ids."""
    if not ids:
        return {}
    found = client.read_deployments(deployment_filter=DeploymentFilter.model_validate({"id": {"any_": list(ids)}}))
    return {each.id: each.name for each in found}


def described(run: FlowRun, deployments: Mapping[UUID, str] | None = None) -> dict[str, Any]:
    """A run as JSON."""
    state = state_of(run)
    began = run.start_time or run.expected_start_time
    return {
        "id": str(run.id),
        "name": run.name,
        "deployment": (deployments or {}).get(run.deployment_id) if run.deployment_id else None,
        "state": state.name,
        "type": state.type.value,
        "message": state.message,
        "started": None if began is None else began.isoformat(timespec="seconds"),
        "seconds": round(run.total_run_time.total_seconds(), 1),
        "attempts": run.run_count,
        "parameters": run.parameters,
        "where": run.infrastructure_pid,
        "page": page("runs/flow-run", run.id),
    }


def find(client: SyncPrefectClient, text: str) -> FlowRun:
    """The run with that id, or the only recent one whose id begins so. Raises `ConfigError`."""
    text, hint = text.lower(), "`enginehouse runs ls` shows them"
    if not _SHORT.fullmatch(text):
        raise ConfigError(Problem(f"{text} is no id of a run", hint=f"4 characters or more of one; {hint}"))
    if _LONG.fullmatch(text):
        with refusals(f"run {text}", hint=hint):
            return client.read_flow_run(UUID(text))
    recent = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=200)
    found = [run for run in recent if str(run.id).startswith(text)]
    if len(found) != 1:
        what = "no recent run" if not found else f"{len(found)} runs"
        raise ConfigError(Problem(f"{what} with an id that begins with {text}", hint=hint))
    return found[0]


def start(client: SyncPrefectClient, deployment: str, parameters: Mapping[str, Any]) -> FlowRun:
    """Queue a run of a deployment. Raises `ConfigError` naming the parameter that its schema refuses."""
    if deployment.count("/") != 1:
        raise ConfigError(
            Problem(
                f"{deployment} is no name of a deployment: expected FLOW/NAME",
                hint=f"such as train-to-deploy/{deployment.rpartition('/')[2] or 'digits'}; {_DEPLOYMENTS}",
            )
        )
    with refusals(f"deployment {deployment}", hint=_DEPLOYMENTS):
        found = client.read_deployment_by_name(deployment)
    known = dict(found.parameter_openapi_schema or {}).get("properties", {})
    for name in parameters:  # the server takes what it does not know, and the flow then fails on it
        if known and name not in known:
            raise ConfigError(Problem(f"{deployment}: no parameter {name}", hint=f"it has {', '.join(known)}"))
    with refusals(deployment):
        return client.create_flow_run_from_deployment(found.id, parameters=dict(parameters))


def follow(
    client: SyncPrefectClient, run: FlowRun, on_line: Callable[[str], None], *, until: Callable[[State[Any]], bool]
) -> FlowRun:
    """Give each line of the run's log until its state satisfies `until`; then the run as it is."""
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
    seen: set[UUID] = set()
    finished, last_look = False, None
    untaken_since: float | None = time.monotonic()
    heard = time.monotonic()
    while True:
        try:
            run = client.read_flow_run(run.id)
            lines = client.read_logs(wanted, limit=200, offset=max(0, len(seen) - 100), sort=LogSort.TIMESTAMP_ASC)
        except httpx.TransportError:  # the run itself outlives a server that restarts
            if time.monotonic() - heard > SILENT_FOR:
                raise
            time.sleep(POLL)
            continue
        heard = time.monotonic()
        if state_of(run).type != StateType.SCHEDULED:
            untaken_since = None
        elif untaken_since is not None and time.monotonic() - untaken_since > TAKEN_WITHIN:
            on_line(_untaken(run))
            untaken_since = None  # told once
        # A run's lines are sent in batches, so that some come late, and some after it has ended.
        for line in lines:
            if line.id not in seen:
                seen.add(line.id)
                on_line(line.message)
                finished = _FINISHED in line.message
        if last_look is None and until(state_of(run)):
            last_look = time.monotonic() + LATE_LINES
        if last_look is not None and (finished or time.monotonic() > last_look):
            return run
        time.sleep(POLL)


def _untaken(run: FlowRun) -> str:
    if state_of(run).name == "AwaitingConcurrencySlot":
        return "it waits for another run of this deployment to end; `enginehouse runs ls` shows it"
    pool = run.work_pool_name or "its work pool"
    return f"no worker has taken it yet: `prefect worker start --pool {pool}`, or `enginehouse up --worker`, starts one"


def at_rest(state: State[Any]) -> bool:
    """Whether a run goes no further by itself: it has ended, or waits for a person."""
    return state.is_final() or state.is_paused()


def raised(state: State[Any]) -> EnginehouseError | None:
    """The error with which a run has ended, with its kind and exit status; `None` for one that has gone well."""
    if state.is_completed():
        return None
    message = state.message or state.name or ""
    if state.name == errors.Rejected.__name__:
        return errors.Rejected(message)
    named = _RAISED.search(message)
    kind = getattr(errors, named[1], None) if named else None
    if isinstance(kind, type) and issubclass(kind, EnginehouseError):
        assert named is not None
        return Told(message[named.end() :], kind=kind.kind, exit_status=kind.exit_status)
    return Told(message, kind=(state.name or "failed").lower(), exit_status=1)


def resume(client: SyncPrefectClient, run: FlowRun, *, force: bool = False) -> FlowRun:
    """Let a run that has failed, crashed or been cancelled begin again, with the same parameters.

    What is done already the store answers for. One that is still marked as running though its process is gone is marked
    as crashed first. Raises `Refused` for one that may still live, has gone well, or waits for something else.
    """
    state = state_of(run)
    if state.type in UNDER_WAY:
        if not force and (why := may_live(client, run)) is not None:
            raise Refused(
                f"the run {run.id} is {state.name}, and {why}\n"
                "cancel it with `enginehouse runs cancel`; or, if you know that it is gone, --force"
            )
        _set(client, run, Crashed(message="Its process is gone; it was resumed by a person."))
    elif state.is_paused():
        raise Refused(f"the run {run.id} waits for approval: `enginehouse runs approve {run.id}`, or reject")
    elif state.type not in AGAIN:
        raise Refused(f"the run {run.id} is {state.name}: there is nothing to resume")
    ended = raised(state)
    if ended is not None and ended.kind == errors.Rejected.kind:
        raise Refused(
            f"the run {run.id} was rejected, and the answer stays with it\n"
            "start another, which asks again: `enginehouse runs start`"
        )
    if run.deployment_id is None:
        raise Refused(
            f"the run {run.id} belongs to no deployment, so no worker can go on with it\n"
            "start what began it once more: it goes on from the last product, training from its last checkpoint"
        )
    # A worker whose run was killed tries to report the crash a second time, some seconds later. That would undo what is
    # done here, and the process that had begun meanwhile would be one too many.
    if (state.message or "").startswith("Process exited"):
        time.sleep(max(0.0, (CRASH_SETTLES - (datetime.now(UTC) - state.timestamp)).total_seconds()))
    _set(client, run, Scheduled(name="AwaitingRetry", message=f"Resumed by {person()}."))
    return client.read_flow_run(run.id)


def may_live(client: SyncPrefectClient, run: FlowRun) -> str | None:
    """Why a run that is marked as running may really do so; `None` where its process is gone."""
    lives = owner_lives(run)
    if lives is not None:
        return f"its process {run.infrastructure_pid} lives on this machine" if lives else None
    last, state = last_heartbeat(client, run), state_of(run)
    if last is None and state.type == StateType.PENDING:  # its process had not come so far as to say that it lives
        waited = datetime.now(UTC) - state.timestamp
        return f"it was given to a worker {waited.total_seconds():.0f} s ago" if waited < STARTS_WITHIN else None
    if last is None:
        return "it has given no sign of life by which to tell (PREFECT_FLOWS_HEARTBEAT_FREQUENCY)"
    silent = datetime.now(UTC) - last
    if silent < MISSED * HEARTBEAT:
        return f"it gave a sign of life {silent.total_seconds():.0f} s ago"
    return None


def last_heartbeat(client: SyncPrefectClient, run: FlowRun) -> datetime | None:
    """When the run gave its last sign of life."""
    wanted = EventFilter(
        occurred=EventOccurredFilter.model_validate({"since": run.created or datetime.now(UTC) - timedelta(days=7)}),
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
    )
    events = client.read_events(wanted, limit=1).events
    return max((event.occurred for event in events), default=None)


def cancel(client: SyncPrefectClient, run: FlowRun, *, within: float = GRACE) -> FlowRun:
    """Cancel a run, and wait until all its processes have ended.

    Where no worker is left to do it, and the run's process is gone too, it is marked as cancelled. Raises `NotReady`
    where the process goes on.
    """
    run = client.read_flow_run(run.id)  # what the caller knows of it may be old
    if state_of(run).is_final():
        raise Refused(f"the run {run.id} has ended: {state_of(run).name}")
    if state_of(run).type in WITHOUT_PROCESS:  # nobody would answer to `Cancelling`
        _set(client, run, Cancelled(message=f"Cancelled by {person()} before it went on."), force=False)
    elif state_of(run).type != StateType.CANCELLING:
        _set(client, run, Cancelling(message=f"Cancelled by {person()}."), force=False)
    try:
        return _wait_cancelled(client, run, within)
    except KeyboardInterrupt:
        told = f"the run {run.id} was asked to end, and may not have ended yet: `enginehouse runs show {run.id}` tells"
        raise KeyboardInterrupt(told) from None


def _wait_cancelled(client: SyncPrefectClient, run: FlowRun, within: float) -> FlowRun:
    deadline = time.monotonic() + within
    while not state_of(run := client.read_flow_run(run.id)).is_final():
        if time.monotonic() > deadline:
            if (why := may_live(client, run)) is not None:
                raise NotReady(f"after {within:g} s the run {run.id} has not ended, and {why}: does its worker run?")
            _set(client, run, Cancelled(message="No worker was left to cancel it; its process is gone."))
        time.sleep(POLL)
    return run


def decide(client: SyncPrefectClient, run: FlowRun, *, approve: bool, by: str | None, reason: str | None) -> None:
    """Answer a run that waits for approval. Raises `Refused` for one that does not, or does not any more."""
    if not state_of(run).is_paused():
        raise Refused(f"the run {run.id} does not wait for approval: it is {state_of(run).name}")
    answer = {"approve": approve, "by": by or person(), "reason": reason or ""}
    with refusals(f"the run {run.id}"):
        response = client.resume_flow_run(run.id, run_input=answer)
    if response.status != SetStateStatus.ACCEPT:
        raise Refused(f"the run {run.id} was not resumed: {getattr(response.details, 'reason', response.status)}")


def person() -> str:
    """Who acts."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _set(client: SyncPrefectClient, run: FlowRun, state: State[Any], *, force: bool = True) -> None:
    with refusals(f"run {run.id}"):
        result = client.set_flow_run_state(run.id, state, force=force)
    if result.status == SetStateStatus.ABORT:
        raise Refused(f"the run {run.id} cannot become {state.name}: {getattr(result.details, 'reason', '')}")
