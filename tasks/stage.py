"""The keyed stage: materials and configuration in, content out; found in the store, or built by child processes.

A stage module (`tasks.train`, `tasks.export`, ...) declares one `KeyedStage`. Everything that it says is pure but for
`collect`: what its key holds, and which child processes build it. `find_or_build` is the one place where a stage meets
the store, so that claims, logs, progress and failures are the same for all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from tasks.artifacts.code import RecipeCode
from tasks.artifacts.key import StageKey
from tasks.artifacts.record import ArtifactRef
from tasks.artifacts.store import ArtifactStore
from tasks.config import Pipeline
from tasks.errors import CommandFailed, ConfigError, ExportRefused, GateFailed, NotReady, Problem
from tasks.events import Listener, line_listener, note
from tasks.toolchain import command, probe


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a pipeline's code and data are, known without importing either."""

    code: RecipeCode
    data: Any
    """Per name of the pipeline file's `data`, what identifies its bytes."""
    script: Any = None
    """The same as `code`, of a training program of the user's."""


@dataclass(frozen=True, kw_only=True)
class KeyParts:
    """What a stage puts into its key beside its materials."""

    config: Any
    """The part of the configuration that changes the product."""
    code: Any = None
    data: Any = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a stage is built: what it reads, and the folder that is its own."""

    pipeline: Pipeline
    materials: Mapping[str, Path]
    """Read-only folders, by the name of the stage that made them."""
    work: Path
    """Survives a crash; the next builder of the same key finds it."""

    @property
    def product(self) -> Path:
        """The folder whose files become the stage's content."""
        return self.work / "product"


class Attendant(Protocol):
    """Stays with a step's child process, and may have it started again."""

    def starting(self) -> str | None:
        """The child is about to start; may return a line to tell."""
        ...

    def line(self, line: str) -> None:
        """The child said something."""
        ...

    def failed(self, failure: CommandFailed) -> str | None:
        """Why the child shall be started again, or None where the failure stands; may raise an error that explains it
        better."""
        ...


@dataclass(frozen=True, kw_only=True)
class Step:
    """One child process of a stage."""

    name: str
    """Also the name of its job file and of its output folder in the work folder."""
    what: str
    """For a person: `training`, `the export`."""
    argv: tuple[str, ...]
    timeout_seconds: float
    output: Path
    """Where the program leaves its results, and `error.json` when it fails in a way that a user can mend."""
    job: Mapping[str, Any]
    """Written to `job_file` before the start."""
    job_file: Path
    env: Mapping[str, str] = field(default_factory=dict)
    grace_seconds: float = 10.0
    """How long it may go on after it was asked to end."""
    attendant: Attendant | None = field(default=None, compare=False)
    """Who sees it start, speak and fail."""
    transcript: Path | None = None
    """A file that gets this step's lines alone, for whoever reads them afterwards; the log gets them anyway."""
    explain: Callable[[CommandFailed], Exception] | None = field(default=None, compare=False)
    """Finds the error behind a failed program that is not ours, and so writes no `error.json`."""
    makes: tuple[Path, ...] = ()
    """Folders outside the work folder that have to be there, such as a cache's."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a stage reports of a product that lies in `Site.product`."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    byproducts: Mapping[str, Path] = field(default_factory=dict)
    """Kept with the record, by name; no part of the content."""


@dataclass(frozen=True, kw_only=True)
class KeyedStage:
    """One link of the chain that turns materials into content."""

    name: str
    version: int
    """Raised when equal inputs must give a new product."""
    reproducible: bool
    """Whether equal keys give equal bytes; a rebuild that differs is then an error, else a note."""
    materials: tuple[str, ...]
    """The stages whose content this one takes, of those that the pipeline has; or what was there before the run."""
    parts: Callable[[Pipeline, Identity], KeyParts]
    steps: Callable[[Site], tuple[Step, ...]]
    """The child processes, in order; a pure function, so that a plan can show what would run."""
    collect: Callable[[Site], Built]
    """Runs after the steps: leaves exactly the product's files in `Site.product`."""
    applies: Callable[[Pipeline], bool] = lambda _pipeline: True
    """Whether a pipeline has this stage at all; one that it has not is no material of others either."""
    check: Callable[[Pipeline], None] = lambda _pipeline: None
    """Raises `ToolMissing` or `ConfigError` when the stage cannot be built; called before anything is."""
    preview: Callable[[Pipeline], Sequence[str]] = lambda _pipeline: ()
    """What a plan says of the stage beside its commands; a line each."""


