"""The second half of the chain: from proven content to a server that serves it. Each part is safe to run twice."""

import getpass
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from flows.chain import Job
from flows.releases import merged_metrics, refuse_unfit, retain, trained_on
from flows.words import invoked
from tasks import deploy, evaluation, publish, validate, verify
from tasks.artifacts.record import ArtifactRef
from tasks.errors import Refused
from tasks.events import Listener
from tasks.home import find_home
from tasks.releases import (
    Release,
    Standing,
    find_recorded,
    point_aliases,
    record_promotion,
    record_release,
    standing,
    used_versions,
    yardstick,
)
from tasks.served import Candidate, Verification
from tasks.stage import FAILED, REUSED, Outcome
from tasks.targets import DeployTarget, Replica, target_of

RELEASED_FROM = ("engine", "triton_config", "validate")
"""The stages whose products a release is made of."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What should be released, and what of it is done already."""

    plan: publish.PublishPlan
    candidate: Candidate
    materials: Mapping[str, ArtifactRef]
    recorded: Release | None
    """The record of this very release, if it was made before."""
    is_proven: bool
    """Whether that record holds by the gates as they are now; or it is the champion, whom a run does not try again."""
    is_champion: bool
    """Whether the history says that it is what should be served."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A release, what proved it, and the servers that serve it; none yet where it is not promoted."""

    release: Release
    promoted: bool
    metrics: Mapping[str, Mapping[str, float]]
    """Per metric: `staging` and `live`."""
    gates: Sequence[Mapping[str, Any]]
    """What it passed on those servers, as records hold it."""
    replicas: Sequence[Replica]
    repository: Path
    request: Path
    """An example request in the JSON of Triton's HTTP protocol; there once the release is promoted."""
    home_option: Sequence[str]
    """What another command needs to find the same home from the current folder; usually nothing."""

    def to_json(self) -> dict[str, Any]:
        """The parts `release` and `served` of a run's report."""
        report: dict[str, Any] = {
            "release": {
                "name": str(self.release.ref),
                "model": self.release.model,
                "version": self.release.version,
                "repository": str(self.repository),
                "promoted": self.promoted,
            },
            "served": None,
        }
        if self.replicas:
            address = self.replicas[0].address
            url = f"{address.http_url}/v2/models/{self.release.model}/infer"
            report["served"] = {
                "http": address.http_url,
                "grpc": address.grpc_url,
                "metrics": self.metrics,
                "call": shlex.join(["curl", "-s", url, "-d", f"@{self.request}"]),
                "stop": shlex.join([*invoked(), "serve", "stop", *self.home_option]),
            }
        return report


def propose(job: Job, products: Mapping[str, ArtifactRef]) -> Proposal:
    """Compare the repository with what should be released; writes nothing.

    Raises `Refused`, also for a release that was rolled back: a run on a schedule must not undo what a person did.
    """
    pipeline, store = job.pipeline, job.store
    materials = {name: products[name] for name in RELEASED_FROM}
    config = store.path(materials["triton_config"]) / "config.pbtxt"
    plan = publish.plan(
        publish.observe(publish.Repository(pipeline.repository), pipeline.model),
        publish.Wanted(
            pipeline=pipeline.name,
            model=pipeline.model,
            engine=materials["engine"],
            files=store.content(materials["engine"]).files,
            config=materials["triton_config"],
            config_text=config.read_text(encoding="utf-8"),
            actor=f"{getpass.getuser()}@{socket.gethostname()}",
            takes_over=pipeline.publish.takes_over,
            used=used_versions(store, pipeline.repository),
        ),
    )
    candidate = candidate_of(job, products, version=plan.version, config=plan.config_text)
    now = standing(store, pipeline.name)
    refuse_older_data(job, now)
    recorded = find_recorded(now, pipeline, candidate, materials)
    is_champion = recorded is not None and now.champion == recorded
    # The same candidate may have been verified twice, by other gates: what became of either counts.
    same = [] if recorded is None or is_champion else [r for r in now.releases if r.is_same_as(recorded)]
    if recorded is not None and (step := next(filter(None, map(now.rolled_back, same)), None)) is not None:
        reason = f": {step.reason}" if step.reason else ""
        raise Refused(
            f"{recorded.ref}, which this run would release, was rolled back by {step.record.actor} at "
            f"{step.record.finished[:19]}{reason}\n"
            f"it does not come back by itself: `enginehouse releases promote {recorded.ref}` releases it all the same"
        )
    judged_by = yardstick(pipeline, champion=plan.observed.champion, override=job.override)
    return Proposal(
        plan=plan,
        candidate=candidate,
        materials=materials,
        recorded=recorded,
        is_proven=is_champion or (recorded is not None and recorded.judged_by == judged_by),
        is_champion=is_champion,
    )


