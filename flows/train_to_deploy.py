"""The flow `train-to-deploy`: every stage in order, each a Prefect task, with the report as Prefect artifacts."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Literal

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from flows.chain import Job, Selection, open_job, run_stage, survey
from flows.operation import approval, retries
from flows.operation.artifacts import TrainingProgress, keep_failure, name_task_run, publish_report
from flows.operation.log import logged, without_tracebacks
from flows.operation.owner import require_ours, sign
from flows.operation.reports import REJECTED, RUNNING
from flows.parameters import Override, PipelineFile, Reason
from flows.release import Served, refuse_older_data, run_release
from flows.releases import refuse_unfit_plan
from flows.report import markdown, report_of
from tasks import validate
from tasks.artifacts.record import ArtifactRef
from tasks.errors import EnginehouseError, GateResult, Rejected
from tasks.events import Event, Listener, silent
from tasks.gates import require
from tasks.releases import standing
from tasks.stage import FAILED, REUSED, KeyedStage, Outcome
from tasks.targets import target_of

LISTENER: ContextVar[Listener] = ContextVar("LISTENER", default=silent)
"""Whoever runs the flow in this process and wants its events, beside Prefect's log."""

KeyedName = Literal["train", "export", "precision", "preflight", "engine", "triton_config", "validate"]
StageName = Literal[  # in one piece, so that Prefect's form has one list of choices
    "train", "export", "precision", "preflight", "engine", "triton_config", "validate", "verify", "publish", "deploy"
]


def _run_name() -> str:
    return Path(flow_run.parameters["pipeline"]).absolute().parent.name


@flow(name="train-to-deploy", flow_run_name=_run_name, persist_result=False)
def train_to_deploy(
    pipeline: PipelineFile,
    overrides: Sequence[Override] = (),
    start: KeyedName | None = None,
    until: StageName | None = None,
    rebuild: Sequence[KeyedName] = (),
    override: Reason | None = None,
) -> "dict[str, Any] | State[Any]":
    """Take a pipeline from its recipe to a verified model on a server.

    Parameters:
        pipeline: the pipeline file
        overrides: fields to set in place of the file's, each `field.sub=value`
        start: take the stages before this one from the store as they were last built
        until: stop after this stage
        rebuild: build these stages anew though the store has their product
        override: release though a gate fails, for this reason, which is kept with the release
    """
    started = time.monotonic()
    sign()
    without_tracebacks()
    told = _told_to(logged(get_run_logger()), LISTENER.get())
    selection = Selection(start=start, until=until, rebuild=frozenset(rebuild))
    job = open_job(pipeline, overrides, selection, told, override=override)
    check_tools(job)
    listener = _told_to(told, TrainingProgress(job.pipeline.name))
    products, outcomes = dict(job.given), list[Outcome]()
    gates: list[GateResult] = []
    shown: Served | None = None

    def show(served: Served | None) -> None:
        nonlocal shown
        shown = served

    def publish(**changed: Any) -> dict[str, Any]:
        seconds = time.monotonic() - started
        return publish_report(job, report_of(job, outcomes, products, gates, served=shown, seconds=seconds) | changed)

    def page(state: str) -> str:
        return markdown(publish(state=state))

    try:
        for stage in job.stages:
            if job.selection.covers(stage.name):
                products[stage.name] = _build(stage, job, products, listener, outcomes)
        if "validate" in products:
            gates += validate.judge(job.pipeline, validate.measured(job.store.path(products["validate"])))
        if not job.selection.covers("verify"):
            report = publish()
        else:
            publish(state=RUNNING)
        require(gates, consequence="nothing was published, and the champion stays as it was", override=override)
        if job.selection.covers("verify"):
            approve = approval.for_run(job.pipeline, page, listener)
            show(run_release(job, products, listener, _as_task, outcomes, recorded=show, approve=approve))
            report = publish()
    except Rejected as answer:
        publish(state=REJECTED, error=str(answer))
        return approval.rejected(answer)
    except EnginehouseError as error:
        gates += [result for result in getattr(error, "results", ()) if result not in gates]
        with suppress(Exception):  # it is the first error that is to be told
            publish(state=FAILED, error=str(error))
        raise
    if all(outcome.state == REUSED for outcome in outcomes):
        get_run_logger().info("%s: nothing has changed, so nothing was done", job.pipeline.name)
    return report


def _build(
    stage: KeyedStage, job: Job, products: Mapping[str, ArtifactRef], listener: Listener, outcomes: list[Outcome]
) -> ArtifactRef:
    """Run one keyed stage as a task, and add to `outcomes` how it ended."""
    started = time.monotonic()
    try:
        outcome: Outcome = _as_task(stage.name, partial(run_stage, stage, job, products, listener))
    except EnginehouseError:
        seconds = time.monotonic() - started
        outcomes.append(Outcome(stage=stage.name, state=FAILED, artifact=None, seconds=seconds))
        raise
    outcomes.append(outcome)
    assert outcome.artifact is not None
    return outcome.artifact


def check_tools(job: Job) -> None:
    """Raise `ToolMissing` for what the run will need, and `Refused` for a server that the engine will not fit, before
    it works for an hour to find out."""
    # What the store has needs no tool: an engine that was built elsewhere is served from a machine without a GPU.
    for stage, prospect in zip(job.stages, survey(job), strict=False):
        if prospect.state != "hit":
            stage.check(job.pipeline)
    if job.selection.covers("publish"):
        refuse_older_data(job, standing(job.store, job.pipeline.name))
    if job.selection.covers("verify"):
        target = target_of(job.pipeline, job.home)
        target.check()
        refuse_unfit_plan(job.pipeline, target)


def _as_task(name: str, work: Callable[[], Any]) -> Any:
    # Our store answers what is built already; Prefect's cache cannot see into what a stage depends on.
    def run() -> Any:
        result = work()
        name_task_run(name, result)
        return result

    require_ours()
    return task(name=name, cache_policy=NO_CACHE, persist_result=False, **retries.policy())(run)()


def _told_to(*listeners: Listener) -> Listener:
    def listen(event: Event) -> None:
        for each in listeners:
            each(event)

    return listen


train_to_deploy.on_failure(keep_failure)
train_to_deploy.on_crashed(keep_failure)
train_to_deploy.on_cancellation(keep_failure)
