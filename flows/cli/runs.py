"""The commands `enginehouse runs`: what a Prefect server runs for us, from a shell or from CI."""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO

from cyclopts import App, Parameter, validators

from flows import show
from flows.cli.console import HomeFolder, Json, err, home_at, out, print_json
from tasks.errors import ConfigError, Problem

runs = App(name="runs", help="Runs on a Prefect server: list, start, resume, cancel, approve.")

RunId = Annotated[str, Parameter(help="The run's id, or its first characters.")]
Reason = Annotated[str | None, Parameter(help="Why, in your words; kept with the release.")]
By = Annotated[str | None, Parameter(help="Who decides; this machine's user if left out.")]


@runs.command(name="setup")
def runs_setup(
    *,
    pool: Annotated[str, Parameter(help="The work pool's name.")] = "enginehouse",
    kind: Annotated[str, Parameter(name="--type", help="Its type: process, docker or kubernetes.")] = "process",
    home: HomeFolder = None,
) -> None:
    """Make the work pool, and register the automation that marks runs whose process is gone. Changes only what is not
    so already."""
    from flows.operation.api import connected
    from flows.operation.setup import set_up

    with connected(home_at(home), patience=90) as client:  # the command before it has most likely started the server
        changed = set_up(client, pool=pool, kind=kind)
    for line in changed or ["all is set up already"]:
        _say(line)