def refuse_older_data(job: Job, now: Standing) -> None:
    """Raise `Refused` for a run that would put a model of older data in the champion's place without being asked to.

    As a schedule would, after an event had brought new data by overrides: the pipeline file says what it said before.
    """
    champion = now.champion
    if champion is None:
        return
    said = {override.partition("=")[0] for override in job.overrides}
    brought = [o for o in champion.overrides if o.startswith("data.") and o.partition("=")[0] not in said]
    if not brought:
        return
    ours = job.identity.data
    if trained_on(job.store, champion) in (None, ours):
        return
    if any(trained_on(job.store, release) == ours for release in now.releases if release.ref != champion.ref):
        options = " ".join(f"--set {shlex.quote(override)}" for override in brought)
        raise Refused(
            f"{champion.ref}, the champion, was trained with {options}; "
            "this run would go back to the data of an earlier release\n"
            f"write that into {job.pipeline.source}; or say for this run which data it shall use, with the same option"
        )


def deploy_steps(job: Job, proposal: Proposal) -> list[str]:
    """What `deploy` would do, in words: to the servers, and then with the release."""
    versions = ", ".join(map(str, proposal.candidate.versions))
    return [
        *target_of(job.pipeline, job.home).plan(),
        f"serve versions {versions} of {proposal.candidate.model}, and ask the live server",
    ]


def candidate_of(job: Job, products: Mapping[str, ArtifactRef], *, version: int, config: str) -> Candidate:
    """Return what a server has to show, with the numbers that were measured before."""
    validation = job.store.path(products["validate"])
    return Candidate(
        model=job.pipeline.model,
        version=version,
        config=config,
        validation=validation,
        expected=validate.expected(validate.measured(validation)),
    )


def settled(job: Job, proposal: Proposal) -> Served | None:
    """Return what is served if nothing has to be done at all; reads files and asks the servers over HTTP."""
    if proposal.plan.steps or proposal.recorded is None or not proposal.is_champion:
        return None
    replicas = deploy.settled(proposal.candidate, target=target_of(job.pipeline, job.home))
    return None if replicas is None else served(job, proposal.recorded, proposal, replicas)


def served(job: Job, release: Release, proposal: Proposal, replicas: Sequence[Replica]) -> Served:
    """Put together what a person needs to use the release."""
    found = _shown(job, release, replicas, promoted=True)
    found.request.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(job.store.path(proposal.materials["validate"]) / evaluation.REQUEST, found.request)
    return found


def _shown(job: Job, release: Release, replicas: Sequence[Replica] = (), *, promoted: bool) -> Served:
    now = standing(job.store, job.pipeline.name)
    # What a live server said when it was the champion the last time is no proof of what is offered now.
    promotion = now.last_promotion(release) if promoted else None
    return Served(
        release=release,
        promoted=promoted,
        metrics=merged_metrics(release, now) if promoted else release.metrics,
        gates=[*release.gates, *(() if promotion is None else promotion.gates)],
        replicas=replicas,
        repository=job.pipeline.repository.resolve(),
        request=job.home.serve / f"{job.pipeline.model}.request",
        home_option=() if find_home(Path.cwd()) == job.home else ("--home", str(job.home.root)),
    )


