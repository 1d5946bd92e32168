"""Which failed stages are tried again: those whose cause may pass by itself; and how often, when nobody watches."""

from collections.abc import Sequence
from typing import Any

from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import deployment
from prefect.tasks import Task

from tasks.errors import EnginehouseError

DELAYS: Sequence[float] = (5, 60)
"""Seconds before the second and the third try: for a server that restarts, and for a machine that does."""


def passes(error: object) -> bool:
    """Whether the same may go well in a while. What is no error of ours is one of programming, and never passes."""
    return isinstance(error, EnginehouseError) and error.passes


def policy() -> dict[str, Any]:
    """What `prefect.task` takes. None for a run that a person started and watches: they read at once what is wrong."""
    if deployment.id is None:
        return {}
    return {"retries": len(DELAYS), "retry_delay_seconds": list(DELAYS), "retry_condition_fn": _again}


def _again(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:  # noqa: ARG001 - as Prefect calls it
    return passes(state.result(raise_on_failure=False))
