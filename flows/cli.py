"""The command `enginehouse`; the only place that exits."""

import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, validators
from rich.console import RenderableType
from rich.text import Text

from flows import local, show
from flows.chain import Job, Selection, open_job, survey
from flows.release import propose, settled
from flows.releases_cli import releases
from flows.report import report_of
from flows.runs_cli import runs
from flows.words import invoked
from tasks import validate
from tasks.artifacts.durable import reported
from tasks.artifacts.record import ArtifactRef, BuildRecord
from tasks.artifacts.store import ArtifactStore
from tasks.errors import ArtifactCorrupt, CommandFailed, ConfigError, EnginehouseError, ToolMissing
from tasks.events import Event, Listener, note
from tasks.gates import metric_gates, require
from tasks.home import Home, find_home
from tasks.stage import Outcome
from tasks.toolchain import command

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it (128 + SIGINT)."""

EXIT_STATUS = """\
Exit status:
  0    done
  1    an error of programming in Enginehouse: please report it
  2    configuration: the pipeline file, the recipe or the command line is wrong
  3    a tool is missing
  4    a command failed
  5    a gate failed, or an export was refused
  6    a server is not ready
  7    an artifact is corrupt, or not reproducible
  8    the store or the model repository cannot be used
  9    refused, since it would overwrite or break something that exists
  10   rejected by the person who was asked for approval
  130  interrupted
"""

out = show.console()
err = show.console(stderr=True)

app = App(
    name="enginehouse",
    help="Takes a PyTorch model from training to a verified model on Triton Inference Server.",
    version=lambda: metadata.version("enginehouse"),
    help_epilogue=EXIT_STATUS,
    help_format="plaintext",
    console=show.help_console(),
    suppress_keyboard_interrupt=False,  # `main` tells what became of the run
)
artifacts = App(name="artifacts", help="What was built: list, show, check, clean up.")
serve = App(name="serve", help="Triton servers on this machine.")
engine = App(name="engine", help="The tools that engines are built with.")
app.command(artifacts)
app.command(serve)
app.command(releases)
app.command(engine)
app.command(runs)

PipelineFile = Annotated[Path, Parameter(help="The pipeline file.")]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON value on standard output.")]
Overrides = Annotated[
    Sequence[str],
    Parameter(
        name="--set",
        negative=(),
        show_default=False,
        help="Set a field in place of the file's: field.sub=value. May be repeated.",
    ),
]
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
HomeFolder = Annotated[
    Path | None,
    Parameter(name="--home", help="The folder with the store; found from the current folder if left out."),
]


@app.command
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
        if report is None:
            request = {
                "pipeline": str(job.pipeline.source),
                "overrides": list(overrides),
                "start": start,
                "until": until,
                "rebuild": list(rebuild),
                "override": override,
            }
            view.waits_for("starting Prefect")
            report = _run_flow(job.home, job.pipeline.name, request, view)
    report["seconds"] = round(time.monotonic() - started, 3)
    if as_json:
        _print_json(report)
    else:
        _print_lines(show.summary(report))


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


def _run_flow(home: Home, name: str, request: Mapping[str, Any], listener: Listener) -> dict[str, Any]:
    with reported(home.root, "the home"):  # its log grows as long as the run goes
        return _run_logged(home, name, request, listener)


def _run_logged(home: Home, name: str, request: Mapping[str, Any], listener: Listener) -> dict[str, Any]:
    home.runs.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    request_file, log = home.runs / f"{stamp}-{name}.json", home.runs / f"{stamp}-{name}.log"
    request_file.write_text(json.dumps(request))
    ended: dict[str, dict[str, Any]] = {}

    def on_line(line: str) -> None:
        for prefix in (local.EVENT, local.REPORT, local.ERROR):
            if line.startswith(prefix):
                value = json.loads(line.removeprefix(prefix))
                if prefix == local.EVENT:
                    listener(value)
                else:
                    ended[prefix] = value
                return

    try:
        command.run(
            [sys.executable, "-I", "-u", "-m", "flows.local", str(request_file)],
            log=log,
            what="the flow",
            timeout=float("inf"),
            on_line=on_line,
        )
    except CommandFailed as failure:
        told = ended.get(local.ERROR)
        if told is None:
            raise
        raise _Told(told["message"], kind=told["kind"], exit_status=told["exit_status"]) from failure
    return ended[local.REPORT]


class _Told(EnginehouseError):
    """An error of the tree that a child process told us in words."""

    def __init__(self, message: str, *, kind: str, exit_status: int) -> None:
        super().__init__(message)
        self.kind, self.exit_status = kind, exit_status  # type: ignore[misc]  # of this one instance


@app.command
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
    job = open_job(pipeline, overrides, selection, _notes_to_stderr)
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
        _print_json({"pipeline": job.pipeline.name, "stages": prospects})
    else:
        _print_lines(show.plan_view(prospects))


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
    verify = [f"load versions {versions} on a staging server"] if proposal.recorded is None else []
    moved = [f"serve versions {versions} of {proposal.candidate.model}, and ask the live server"]
    return prospects("miss", {"verify": verify, "publish": proposal.plan.steps, "deploy": moved})


@app.command
def init(
    folder: Annotated[Path, Parameter(help="The new folder.")],
    /,
    *,
    name: Annotated[str | None, Parameter(help="The pipeline's name; the folder's if left out.")] = None,
) -> None:
    """Write a new pipeline's folder: pipeline.yaml, recipe.py, prefect.yaml and a test."""
    from tasks import init as template

    for path in template.init(folder, name or folder.absolute().name):
        out.print(f"wrote {path}", markup=False, soft_wrap=True)
    following = shlex.join([*invoked(), "run", str(folder / "pipeline.yaml")])
    out.print(f"next: {following}", markup=False, soft_wrap=True)