def run_release(
    job: Job,
    products: Mapping[str, ArtifactRef],
    listener: Listener,
    call: Callable[[str, Callable[[], Any]], Any],
    outcomes: list[Outcome],
    *,
    recorded: Callable[[Served], None] | None = None,
    approve: Callable[[Served], str | None] | None = None,
) -> Served | None:
    """Verify on a staging server, publish, deploy; only what is not done yet.

    `call` runs one stage under its name (in Prefect: as a task), and how it ended is added to `outcomes`. `recorded` is
    told of the release before the live servers are touched. `approve` is asked before they move to another one; what it
    returns is recorded as the reason, and without one nothing is moved.
    """
    target = target_of(job.pipeline, job.home)

    def stage(name: str, work: Callable[[], tuple[str, T]]) -> T:
        listener({"type": "stage_started", "stage": name, "why": ""})
        started = time.monotonic()
        state = FAILED
        try:
            state, result = cast("tuple[str, T]", call(name, work))
        finally:
            outcome = Outcome(stage=name, state=state, artifact=None, seconds=time.monotonic() - started)
            outcomes.append(outcome)
        listener({"type": "stage_ended", **outcome.to_json()})
        return result

    with deploy.release_lock(job.home, job.pipeline.repository, job.pipeline.model):
        proposal = propose(job, products)
        if (done := settled(job, proposal)) is not None:
            outcomes += [_unchanged(name) for name in (verify.STAGE, publish.STAGE, deploy.STAGE)]
            return done
        refuse_unfit(job.store, job.pipeline, str(products["engine"]), products["engine"].record, target)
        source = partial(job.store.materialise, products["engine"])
        proven = stage(verify.STAGE, partial(_verify, job, proposal, target, source, listener))
        if not job.selection.covers(publish.STAGE):
            return None
        placed = stage(publish.STAGE, partial(_publish, proposal, source))
        if placed.version != proposal.candidate.version:  # another publisher took the number: prove the set anew
            proposal = propose(job, products)
            proven = stage(verify.STAGE, partial(_verify, job, proposal, target, source, listener))
        release = proposal.recorded
        if proven is not None:
            release = record_release(
                job.store,
                job.pipeline,
                proposal.candidate,
                proposal.materials,
                staging=proven,
                champion=proposal.plan.observed.champion,
                overrides=job.overrides,
                override=job.override,
            )
        assert release is not None, "what was not released before was just verified"
        offered = _shown(job, release, promoted=proposal.is_champion)
        if recorded is not None:
            recorded(offered)
        if not job.selection.covers(deploy.STAGE):
            return offered
        reason = None
        if approve is not None and not proposal.is_champion and (reason := approve(offered)) is None:
            return offered
        done = stage(deploy.STAGE, partial(_deploy, job, proposal, target, release, listener, reason))
        retain(job.store, job.pipeline, target, listener)
        return done


def _unchanged(name: str) -> Outcome:
    return Outcome(stage=name, state=REUSED, artifact=None, seconds=0)


def _verify(
    job: Job, proposal: Proposal, target: DeployTarget, source: Callable[[Path], None], listener: Listener
) -> tuple[str, Verification | None]:
    if proposal.is_proven:
        return REUSED, None
    proven = verify.verify(
        job.pipeline,
        proposal.candidate,
        target=target,
        home=job.home,
        model_folder=proposal.plan.observed.folder,
        source=source,
        listener=listener,
        champion=proposal.plan.observed.champion,
        override=job.override,
    )
    return "verified", proven


def _publish(proposal: Proposal, source: Callable[[Path], None]) -> tuple[str, publish.Published]:
    state = REUSED if proposal.plan.reuses is not None else "published"
    return state, publish.place_version(proposal.plan, source)


def _deploy(
    job: Job, proposal: Proposal, target: DeployTarget, release: Release, listener: Listener, reason: str | None
) -> tuple[str, Served]:
    live, replicas = deploy.move(
        job.pipeline,
        proposal.candidate,
        committed=proposal.plan.observed.config,
        target=target,
        home=job.home,
        listener=listener,
        measure=True,
        override=release.override,
    )
    if proposal.is_champion:
        point_aliases(job.store, job.pipeline.name)
    else:
        record_promotion(job.store, release, action="promote", live=live, replicas=replicas, reason=reason)
    state = "started" if proposal.is_champion else "released"
    return state, served(job, release, proposal, replicas)
