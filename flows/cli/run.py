"""The commands `run` and `plan`."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from flows import show
from flows.chain import Job, Selection, open_job, survey
from flows.cli.console import Json, Overrides, PipelineFile, err, notes_to_stderr, print_json, print_lines
from flows.cli.flow_process import run_flow
from flows.operation.reports import RunFolder
from flows.release import deploy_steps, propose, settled
from flows.report import markdown, report_of
from tasks import validate
from tasks.artifacts.record import ArtifactRef
from tasks.gates import metric_gates, require
from tasks.stage import Outcome

From = Annotated[
    str | None,
    Parameter(name="--from", help="Begin at this stage; those before it are taken as they were last built."),
]
Until = Annotated[str | None, Parameter(name="--until", help="Stop after this stage.")]
Rebuild = Annotated[
    Sequence[str],
    Parameter(
        name="--rebuild",
        negative=(),
        show_default=False,
        help="Build this stage anew and compare it with what the store has. May be repeated.",
    ),
]
Override = Annotated[
    str | None, Parameter(help="Release although a gate fails, for this reason, which is kept with the release.")
]


def run(
    pipeline: PipelineFile,
    /,
    *,
    start: From = None,
    until: Until = None,
    rebuild: Rebuild = (),
    overrides: Overrides = (),
    override: Override = None,
    as_json: Json = False,
    verbose: Annotated[bool, Parameter(negative=(), help="Show every line that the programs print.")] = False,
) -> None:
    """Run a pipeline: from training to a verified, served model; what is built already is reused."""
    started = time.monotonic()
    with show.RunView(err, verbose=verbose) as view:
        selection = Selection(start=start, until=until, rebuild=frozenset(rebuild))
        job = open_job(pipeline, overrides, selection, view, override=override)
        report = _unchanged(job)
        if report is not None:
            folder = RunFolder.new(job.home, job.pipeline.name)
            report["page"] = str(folder.page)
            report["seconds"] = round(time.monotonic() - started, 3)
            folder.keep(report, markdown(report))
        else:
            request = {
                "pipeline": str(job.pipeline.source),
                "overrides": list(overrides),
                "start": start,
                "until": until,
                "rebuild": list(rebuild),
                "override": override,
            }
            view.waits_for("starting Prefect")
            report = run_flow(job.home, job.pipeline.name, request, view)
    report["seconds"] = round(time.monotonic() - started, 3)
    if as_json:
        print_json(report)
    else:
        print_lines(show.summary(report))


def _unchanged(job: Job) -> dict[str, Any] | None:
    """Return the report of a run that has nothing to do, without Prefect; `None` if there is something."""
    prospects = survey(job)
    if any(prospect.state != "hit" for prospect in prospects):
        return None
    outcomes: list[Outcome] = []
    products: dict[str, ArtifactRef] = {}
    for stage, prospect in zip(job.stages, prospects, strict=False):
        assert prospect.artifact is not None
        products[stage.name] = prospect.artifact
        outcomes.append(Outcome(stage=stage.name, state="reused", artifact=prospect.artifact, seconds=0))
    gates = []
    if "validate" in products:
        gates = validate.judge(job.pipeline, validate.measured(job.store.path(products["validate"])))
        require(gates, consequence="nothing was published, and the champion stays as it was", override=job.override)
    if not job.selection.covers("verify"):
        return report_of(job, outcomes, products, gates)
    served = settled(job, propose(job, products))
    if served is None:
        return None
    gates += metric_gates(job.pipeline.gates, served.metrics)
    require(
        gates, consequence="the model that is served does not pass any more; it goes on serving", override=job.override
    )
    outcomes += [
        Outcome(stage=name, state="reused", artifact=None, seconds=0) for name in ("verify", "publish", "deploy")
    ]
    return report_of(job, outcomes, products, gates, served=served)


def plan(
    pipeline: PipelineFile,
    /,
    *,
    start: From = None,
    until: Until = None,
    rebuild: Rebuild = (),
    overrides: Overrides = (),
    as_json: Json = False,
) -> None:
    """Print what a run would do and why, and do nothing."""
    selection = Selection(start=start, until=until, rebuild=frozenset(rebuild))
    job = open_job(pipeline, overrides, selection, notes_to_stderr)
    surveyed = survey(job)
    prospects = [prospect.to_json() for prospect in surveyed]
    products = {
        stage.name: prospect.artifact
        for stage, prospect in zip(job.stages, surveyed, strict=False)
        if prospect.artifact is not None
    }
    if selection.covers("verify"):
        prospects += _release_prospects(job, products)
    if as_json:
        print_json({"pipeline": job.pipeline.name, "stages": prospects})
    else:
        print_lines(show.plan_view(prospects))


def _release_prospects(job: Job, products: Mapping[str, ArtifactRef]) -> list[dict[str, Any]]:
    names = [name for name in ("verify", "publish", "deploy") if job.selection.covers(name)]

    def prospects(state: str, actions: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
        return [
            {
                "stage": name,
                "state": state,
                "artifact": None,
                "reasons": [],
                "commands": [],
                "actions": list(actions[name]),
            }
            for name in names
        ]

    nothing: dict[str, Sequence[str]] = dict.fromkeys(names, ())
    if len(products) < len(job.stages):
        return prospects("pending", nothing)
    proposal = propose(job, products)
    if settled(job, proposal) is not None:
        return prospects("hit", nothing)
    versions = ", ".join(map(str, proposal.candidate.versions))
    verify = [f"load versions {versions} on a staging server"] if not proposal.is_proven else []
    moved = deploy_steps(job, proposal)
    return prospects("miss", {"verify": verify, "publish": proposal.plan.steps, "deploy": moved})
