"""Promote and roll back: what is recorded already becomes the champion, on every server or on none."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from flows.releases.desk import Desk, known
from flows.releases.fit import refuse_unfit
from flows.releases.keeping import retain
from flows.releases.showing import merged_metrics
from tasks import deploy, publish
from tasks.artifacts.store import ArtifactStore
from tasks.errors import NotReady, Refused
from tasks.events import note
from tasks.releases import RELEASE, Action, Release, record_promotion
from tasks.served import Candidate, Verification
from tasks.targets import Replica
from tasks.toolchain.provenance import Origin, Provenance


def promote(desk: Desk, *, reason: str | None = None) -> dict[str, Any]:
    """Make the named release, or the candidate, the champion; the live servers are asked the whole test data."""
    now = desk.standing
    release = desk.named or now.candidate
    if release is None:
        champion = now.champion
        if champion is not None and _settled(desk, champion) is not None:
            return _report(desk, "unchanged", champion)
        release = champion
    if release is None:
        raise Refused(f"{desk.name} has no candidate to promote\n{known(now)}")
    return _move(desk, release, "promote", measure=True, reason=reason)


def roll_back(desk: Desk, *, to: str | None = None, reason: str | None = None) -> dict[str, Any]:
    """Go back to the champion before the champion, or to the release `to`: its versions and its config, to the byte.

    It was proven before it was released, so the live servers are asked the golden answers only: seconds.
    """
    now = desk.standing
    release = desk.release(to) if to is not None else desk.named or now.previous
    if release is None:
        raise Refused(f"{desk.name} has no champion before the present one to go back to\n{known(now)}")
    return _move(desk, release, "roll back", measure=False, reason=reason)


def _move(desk: Desk, release: Release, action: Action, *, measure: bool, reason: str | None) -> dict[str, Any]:
    pipeline = desk.pipeline
    if (release.model, release.repository) != (pipeline.model, pipeline.repository.resolve()):
        raise Refused(
            f"{release.ref} is of model {release.model} in {release.repository}, but the pipeline file says model "
            f"{pipeline.model} in {pipeline.repository.resolve()}\nmend the pipeline file, or name another release"
        )
    with deploy.release_lock(desk.home, pipeline.repository, pipeline.model):
        now = desk.standing
        observed = desk.observe()
        candidate = candidate_of(desk.store, release)
        champion = now.champion is not None and now.champion.ref == release.ref
        if champion and observed.config == candidate.config and _settled(desk, release) is not None:
            return _report(desk, "unchanged", release)
        publish.refuse_somebody_elses(observed, desk.name, takes_over=pipeline.publish.takes_over)
        engine = release.record.materials["engine"].record
        refuse_unfit(desk.store, pipeline, str(release.ref), engine, desk.target)
        restore(desk, release)
        live, replicas = bring(desk, release, observed.config, measure=measure)
        if not champion:
            record_promotion(desk.store, release, action=action, live=live, replicas=replicas, reason=reason)
        retain(desk.store, pipeline, desk.target, desk.listener)
    return _report(desk, {"promote": "promoted", "roll back": "rolled back"}[action], release, replicas)


def bring(
    desk: Desk, release: Release, committed: str | None, *, measure: bool
) -> tuple[Verification, Sequence[Replica]]:
    """Move every server to the release and commit its config; see `deploy.move`."""
    return deploy.move(
        desk.pipeline,
        candidate_of(desk.store, release),
        committed=committed,
        target=desk.target,
        home=desk.home,
        listener=desk.listener,
        measure=measure,
        override=release.override,
    )


def restore(desk: Desk, release: Release) -> list[str]:
    """Put back the versions of a release that are not in the repository any more, or damaged, out of the store."""
    observed = desk.observe()
    done = []
    for version in release.versions:
        if version in observed.versions:
            continue
        if version in observed.there and version not in observed.damaged:
            raise Refused(
                f"{observed.folder / str(version)}, which {release.ref} lists, was made by somebody else\n"
                "move it away, or promote another release"
            )
        made = origin(desk, release, version)
        engine = made.record.materials["engine"]
        config = made.record.materials["triton_config"]
        provenance = Provenance(
            pipeline=made.ref.pipeline,
            model=release.model,
            version=version,
            engine=Origin(name=_name(desk.store, engine.record), content=engine.content, record=engine.record),
            config=Origin(name=_name(desk.store, config.record), content=config.content, record=config.record),
            files=(),
            created=made.record.finished,
            actor=made.record.actor,
        )
        publish.restore_version(
            observed,
            version,
            provenance,
            desk.store.content(engine.content).files,
            partial(desk.store.materialise, engine.content),
        )
        done.append(f"put version {version} of {release.model} back into the repository")
        note(desk.listener, done[-1])
    return done


def origin(desk: Desk, release: Release, version: int) -> Release:
    """The release that made a version; another one may list it."""
    # Of any pipeline: one that took a model over lists what the one before it made.
    every = [Release(ref=ref, record=record) for ref, record in desk.store.list(None, RELEASE)]
    wanted = (version, release.model, release.repository)
    found = [made for made in every if (made.version, made.model, made.repository) == wanted]
    if not found:
        raise Refused(
            f"{release.ref} lists version {version} of {release.model}, which no release in {desk.home.store} made\n"
            "promote another release"
        )
    return found[-1]


def _name(store: ArtifactStore, record: Any) -> str:
    found = store.get_record(record)
    named = [ref for ref, _ in store.list(found.pipeline, found.stage) if ref.record == record]
    return str(named[0]) if named else f"{found.pipeline}/{found.stage}"


def _settled(desk: Desk, release: Release) -> Sequence[Replica] | None:
    try:
        return deploy.settled(candidate_of(desk.store, release), target=desk.target)
    except NotReady:
        return None


def _report(desk: Desk, state: str, release: Release, replicas: Sequence[Replica] | None = None) -> dict[str, Any]:
    now = desk.standing
    found = desk.target.observe() if replicas is None else replicas
    return {
        "pipeline": desk.name,
        "state": state,
        "release": str(release.ref),
        "model": release.model,
        "version": release.version,
        "versions": list(release.versions),
        "previous": None if now.previous is None else str(now.previous.ref),
        "servers": [replica.address.http_url for replica in found],
        "metrics": merged_metrics(release, now),
    }


def candidate_of(store: ArtifactStore, release: Release) -> Candidate:
    """What a server has to show that serves the release; the metric is not measured again."""
    return Candidate(
        model=release.model,
        version=release.version,
        config=release.config(store),
        validation=store.path(release.record.materials["validate"].content),
        expected={name: values["staging"] for name, values in release.metrics.items() if "staging" in values},
    )