REUSED, FAILED = "reused", "failed"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one stage of a run ended."""

    stage: str
    state: str
    """`built` or `reused` for a keyed stage; a reconciling stage also says `verified`, `published`, `released`,
    `started`; `failed` where it raised."""
    artifact: ArtifactRef | None
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A flat dictionary for `--json` and for events."""
        return {
            "stage": self.stage,
            "state": self.state,
            "artifact": None if self.artifact is None else str(self.artifact),
            "content": None if self.artifact is None else str(self.artifact.content),
            "seconds": round(self.seconds, 3),
            "metrics": dict(self.metrics),
        }


def key_of(stage: KeyedStage, pipeline: Pipeline, identity: Identity, materials: Mapping[str, ArtifactRef]) -> StageKey:
    """Return the key under which the store knows the stage's product.

    >>> # materials enter by their content: a stage that rebuilds to the same bytes stops the rebuilding there
    """
    parts = stage.parts(pipeline, identity)
    return StageKey(
        stage=stage.name,
        version=stage.version,
        materials={name: materials[name].content for name in stage.materials if name in materials},
        config=parts.config,
        code=parts.code,
        data=parts.data,
        environment=dict(parts.environment),
    )


def find_or_build(
    stage: KeyedStage,
    pipeline: Pipeline,
    identity: Identity,
    materials: Mapping[str, ArtifactRef],
    *,
    store: ArtifactStore,
    listener: Listener,
    rebuild: bool = False,
    run: command.Runner = command.run,
) -> Outcome:
    """Return the stage's product: from the store when its key is known there, else built now.

    Raises `ConfigError`, `CommandFailed`, `GateFailed` or `ExportRefused` as the stage's programs report it; the work
    folder stays, so that the next run goes on from it.
    """
    started = time.monotonic()
    key = key_of(stage, pipeline, identity, materials)

    def waiting(holder: str) -> None:
        note(listener, f"{stage.name}: waiting for {holder}, which builds the same")

    with store.claim(
        key, pipeline=pipeline.name, rebuild=rebuild, reproducible=stage.reproducible, on_wait=waiting
    ) as claim:
        if claim.built is not None:
            record = store.get_record(claim.built)
            return Outcome(
                stage=stage.name,
                state="reused",
                artifact=claim.built,
                seconds=time.monotonic() - started,
                metrics=record.metrics,
            )
        taken = {name: materials[name] for name in stage.materials if name in materials}
        folders = {name: store.path(ref) for name, ref in taken.items()}
        site = Site(pipeline=pipeline, materials=folders, work=claim.work)
        steps = stage.steps(site)
        for step in steps:
            run_step(step, log=claim.log, on_line=line_listener(listener, stage.name), run=run)
        built = stage.collect(site)
        artifact = claim.commit(
            materials=taken,
            commands=[list(step.argv) for step in steps],
            environment={**cast("Mapping[str, str]", key.environment), **probe.environment(())},
            metrics=dict(built.metrics),
            details=dict(built.details),
            byproducts=dict(built.byproducts),
        )
    return Outcome(
        stage=stage.name,
        state="built",
        artifact=artifact,
        seconds=time.monotonic() - started,
        metrics=built.metrics,
    )


def run_step(step: Step, *, log: Path, on_line: Callable[[str], None], run: command.Runner = command.run) -> None:
    """Run one child process, again where its step says so after a failure.

    A failure that its program explains is raised as the error that it names.
    """
    while (again := _run_once(step, log=log, on_line=on_line, run=run)) is not None:
        on_line(f"{step.what} goes on: {again}")


