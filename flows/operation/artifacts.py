"""What one sees of a run in Prefect's UI: named task runs, the training's progress, the report, links."""

import base64
import re
import threading
import time
from collections.abc import Mapping
from contextvars import copy_context
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import TaskRunContext
from prefect.flows import Flow
from prefect.settings import get_current_settings

from flows.chain import Job
from flows.operation.reports import CANCELLED, CURVES, FAILED, REJECTED, RunFolder, carried_over
from flows.report import Extras, markdown
from tasks.errors import EnginehouseError, Rejected
from tasks.events import Event
from tasks.home import find_home
from tasks.pipeline_file import load
from tasks.stage import Outcome

BETWEEN_UPDATES = 0.5
"""Seconds: the page is not drawn more often, and an update costs the server some milliseconds."""
IDLE = 10.0
"""Seconds without progress after which the thread that shows it ends."""


def key(*words: str) -> str:
    """An artifact's key: Prefect allows lower-case letters, digits and dashes.

    >>> key("My_Model", "report")
    'my-model-report'
    """
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")


def name_task_run(stage: str, result: object) -> None:
    """Give the task run that is just ending a name that says what came out: `engine: digits/engine@3 (built)`.

    The engine sends the name again with the run's final state, which is why it is changed there and not by a request:
    a request's name would be overwritten.
    """
    context = TaskRunContext.get()
    if context is not None:
        context.task_run.name = task_run_name(stage, result)


def task_run_name(stage: str, result: object) -> str:
    """What a stage's task run is called when it has ended."""
    match result:
        case Outcome():
            return f"{stage}: {result.artifact} ({result.state})"
        case (str() as state, *rest):
            version = getattr(rest[0], "version", None) if rest else None
            return f"{stage}: version {version} ({state})" if version is not None else f"{stage} ({state})"
        case _:
            return stage


class TrainingProgress:
    """Passes a stage's progress on to a progress artifact, from a thread of its own and seldom: nothing waits for it.

    Only the newest event is kept; those in between are of no use to a page that shows one bar. The thread ends by
    itself when nothing comes for a while, whatever became of the training.
    """

    def __init__(self, pipeline: str, stage: str = "train") -> None:
        self._pipeline, self._stage = pipeline, stage
        self._newest: Event | None = None
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._running = False
        self._artifact: UUID | None = None

    def __call__(self, event: Event) -> None:
        """Take an event; microseconds."""
        if event["type"] != "progress" or event["stage"] != self._stage or not event.get("total"):
            return
        with self._lock:
            self._newest = event
            self._wake.set()
            if not self._running:
                # The artifact belongs to the task run of the thread that tells of it, which its context knows.
                threading.Thread(target=copy_context().run, args=(self._work,), daemon=True).start()
                self._running = True

    def _work(self) -> None:
        while True:
            woken = self._wake.wait(IDLE)
            with self._lock:
                event, self._newest = self._newest, None
                self._wake.clear()
                if not woken or event is None:
                    self._running = False
                    return
            try:
                self._show(event)
            except Exception as error:  # noqa: BLE001  # of a picture of the run, never of the run
                get_run_logger().warning("the progress cannot be shown: %s", error)
                return  # and is not tried again: the thread counts as running
            time.sleep(BETWEEN_UPDATES)

    def _show(self, event: Event) -> None:
        percent = min(100.0, 100.0 * event["done"] / event["total"])
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in (event.get("metrics") or {}).items())
        text = f"{self._stage}: {event.get('text', '')}" + (f" ({metrics})" if metrics else "")
        if self._artifact is None:
            name = key(self._pipeline, "training")
            self._artifact = cast("UUID", create_progress_artifact(percent, key=name, description=text))
        else:
            update_progress_artifact(self._artifact, percent, description=text)


def publish_report(job: Job, report: Mapping[str, Any]) -> dict[str, Any]:
    """Show the report in Prefect's UI, and keep it in the home; returns it with the place of its page there.

    What an earlier part of this run had reported as its work stays its work.
    """
    folder = run_folder(job)
    report = carried_over(report, folder.last()) | {"page": str(folder.page)}
    run_url, curves = _run_url(), _curves(job, report)
    extras = Extras.of(job, report, run=run_url)
    page = markdown(report, extras, curves=CURVES if curves else None)
    folder.keep(report, page, curves)
    name = report["pipeline"]
    create_table_artifact(
        key=key(name, "stages"),
        table=[
            {column: str(row[column] or "") for column in ("stage", "state", "artifact", "seconds")}
            for row in report["stages"]
        ],
        description="What each stage of the run did.",
    )
    create_table_artifact(
        key=key(name, "metrics"),
        table=[
            {"metric": metric, **{runtime: f"{value:.6f}" for runtime, value in values.items()}}
            for metric, values in report["metrics"].items()
        ],
        description="The recipe's metric on the test data, per runtime.",
    )
    # Within the page itself: the server of the UI has no way to the files of this machine.
    picture = None if curves is None else f"data:image/png;base64,{base64.b64encode(curves.read_bytes()).decode()}"
    create_markdown_artifact(
        key=key(name, "report"), markdown=markdown(report, extras, curves=picture), description="The run's report."
    )
    if (release := report["release"]) is None:
        return report
    model = f"{release['model']} version {release['version']}"
    if run_url is not None:
        create_link_artifact(
            link=run_url,
            link_text="the run that made it",
            key=key(release["name"]),
            description=f"Made {model}.",
        )
    if report["served"] is not None:
        create_link_artifact(
            link=f"{report['served']['http']}/v2/models/{release['model']}",
            link_text=f"{model} on Triton",
            key=key(name, "served"),
            description=f"What the served model says of itself; it was released as `{release['name']}`.",
        )
    return report


def run_folder(job: Job) -> RunFolder:
    """The folder of the flow run that this is part of."""
    return RunFolder.new(job.home, job.pipeline.name, runtime.flow_run.scheduled_start_time)


def keep_failure(flow: "Flow[..., Any]", flow_run: FlowRun, state: "State[Any]") -> None:  # noqa: ARG001  # Prefect's
    """Hook of a flow's bad end: keep in the home that the run did not reach its own."""
    try:
        pipeline = load(Path(flow_run.parameters["pipeline"]), flow_run.parameters.get("overrides") or ())
    except (EnginehouseError, KeyError, TypeError):
        return  # which pipeline it was cannot be told; the flow's state says why
    moment = flow_run.expected_start_time or datetime.now(UTC)
    folder = RunFolder.new(find_home(pipeline.folder), pipeline.name, moment)
    name = state.name or state.type.value
    word = {StateType.FAILED: FAILED, StateType.CANCELLING: CANCELLED, StateType.CANCELLED: CANCELLED}.get(state.type)
    if name == Rejected.__name__:
        word = REJECTED
    folder.fail(pipeline.name, word or name.lower(), state.message or name)


def _run_url() -> str | None:
    url: str | None = runtime.flow_run.ui_url
    return url if get_current_settings().server.ui.enabled else None


def _curves(job: Job, report: Mapping[str, Any]) -> Path | None:
    trained = next((row["artifact"] for row in report["stages"] if row["stage"] == "train"), None)
    if trained is None:
        return None
    ref = job.store.resolve(trained)
    return job.store.byproduct(ref, CURVES) if CURVES in job.store.get_record(ref).byproducts else None
