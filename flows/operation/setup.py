"""What a Prefect server needs besides deployments: the work pool, and the automation that finds dead runs."""

from datetime import timedelta
from typing import Any, cast

from prefect.automations import Automation
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from flows.operation.runs import ENDS, HEARTBEAT, MISSED, WAITS
from tasks.errors import ConfigError, Problem

POOL = "enginehouse"
FLOWS = ("train-to-deploy", "ls", "show", "promote", "rollback", "pin", "repair", "gc", "check-drift")
"""What our flows are called."""
DEAD_RUNS = "enginehouse: mark dead runs as crashed"


def set_up(client: SyncPrefectClient, *, pool: str = POOL, kind: str = "process") -> list[str]:
    """Bring the server to what this version wants, and say what was changed; nothing where all is so already."""
    changed = []
    try:
        found = client.read_work_pool(pool)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=pool, type=kind))
        changed.append(f"made the work pool {pool}, of the type {kind}")
    else:
        if found.type != kind:
            raise ConfigError(
                Problem(
                    f"the work pool {pool} is of the type {found.type}, not {kind}", hint="name another with --pool"
                )
            )
    wanted = dead_runs()
    there: Automation | None
    try:
        there = cast("Automation", Automation.read(name=DEAD_RUNS))  # no coroutine where no loop runs
    except (ObjectNotFound, ValueError):
        there = None
    if there is None:
        wanted.create()
        changed.append(f"registered the automation “{DEAD_RUNS}”")
    elif _core(there) != _core(wanted):
        wanted.id, wanted.enabled = there.id, there.enabled
        wanted.update()
        changed.append(f"renewed the automation “{DEAD_RUNS}”")
    return changed


def dead_runs() -> Automation:
    """The automation: after a sign of life neither another one nor an end, for three heartbeats."""
    heartbeat = "prefect.flow-run.heartbeat"
    return Automation(
        name=DEAD_RUNS,
        description="A run whose process, worker or machine is gone would stay Running for ever. "
        "`enginehouse runs resume` goes on with it.",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            # A flow of somebody else's may have heartbeats further apart, and live.
            match_related=ResourceSpecification({"prefect.resource.role": "flow", "prefect.resource.name": [*FLOWS]}),
            after={heartbeat},
            expect={heartbeat, *(f"prefect.flow-run.{state}" for state in (*ENDS, *WAITS))},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=MISSED * HEARTBEAT,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"No sign of life for {MISSED * HEARTBEAT / timedelta(seconds=1):.0f} s: its process is gone.",
            )
        ],
    )


def _core(automation: Automation) -> dict[str, Any]:
    told = automation.model_dump(mode="json", include={"description", "trigger", "actions"})
    told["trigger"] = {
        name: sorted(value) if isinstance(value, list) else value
        for name, value in told["trigger"].items()
        if name in ("match", "match_related", "after", "expect", "for_each", "posture", "threshold", "within")
    }
    return told
