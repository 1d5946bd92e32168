"""`approve: before_promote`: a person says yes or no to a verified candidate, in the UI, by command or by the API.

The run is suspended: its process ends, and nothing is held while it waits. When the answer has come it starts again
from the top, where the store answers for all that is done, and finds the answer. The answer belongs to one release: a
run that comes to another candidate asks again. A rejection is a state of its own, neither success nor failure.
"""

from collections.abc import Callable
from typing import Any

from prefect import get_run_logger, suspend_flow_run
from prefect.client.schemas.objects import State, StateType
from prefect.input import RunInput
from prefect.runtime import deployment, flow_run
from pydantic import Field

from flows.operation.reports import RUNNING, WAITING
from flows.release import Served
from flows.words import invoked
from tasks.config import Pipeline
from tasks.errors import Rejected
from tasks.events import Listener, note


class Decision(RunInput):
    """The form."""

    approve: bool = Field(True, description="Whether the candidate becomes the champion.")
    by: str = Field(min_length=1, description="Who decides; kept with the release.")
    reason: str = Field("", description="Why; kept with the release.")


Approve = Callable[[Served], str | None]
"""Asked before the live servers move to a candidate: the reason to record. `None`: not yet, nothing is to be moved."""
Page = Callable[[str], str]
"""Publishes the report as it is then, as that of a run in this state, and returns it as Markdown."""


def for_run(pipeline: Pipeline, page: Page, listener: Listener) -> Approve | None:
    """Return what a run of this pipeline asks before it promotes; nothing where its file does not say so."""
    if pipeline.approve is None:
        return None

    def approve(candidate: Served) -> str | None:
        release = candidate.release
        if deployment.id is None:  # Prefect suspends nothing that it could not start again
            note(
                listener,
                f"{release.ref} is verified and published, and waits for approval: "
                f"`{' '.join(invoked())} releases promote {release.ref} --reason …` makes it the champion",
            )
            return None
        get_run_logger().info(
            "%s waits for approval, for %g hours: in the UI, or enginehouse runs approve|reject %s",
            release.ref,
            pipeline.approve_within_hours,
            flow_run.id,
        )
        decision = suspend_flow_run(
            wait_for_input=Decision.with_initial_data(
                description=f"`{release.ref}` is verified. Shall it be served?\n\n{page(WAITING)}", by=""
            ),
            timeout=max(1, round(3600 * pipeline.approve_within_hours)),
            key=f"{release.ref.pipeline}-release-{release.ref.number}",
        )
        because = f": {decision.reason}" if decision.reason else ""
        if not decision.approve:
            raise Rejected(
                f"{release.ref} was rejected by {decision.by}{because}\n"
                f"it stays as it is, a candidate: `enginehouse releases promote {release.ref}` serves it all the same"
            )
        page(RUNNING)
        return f"approved by {decision.by}{because}"

    return approve


def rejected(answer: Rejected) -> "State[Any]":
    """The state in which a run ends that a person has rejected."""
    return State(type=StateType.FAILED, name=Rejected.__name__, message=str(answer))