def _run_once(step: Step, *, log: Path, on_line: Callable[[str], None], run: command.Runner) -> str | None:
    if step.output.exists():
        shutil.rmtree(step.output)
    for folder in (step.output, *step.makes):
        folder.mkdir(parents=True, exist_ok=True)
    # Not canonical JSON: that sorts, and a graph has its inputs in the order in which the job names them.
    step.job_file.write_text(json.dumps(dict(step.job), indent=1) + "\n")
    if step.attendant is not None and (told := step.attendant.starting()) is not None:
        on_line(told)
    try:
        with _transcribed(step.transcript, _attended(step.attendant, on_line)) as each_line:
            run(
                step.argv,
                log=log,
                what=step.what,
                env={**os.environ, **step.env},
                timeout=step.timeout_seconds,
                on_line=each_line,
                grace=step.grace_seconds,
            )
    except CommandFailed as failure:
        again = step.attendant.failed(failure) if step.attendant is not None else None
        if again is not None:
            return again
        explained = step.output / "error.json"
        if explained.exists():
            raise explained_failure(json.loads(explained.read_bytes()), failure) from failure
        if step.explain is not None and (nearer := step.explain(failure)) is not failure:
            raise nearer from failure
        raise
    return None


def _attended(attendant: Attendant | None, on_line: Callable[[str], None]) -> Callable[[str], None]:
    if attendant is None:
        return on_line

    def each_line(line: str) -> None:
        attendant.line(line)
        on_line(line)

    return each_line


@contextmanager
def _transcribed(file: Path | None, on_line: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    if file is None:
        yield on_line
        return
    with file.open("w", encoding="utf-8") as transcript:

        def each_line(line: str) -> None:
            transcript.write(line + "\n")
            on_line(line)

        yield each_line


def explained_failure(report: Mapping[str, Any], failure: CommandFailed) -> Exception:
    """Turn a program's `error.json` (see `tasks/programs/`) into the error of our tree that it names."""
    message, hint = report["message"], report.get("hint")
    match report["kind"]:
        case "configuration":
            file = report.get("file")
            return ConfigError(Problem(message, file=Path(file) if file else None, line=report.get("line"), hint=hint))
        case "export refused":
            return ExportRefused(_with_hint(message, hint))
        case "gate failed":
            return GateFailed(_with_hint(message, hint))
        case "not ready":
            return NotReady(_with_hint(message, hint), log=failure.log)
        case _:
            return failure.with_cause(_with_hint(message, hint))


def _with_hint(message: str, hint: str | None) -> str:
    return f"{message}\n{hint}" if hint else message


def program_step(
    site: Site,
    program: str,
    *,
    what: str,
    job: Mapping[str, Any],
    timeout_seconds: float,
    name: str | None = None,
    launcher: Sequence[str] = (),
    script: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    python: Path | None = None,
    grace_seconds: float = 10.0,
    attendant: Attendant | None = None,
) -> Step:
    """Return the step that runs one of `tasks/programs/`; `jobs.py` there says what the job holds.

    The job's `output` and `work` folders are added here. `name` tells two steps of the same program apart; `launcher`
    stands before the program's own command line; `python` is the interpreter of another environment than ours.
    `script`, a Python file of the user's with its arguments, takes the program's place.
    """
    name = name or program
    output, work, job_file = site.work / name / "output", site.work / name / "work", site.work / f"{name}.json"
    program_argv = command.python_program(program, job_file)
    if python is not None:
        program_argv = [str(python), *program_argv[1:]]
    return Step(
        name=name,
        what=what,
        argv=(*launcher, *(program_argv if script is None else script)),
        timeout_seconds=timeout_seconds,
        output=output,
        job={**job, "output": str(output), "work": str(work)},
        job_file=job_file,
        makes=(work,),
        env={PRIVATE_TMP: "1", **(env or {})},
        grace_seconds=grace_seconds,
        attendant=attendant,
    )


PRIVATE_TMP = "ENGINEHOUSE_PRIVATE_TMP"
"""Asks the supervisor of a child for a TMPDIR that goes with it (tasks/programs/supervise.py)."""


def read_json(path: Path) -> Any:
    """Read what a program of ours left."""
    return json.loads(path.read_bytes())


def move_to_product(site: Site, files: Mapping[str, Path]) -> None:
    """Move files into the product folder under new names; a rename, so that large ones cost nothing."""
    site.product.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        path.rename(site.product / name)