@app.command
def doctor(
    pipeline: Annotated[
        Path | None, Parameter(help="A pipeline file, whose target and engine are looked at too.")
    ] = None,
    /,
    *,
    overrides: Overrides = (),
    as_json: Json = False,
) -> None:
    """Look whether every tool is there, and whether the versions fit each other and the target."""
    from flows.doctor import examine, worst
    from tasks.pipeline_file import load

    findings = examine(None if pipeline is None else load(pipeline, overrides))
    if as_json:
        _print_json([finding.to_json() for finding in findings])
    else:
        lines = [[f.subject, f.state, f.found, f.mend] for f in findings]
        out.print(show.rows(["", "", "found", "what to do"], lines))
    if worst(findings) == "error":
        sys.exit(ToolMissing.exit_status)


@engine.command(name="setup")
def engine_setup(
    name: Annotated[Literal["modelopt", "tensorrt-rtx"], Parameter(help="Which tool.")],
    /,
    *,
    into: Annotated[Path | None, Parameter(help="The folder; a default one of this environment if left out.")] = None,
) -> None:
    """Install a tool that engines are prepared with, in an environment of its own."""
    from tasks.toolchain import builder_environment

    made = builder_environment.setup(name, folder=into, say=lambda line: err.print(line, style="dim", markup=False))
    out.print(f"{name} is ready: {made.folder}", markup=False, soft_wrap=True)


