"""The chain of stages, and what the store already knows of it; no Prefect here, so that asking is cheap."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import deploy, engine, export, precision, preflight, publish, train, triton_config, validate, verify
from tasks.artifacts.code import recipe_code, script_code
from tasks.artifacts.key import differences
from tasks.artifacts.record import ArtifactRef
from tasks.artifacts.store import ArtifactStore
from tasks.config import Pipeline
from tasks.data_identity import data_identity
from tasks.errors import ConfigError, Problem
from tasks.events import Listener, note
from tasks.home import Home, find_home
from tasks.pipeline_file import load
from tasks.stage import Identity, KeyedStage, Outcome, Site, find_or_build, key_of

KEYED: tuple[KeyedStage, ...] = (
    train.STAGE,
    export.STAGE,
    precision.STAGE,
    preflight.STAGE,
    engine.STAGE,
    triton_config.STAGE,
    validate.STAGE,
)
"""The stages that turn materials into content, in order; a pipeline has those that apply to it."""

STAGES = (*(stage.name for stage in KEYED), verify.STAGE, publish.STAGE, deploy.STAGE)
"""Every stage of a run, in order."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which part of the chain a run covers."""

    start: str | None = None
    """The stages before it are taken from the store as they were last built, also when their keys have changed."""
    until: str | None = None
    """The last stage that is run."""
    rebuild: frozenset[str] = frozenset()
    """Stages that are built anew though the store has their product."""

    def __post_init__(self) -> None:
        for option, name in (
            ("--from", self.start),
            ("--until", self.until),
            *(("--rebuild", r) for r in self.rebuild),
        ):
            allowed = STAGES if option == "--until" else tuple(stage.name for stage in KEYED)
            if name is not None and name not in allowed:
                raise ConfigError(f"{option}: no stage {name!r} to name here; expected one of {', '.join(allowed)}")
        if self.start and self.until and STAGES.index(self.until) < STAGES.index(self.start):
            raise ConfigError(
                f"--from {self.start} --until {self.until}: the chain runs from {STAGES[0]} to {STAGES[-1]}"
            )

    def covers(self, stage: str) -> bool:
        """Whether the stage is part of the run; one before `start` is, as something taken from the store."""
        return self.until is None or STAGES.index(stage) <= STAGES.index(self.until)

    def takes(self, stage: str) -> bool:
        """Whether the stage's product is taken from the store whatever its key says."""
        return self.start is not None and STAGES.index(stage) < STAGES.index(self.start)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One pipeline, with all that a run of it needs to know."""

    pipeline: Pipeline
    identity: Identity
    home: Home
    store: ArtifactStore
    selection: Selection
    given: Mapping[str, ArtifactRef]
    """Materials that were there before the run, by name."""
    overrides: Sequence[str] = ()
    """What `--set` changed in the pipeline file."""
    override: str | None = None
    """Why a candidate is released though a gate fails; recorded with the release."""

    @property
    def stages(self) -> tuple[KeyedStage, ...]:
        """The keyed stages of this pipeline, in order."""
        return tuple(stage for stage in KEYED if stage.applies(self.pipeline))

    def materials_of(self, stage: KeyedStage) -> tuple[str, ...]:
        """The names of a stage's materials that this pipeline makes, or that were there before."""
        made = {other.name for other in self.stages} | self.given.keys()
        return tuple(name for name in stage.materials if name in made)


def open_job(
    file: Path, overrides: Sequence[str], selection: Selection, listener: Listener, *, override: str | None = None
) -> Job:
    """Read the pipeline file, its code's and its data's identity, and open the store that belongs to it.

    Raises `ConfigError`; and, before anything is built, `StoreUnusable` or `Refused` for a model repository into which
    the run could publish nothing.
    """
    pipeline = load(file, overrides)
    if selection.covers(publish.STAGE):
        repository = publish.Repository(pipeline.repository)
        publish.require_usable(repository, pipeline.model)
        observed = publish.observe(repository, pipeline.model)
        publish.refuse_somebody_elses(observed, pipeline.name, takes_over=pipeline.publish.takes_over)
    home = find_home(pipeline.folder)
    store = ArtifactStore.open(home.store, warn=lambda text: note(listener, text))
    identity = Identity(
        code=recipe_code(pipeline.recipe_file, pipeline.recipe_attribute),
        data=data_identity(pipeline, store.data_digest),
        script=None if pipeline.train.script is None else script_code(pipeline.folder / pipeline.train.script),
    )
    start = train.starting_point(pipeline, store)
    if start is None and pipeline.train.start_from is not None:
        note(
            listener,
            f"train.start_from: {pipeline.name} has no champion yet; training starts from the recipe's weights",
        )
    given = {} if start is None else {train.START: start}
    return Job(
        pipeline=pipeline,
        identity=identity,
        home=home,
        store=store,
        selection=selection,
        given=given,
        overrides=tuple(overrides),
        override=override,
    )


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """What a run would do with one stage."""

    stage: str
    state: str
    """`hit`, `miss`, or `pending` where that depends on a stage before it."""
    artifact: ArtifactRef | None = None
    reasons: Sequence[str] = ()
    """For a miss: which parts of the key changed since the last build."""
    commands: Sequence[Sequence[str]] = ()
    """The command lines that would run."""
    actions: Sequence[str] = ()
    """For a reconciling stage: what would be changed; for a keyed one that is built: what its commands do not tell."""

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "stage": self.stage,
            "state": self.state,
            # What another pipeline has built has no name in this one until a run gives it one.
            "artifact": None if self.artifact is None or not self.artifact.number else str(self.artifact),
            "reasons": list(self.reasons),
            "commands": [list(argv) for argv in self.commands],
            "actions": list(self.actions),
        }