@runs.command(name="ls")
def runs_ls(
    *,
    state: Annotated[
        Sequence[str],
        Parameter(
            negative=(), show_default=False, help="Only in this state, such as Suspended or crashed. May be repeated."
        ),
    ] = (),
    limit: Annotated[int, Parameter(help="How many at most.", validator=validators.Number(gte=1, lte=200))] = 20,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    from flows.operation.api import connected
    from flows.operation.runs import listing

    with connected(home_at(home)) as client:
        rows = listing(client, states=state, limit=limit)
    if as_json:
        print_json(rows)
        return
    if not rows:
        _say("no run is in that state" if state else "there are no runs")
        return
    lines = [
        [
            row["id"][:8],
            row["deployment"] or row["name"],
            row["state"],
            (row["started"] or "")[:19].replace("T", " "),
            f"{row['seconds']:.0f} s",
            _first_line(row["message"]) if row["type"] != "COMPLETED" else "",
        ]
        for row in rows
    ]
    out.print(show.rows(["run", "of", "state", "started (UTC)", "took", ""], lines, cut=True))


@runs.command(name="show")
def runs_show(run: RunId, /, *, home: HomeFolder = None, as_json: Json = False) -> None:
    """Show one run: its state, its parameters, where it runs, and its report."""
    from flows.operation.api import connected
    from flows.operation.runs import described, find, names_of_deployments
    from flows.operation.summary import report

    with connected(home_at(home)) as client:
        found = find(client, run)
        named = names_of_deployments(client, {found.deployment_id} if found.deployment_id else set())
        told = described(found, named) | {"report": report(client, found)}
    if as_json:
        print_json(told)
        return
    text = told.pop("report")
    told["parameters"] = json.dumps(told["parameters"])
    for line in show.card({name: value for name, value in told.items() if value is not None}):
        out.print(line, soft_wrap=True)
    if text:
        out.print(text, markup=False)


@runs.command(name="start")
def runs_start(
    deployment: Annotated[str, Parameter(help="Such as train-to-deploy/digits.")],
    /,
    *,
    parameters: Annotated[
        Sequence[str],
        Parameter(
            name="--param",
            negative=(),
            show_default=False,
            help="A parameter of the flow: name=value, the value being JSON or text. May be repeated.",
        ),
    ] = (),
    overrides: Annotated[
        Sequence[str],
        Parameter(
            name="--set",
            negative=(),
            show_default=False,
            help="Set a field in place of the pipeline file's: field.sub=value. May be repeated.",
        ),
    ] = (),
    follow: Annotated[
        bool, Parameter(help="Show its log, and end as it ends; Ctrl-C and SIGTERM cancel it then.")
    ] = True,
    summary: Annotated[
        Path | None, Parameter(help="Append how it ended and its report to this file, as Markdown.")
    ] = None,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Start a deployment, follow its log, and end with the exit status of what came of it: what CI calls."""
    from flows.operation import runs as acts
    from flows.operation.api import connected
    from flows.operation.summary import summary as summary_of

    if summary is not None and not follow:
        raise ConfigError("--summary tells how the run has ended: leave out --no-follow")
    given = _parameters(parameters)
    if overrides:
        given["overrides"] = list(overrides)
    with connected(home_at(home)) as client, _opened(summary) as page:
        run = acts.start(client, deployment, given)
        err.print(f"{deployment}: run {run.id} is queued", style="dim")
        if follow:
            before = signal.signal(signal.SIGTERM, _interrupt)
            try:
                run = acts.follow(client, run, lambda line: err.print(line, markup=False), until=acts.at_rest)
            except KeyboardInterrupt:
                err.print("cancelling it", style="yellow")
                acts.cancel(client, run)
                raise
            finally:
                signal.signal(signal.SIGTERM, before)
                if page is not None:
                    page.write(summary_of(client, client.read_flow_run(run.id), deployment) + "\n")
        state = acts.state_of(run)
        error = acts.raised(state) if follow and not state.is_paused() else None
        if error is not None:
            raise error
        if as_json:
            print_json(acts.described(run))
        elif follow and state.is_paused():
            _say(f"it waits for approval: enginehouse runs approve {run.id}, or reject")
        elif follow:
            _say(f"{deployment}: {state.name}")


@runs.command(name="resume")
def runs_resume(
    run: RunId,
    /,
    *,
    force: Annotated[
        bool, Parameter(negative=(), help="Also where the run may still live somewhere; you know that it does not.")
    ] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Let a run that failed, crashed or was cancelled go on; also one still marked as running whose process is gone.

    It begins again with the same parameters: what is built is reused, training goes on from its last checkpoint.
    """
    from flows.operation import runs as acts
    from flows.operation.api import connected

    with connected(home_at(home)) as client:
        resumed = acts.resume(client, acts.find(client, run), force=force)
        _told(acts.described(resumed), "is queued again", as_json)


@runs.command(name="cancel")
def runs_cancel(run: RunId, /, *, home: HomeFolder = None, as_json: Json = False) -> None:
    """Cancel a run, and wait until everything that it has started has ended: at most 75 seconds."""
    from flows.operation import runs as acts
    from flows.operation.api import connected

    with connected(home_at(home)) as client:
        ended = acts.cancel(client, acts.find(client, run))
        _told(acts.described(ended), f"is {acts.state_of(ended).name}", as_json)


@runs.command(name="approve")
def runs_approve(
    run: RunId, /, *, reason: Reason = None, by: By = None, home: HomeFolder = None, as_json: Json = False
) -> None:
    """Let a run that waits for approval go on: its candidate becomes the champion."""
    _decide(run, approve=True, reason=reason, by=by, home=home, as_json=as_json)


@runs.command(name="reject")
def runs_reject(
    run: RunId, /, *, reason: Reason = None, by: By = None, home: HomeFolder = None, as_json: Json = False
) -> None:
    """End a run that waits for approval: its candidate stays a candidate, and nothing is moved."""
    _decide(run, approve=False, reason=reason, by=by, home=home, as_json=as_json)


def _decide(text: str, *, approve: bool, reason: str | None, by: str | None, home: Path | None, as_json: bool) -> None:
    from flows.operation import runs as acts
    from flows.operation.api import connected

    with connected(home_at(home)) as client:
        run = acts.find(client, text)
        acts.decide(client, run, approve=approve, by=by, reason=reason)
        _told(acts.described(client.read_flow_run(run.id)), "is approved" if approve else "is rejected", as_json)


@contextmanager
def _opened(summary: Path | None) -> Iterator[TextIO | None]:
    """The file of the summary, opened before the run: one that cannot be written shall cost no training."""
    if summary is None:
        yield None
        return
    try:
        page = summary.open("a", encoding="utf-8")
    except OSError as error:
        told = f"--summary {summary}: cannot be written: {error.strerror}"
        raise ConfigError(Problem(told, hint="name a file in a folder that is there")) from error
    with page:
        yield page


def _parameters(given: Sequence[str]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise ConfigError(Problem(f"--param {item}: expected name=value", hint="such as --param until=train"))
        try:
            read[name] = json.loads(value)
        except ValueError:
            read[name] = value
    return read


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as `signal` calls it
    raise KeyboardInterrupt


def _told(run: dict[str, Any], what: str, as_json: bool) -> None:
    if as_json:
        print_json(run)
    else:
        _say(f"the run {run['id']} {what}")


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]


def _say(text: str) -> None:
    out.print(text, markup=False, soft_wrap=True)