@artifacts.command(name="ls")
def artifacts_ls(
    pipeline: Annotated[str | None, Parameter(help="Only of this pipeline.")] = None,
    /,
    *,
    stage: Annotated[str | None, Parameter(help="Only of this stage.")] = None,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """List what was built, newest last."""
    store = _store(home)
    found = store.list(pipeline, stage)
    aliases: dict[str, list[str]] = {}
    for name in {ref.pipeline for ref, _ in found}:
        for alias, ref in store.aliases(name).items():
            aliases.setdefault(str(ref), []).append(alias)
    if as_json:
        _print_json(
            [
                {
                    "artifact": str(ref),
                    "content": str(ref.content),
                    "record": str(ref.record),
                    "aliases": sorted(aliases.get(str(ref), [])),
                    "finished": record.finished,
                    "metrics": dict(record.metrics),
                }
                for ref, record in found
            ]
        )
        return
    lines = [
        [
            str(ref),
            ref.content.short,
            show.size(store.content(ref).size),
            show.moment(record.finished),
            " ".join([*sorted(aliases.get(str(ref), [])), show.metrics_text(record.metrics)]),
        ]
        for ref, record in found
    ]
    out.print(show.rows(["artifact", "content", "size", "built (UTC)", ""], lines, cut=True))


@artifacts.command(name="show")
def artifacts_show(
    artifact: Annotated[str, Parameter(help="Such as digits/engine@3, digits/engine, digits@champion or sha256:…")],
    /,
    *,
    only_command: Annotated[
        bool, Parameter(name="--command", negative=(), help="Print the command lines that built it, and nothing else.")
    ] = False,
    reproduce: Annotated[
        bool, Parameter(negative=(), help="Print a shell script that builds an engine again from a copy of its graph.")
    ] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Show one artifact: its files, and the record of how they came to be."""
    store = _store(home)
    ref = store.resolve(artifact)
    record, content = store.get_record(ref), store.content(ref)
    if only_command or reproduce:
        _print_commands(ref, record, reproduce=reproduce)
        return
    shown = {"artifact": str(ref), "content": content.to_json(), "record": record.to_json()}
    if as_json:
        _print_json(shown)
        return
    out.print(f"[bold]{ref}[/]  {ref.content}")
    out.print(f"built {show.moment(record.started)} to {show.moment(record.finished)} UTC by {record.actor}")
    out.print(
        show.rows(["file", "size", "digest"], [[f.path, show.size(f.size), str(f.digest)] for f in content.files])
    )
    if record.materials:
        out.print(show.rows(["material", "content"], [[n, str(m.content)] for n, m in record.materials.items()]))
    for argv in record.commands:
        out.print(f"$ {shlex.join(argv)}", style="dim", soft_wrap=True)
    out.print_json(data={"key": record.to_json()["key"], "metrics": dict(record.metrics), "details": record.details})


def _print_commands(ref: ArtifactRef, record: BuildRecord, *, reproduce: bool) -> None:
    if not reproduce:
        for argv in record.commands:
            sys.stdout.write(shlex.join(argv) + "\n")
        return
    script = record.details.get("reproduce.sh")
    if script is None:
        raise ConfigError(f"{ref} has no script to build it again: only compiled engines have; see --command")
    sys.stdout.write(str(script))


@artifacts.command(name="lineage")
def artifacts_lineage(
    artifact: Annotated[str, Parameter(help="Such as digits/engine@3 or digits@champion.")],
    /,
    *,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Show what an artifact was made of, and what was made of it."""
    store = _store(home)
    lineage = store.lineage(store.resolve(artifact))
    if as_json:
        _print_json(lineage.to_json())
    else:
        out.print(show.lineage_tree(lineage.to_json()))


@artifacts.command(name="verify")
def artifacts_verify(*, home: HomeFolder = None, as_json: Json = False) -> None:
    """Read and hash every stored byte; what is corrupt is put aside, so that the next run builds it again."""
    store = _store(home)
    with show.Bytes(err) as progress:
        corrupt = store.verify(on_progress=progress)
    if as_json:
        _print_json([{"what": c.what, "problem": c.problem, "dependents": list(c.dependents)} for c in corrupt])
    for found in corrupt:
        err.print(Text.assemble(("corrupt", "red"), f" {found}"), soft_wrap=True)
    if corrupt:
        sys.exit(ArtifactCorrupt.exit_status)
    if not as_json:
        out.print("every stored byte is as it was stored")


@artifacts.command(name="gc")
def artifacts_gc(
    *,
    dry_run: Annotated[bool, Parameter(negative=(), help="Only say what would be removed.")] = False,
    keep: Annotated[
        int, Parameter(help="How many of the latest builds of each stage stay.", validator=validators.Number(gte=1))
    ] = 3,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Remove what no release, no alias and none of the latest builds needs."""
    garbage = _store(home).gc(dry_run=dry_run, keep=keep)
    if as_json:
        shown = {"names": garbage.names, "records": garbage.records, "objects": garbage.objects, "works": garbage.works}
        _print_json(
            {"bytes": garbage.bytes, **{title: [str(item) for item in items] for title, items in shown.items()}}
        )
        return
    for name in garbage.names:
        out.print(str(name))
    verb = "would remove" if dry_run else "removed"
    out.print(
        f"{verb} {len(garbage.records)} records, {len(garbage.objects)} objects and {len(garbage.works)} work folders: "
        f"{show.size(garbage.bytes)}"
    )


@serve.command(name="setup")
def serve_setup(
    *,
    into: Annotated[Path | None, Parameter(help="The folder; a default one of this environment if left out.")] = None,
) -> None:
    """Install a Triton server for this machine's processor, in an environment of its own."""
    from tasks.toolchain import triton

    def say(line: str) -> None:
        err.print(line, style="dim", markup=False, soft_wrap=True)

    installation = triton.setup(into or triton.default_folder(), say=say)
    out.print(f"Triton {installation.version} is ready: {installation.tritonserver}", markup=False, soft_wrap=True)


@serve.command(name="status")
def serve_status(*, home: HomeFolder = None, as_json: Json = False) -> None:
    """Show the Triton servers that runs have started, and what they serve."""
    from flows.serving import running

    found = [server.to_json() for server in running(_home(home))]
    if as_json:
        _print_json(found)
    elif not found:
        out.print("no server runs")
    else:
        for place, server in enumerate(found):
            _print_lines([*([Text()] if place else []), *show.card(server)])


@serve.command(name="stop")
def serve_stop(
    names: Annotated[Sequence[str], Parameter(help="Names as `serve status` shows them; all if left out.")] = (),
    /,
    *,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Stop the Triton servers that runs have started, letting them finish what they are asked."""
    from flows.serving import running

    servers = {server.name: server for server in running(_home(home))}
    if unknown := [name for name in names if name not in servers]:
        raise ConfigError(
            f"no server runs under the name {', '.join(unknown)}; running: {', '.join(servers) or 'none'}"
        )
    stopped = [server for name, server in servers.items() if not names or name in names]
    for server in stopped:
        server.stop()
        if not as_json:
            told = f"stopped {server.name} ({server.where}, {server.replica.address.http_url})"
            out.print(told, markup=False, soft_wrap=True)
    if as_json:
        _print_json([server.name for server in stopped])
    elif not stopped:
        out.print("no server runs")


def _home(folder: Path | None) -> Home:
    return find_home(Path.cwd()) if folder is None else Home(folder.absolute())


def _store(folder: Path | None) -> ArtifactStore:
    home = _home(folder)
    if not home.store.is_dir():
        raise ConfigError(
            f"there is no store at {home.store}: "
            "run a pipeline first, go to the folder of one that ran, or name the home with --home"
        )
    return ArtifactStore.open(home.store, warn=lambda text: note(_notes_to_stderr, text))


def _notes_to_stderr(event: Event) -> None:
    if event["type"] == "note":
        err.print(f"note: {event['text']}", style="yellow", markup=False)


def _print_lines(parts: Iterable[RenderableType]) -> None:
    for part in parts:
        out.print(part, soft_wrap=True)


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the status that the help lists."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        _fail(tokens, kind="configuration", message=f"{error}\nsee enginehouse --help", exit_status=2)
    except EnginehouseError as error:
        _fail(tokens, kind=error.kind, message=str(error), exit_status=error.exit_status)
    except KeyboardInterrupt:
        _fail(
            tokens,
            kind="interrupted",
            message="everything that the run had started has ended; the next run goes on from here",
            exit_status=INTERRUPTED,
        )
    except BrokenPipeError:  # the reader of our output has had enough, as `head` does
        with suppress(OSError):
            sys.stdout.close()
        sys.exit(0)


def _fail(tokens: Sequence[str], *, kind: str, message: str, exit_status: int) -> None:
    if "--json" in tokens:
        _print_json({"error": {"kind": kind, "message": message, "exit_status": exit_status}})
    err.print(f"[bold red]{kind}[/]", end=" ")
    err.print(message, markup=False, soft_wrap=True)
    sys.exit(exit_status)


if __name__ == "__main__":
    main()