def survey(job: Job) -> list[Prospect]:
    """Ask the store about every keyed stage that the run covers; writes nothing."""
    prospects: list[Prospect] = []
    products = dict(job.given)
    for stage in job.stages:
        if not job.selection.covers(stage.name):
            break
        prospect = _prospect(stage, job, products)
        if prospect.artifact is not None:
            products[stage.name] = prospect.artifact
        prospects.append(prospect)
    return prospects


def _prospect(stage: KeyedStage, job: Job, products: Mapping[str, ArtifactRef]) -> Prospect:
    if job.selection.takes(stage.name):
        return Prospect(
            stage=stage.name, state="hit", artifact=taken(stage, job), reasons=["taken as it was last built (--from)"]
        )
    materials, preview = job.materials_of(stage), stage.preview(job.pipeline)
    if not all(name in products for name in materials):
        work = Path("<work>") / stage.name
        folders = {
            name: job.store.path(products[name]) if name in products else Path(f"<{name}>") for name in materials
        }
        steps = stage.steps(Site(pipeline=job.pipeline, materials=folders, work=work))
        return Prospect(stage=stage.name, state="pending", commands=[step.argv for step in steps], actions=preview)
    key = key_of(stage, job.pipeline, job.identity, products)
    found = job.store.peek(key, pipeline=job.pipeline.name)
    rebuilt = stage.name in job.selection.rebuild
    if found is not None and not rebuilt:
        return Prospect(stage=stage.name, state="hit", artifact=found)
    folders = {name: job.store.path(products[name]) for name in materials}
    steps = stage.steps(Site(pipeline=job.pipeline, materials=folders, work=job.store.work_folder(key)))
    # With --rebuild the product is expected to be the same, but what follows is decided when it is there.
    reasons = ["--rebuild"] if rebuilt else why_missed(stage, job, products)
    return Prospect(
        stage=stage.name, state="miss", reasons=reasons, commands=[step.argv for step in steps], actions=preview
    )


def why_missed(stage: KeyedStage, job: Job, products: Mapping[str, ArtifactRef]) -> list[str]:
    """Return which parts of the stage's key changed since its last build in this pipeline."""
    latest = job.store.latest(job.pipeline.name, stage.name)
    if latest is None or latest.key is None:
        return ["never built before"]
    return differences(latest.key, key_of(stage, job.pipeline, job.identity, products)) or ["its product is gone"]


def taken(stage: KeyedStage, job: Job) -> ArtifactRef:
    """Return the stage's last product for `--from`."""
    if job.store.latest(job.pipeline.name, stage.name) is None:
        raise ConfigError(
            Problem(
                f"--from {job.selection.start}: there is no {stage.name} of {job.pipeline.name} to start from",
                hint=f"run once without --from, or with --from {STAGES[0]}",
            )
        )
    return job.store.resolve(f"{job.pipeline.name}/{stage.name}")


def run_stage(stage: KeyedStage, job: Job, products: Mapping[str, ArtifactRef], listener: Listener) -> Outcome:
    """Find or build one keyed stage of a run, telling the listener."""
    if job.selection.takes(stage.name):
        ref = taken(stage, job)
        note(listener, f"{stage.name} is taken as {ref}, as it was last built (--from {job.selection.start})")
        outcome = Outcome(stage=stage.name, state="reused", artifact=ref, seconds=0)
    else:
        rebuild = stage.name in job.selection.rebuild
        key = key_of(stage, job.pipeline, job.identity, products)
        if rebuild or job.store.peek(key, pipeline=job.pipeline.name) is None:
            why = "--rebuild" if rebuild else "; ".join(why_missed(stage, job, products))
            listener({"type": "stage_started", "stage": stage.name, "why": why})
        outcome = find_or_build(
            stage,
            job.pipeline,
            job.identity,
            products,
            store=job.store,
            listener=listener,
            rebuild=rebuild,
        )
    listener({"type": "stage_ended", **outcome.to_json()})
    return outcome
