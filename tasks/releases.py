"""Releases as they are recorded: what each is, what proved it, and which of them was the champion when.

    candidate -> verified -> champion -> previous

A release is recorded (stage `release`: the content is the whole config, the materials are what it was made of) when a
staging server has verified it. What then happens to it are promotions: records of their own, each with the one before
it among its materials, so that the newest one leads through the whole history. The aliases `champion`, `previous` and
`candidate` say in one word what the history says.

What is *served* is decided by `config.pbtxt` in the model repository, not by these records: see `flows/releases/` for
how the two are brought together again after a process died between them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from tasks.artifacts.digest import Digest
from tasks.artifacts.record import RELEASE_STAGE, ArtifactRef, BuildRecord
from tasks.artifacts.store import ArtifactStore
from tasks.config import Pipeline
from tasks.engines import kind_of
from tasks.errors import GateResult
from tasks.gates import compares
from tasks.served import Candidate, Verification
from tasks.targets import Replica
from tasks.toolchain.model_repository import CONFIG

RELEASE = RELEASE_STAGE
PROMOTION = "promotion"
HISTORY = "history"
"""The alias of the newest promotion."""
PIN = "pinned-"
"""Aliases of pinned releases begin so; their number follows."""

Action = Literal["promote", "roll back", "repair"]


@dataclass(frozen=True, kw_only=True)
class Release:
    """A set of versions with the whole config's bytes, and what proved it."""

    ref: ArtifactRef
    record: BuildRecord

    @property
    def model(self) -> str:
        """Triton's name of the model."""
        return cast("str", self.record.details["model"])

    @property
    def version(self) -> int:
        """The version that answers requests that name none: the highest one."""
        return cast("int", self.record.details["version"])

    @property
    def versions(self) -> tuple[int, ...]:
        """Every version that the config lists."""
        return tuple(cast("list[int]", self.record.details["versions"]))

    @property
    def repository(self) -> Path:
        """The model repository that it was made for."""
        return Path(cast("str", self.record.details["repository"]))

    @property
    def metrics(self) -> Mapping[str, Mapping[str, float]]:
        """Per metric, per runtime: what was measured before it was promoted."""
        return cast("Mapping[str, Mapping[str, float]]", self.record.details["metrics"])

    @property
    def gates(self) -> Sequence[Mapping[str, Any]]:
        """What it passed on a staging server (`gates_json`)."""
        return cast("Sequence[Mapping[str, Any]]", self.record.details["gates"])

    @property
    def judged_by(self) -> Mapping[str, Any] | None:
        """What it was measured against (`yardstick`)."""
        return cast("Mapping[str, Any] | None", self.record.details.get("judged_by"))

    @property
    def override(self) -> str | None:
        """Why it was released though a gate failed."""
        return cast("str | None", self.record.details.get("override"))

    @property
    def pipeline_file(self) -> Path | None:
        """The pipeline file that it was made from."""
        file = self.record.details.get("pipeline_file")
        return None if file is None else Path(cast("str", file))

    @property
    def overrides(self) -> tuple[str, ...]:
        """What `--set` changed in the pipeline file."""
        return tuple(cast("list[str]", self.record.details.get("overrides", [])))

    def is_same_as(self, other: Release) -> bool:
        """Whether it would serve the same: a version's number is used for one content only."""
        ours = (self.repository, self.model, self.version, self.config_digest)
        return ours == (other.repository, other.model, other.version, other.config_digest)

    @property
    def config_digest(self) -> str:
        """Of the bytes of its `config.pbtxt`."""
        return cast("str", self.record.details["config"])

    def config(self, store: ArtifactStore) -> str:
        """The text of its `config.pbtxt`, to the byte. Raises `ArtifactCorrupt`."""
        return (store.path(self.ref) / CONFIG).read_bytes().decode("utf-8", errors="surrogateescape")


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """One step of the history: from then on that release was the champion."""

    ref: ArtifactRef
    record: BuildRecord

    @property
    def release(self) -> Digest:
        """The release's record."""
        return self.record.materials["release"].record

    @property
    def action(self) -> Action:
        """How it became the champion."""
        return cast("Action", self.record.details["action"])

    @property
    def reason(self) -> str | None:
        """What the person who did it had to say."""
        return cast("str | None", self.record.details.get("reason"))

    @property
    def metrics(self) -> Mapping[str, float]:
        """What was measured on a live server; empty where only the golden answers were asked again."""
        return self.record.metrics

    @property
    def gates(self) -> Sequence[Mapping[str, Any]]:
        """What it passed on a live server (`gates_json`)."""
        return cast("Sequence[Mapping[str, Any]]", self.record.details["gates"])


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Which release is what, by the history."""

    releases: Sequence[Release]
    """All, oldest first."""
    history: Sequence[Promotion]
    """Oldest first."""
    pinned: frozenset[Digest]
    """Records of releases that retention leaves alone."""

    @property
    def champion(self) -> Release | None:
        """What is served, if nobody interfered."""
        return self._at(-1)

    @property
    def previous(self) -> Release | None:
        """Where `roll back` leads: the champion before the champion. One that was rolled back from is none."""
        return self._at(-2)

    @property
    def candidate(self) -> Release | None:
        """The newest release, if it has never been the champion."""
        promoted = {promotion.release for promotion in self.history}
        newest = self.releases[-1] if self.releases else None
        return None if newest is None or newest.ref.record in promoted else newest

    def rolled_back(self, release: Release) -> Promotion | None:
        """The step that took the release away again, so that it shall not come back by itself; else `None`."""
        if release.ref.record in champions(self.history):
            return None
        steps = [step.release for step in self.history]
        if release.ref.record not in steps:
            return None
        last = len(steps) - 1 - steps[::-1].index(release.ref.record)
        return next((step for step in self.history[last + 1 :] if step.action == "roll back"), None)

    def of(self, record: Digest) -> Release | None:
        """The release with that record."""
        return next((release for release in self.releases if release.ref.record == record), None)

    def contents(self, model: str, versions: Sequence[int]) -> dict[int, Digest]:
        """What was released as these versions of a model."""
        own = (release for release in self.releases if release.model == model)
        return {r.version: r.record.materials["engine"].content for r in own if r.version in versions}

    def last_promotion(self, release: Release) -> Promotion | None:
        """When that release became the champion last."""
        steps = [promotion for promotion in self.history if promotion.release == release.ref.record]
        return steps[-1] if steps else None

    def state(self, release: Release) -> str:
        """`champion`, `previous`, `candidate`, or `former` for one that was the champion once."""
        for name, one in (("champion", self.champion), ("previous", self.previous), ("candidate", self.candidate)):
            if one is not None and one.ref == release.ref:
                return name
        return "former" if self.last_promotion(release) else "verified"

    def _at(self, place: int) -> Release | None:
        found = [release for record in champions(self.history) if (release := self.of(record)) is not None]
        # A pipeline whose `model` or repository was changed began anew there: nothing leads back over that.
        stack = [r for r in found if (r.model, r.repository) == (found[-1].model, found[-1].repository)]
        return stack[place] if len(stack) >= -place else None


def champions(history: Sequence[Promotion]) -> list[Digest]:
    """The champions one above the other: going back takes away what came after, so that going back twice goes further.

    >>> # promote 1, 2, 3; roll back (to 2); promote 4  ->  1, 2, 4
    """
    stack: list[Digest] = []
    for promotion in history:
        if promotion.release in stack:
            del stack[stack.index(promotion.release) :]
        stack.append(promotion.release)
    return stack


def standing(store: ArtifactStore, pipeline: str) -> Standing:
    """Read a pipeline's releases and their history."""
    aliases = store.aliases(pipeline)
    return Standing(
        releases=tuple(Release(ref=ref, record=record) for ref, record in store.list(pipeline, RELEASE)),
        history=history(store, aliases.get(HISTORY)),
        pinned=frozenset(ref.record for name, ref in aliases.items() if name.startswith(PIN)),
    )


def history(store: ArtifactStore, newest: ArtifactRef | None) -> tuple[Promotion, ...]:
    """The promotions that lead to `newest`, oldest first."""
    steps: list[Promotion] = []
    while newest is not None:
        record = store.get_record(newest)
        steps.append(Promotion(ref=newest, record=record))
        former = record.materials.get("former")
        newest = None if former is None else _named(store, newest.pipeline, former.record)
    return tuple(reversed(steps))


def _named(store: ArtifactStore, pipeline: str, record: Digest) -> ArtifactRef:
    content = store.get_record(record).content
    # Its number is of no account here: the record is what the chain goes by.
    return ArtifactRef(pipeline=pipeline, stage=PROMOTION, number=0, record=record, content=content)


def find_recorded(
    standing: Standing, pipeline: Pipeline, candidate: Candidate, products: Mapping[str, ArtifactRef]
) -> Release | None:
    """Return the release of exactly this candidate, with exactly these proofs: the champion, or the newest."""
    wanted = {
        "repository": str(pipeline.repository.resolve()),
        "config": str(config_digest(candidate.config)),
        "version": candidate.version,
    }
    materials = {name: ref.content for name, ref in products.items()}
    found = [
        release
        for release in standing.releases
        if all(release.record.details[name] == value for name, value in wanted.items())
        and {name: material.content for name, material in release.record.materials.items()} == materials
    ]
    if standing.champion in found:
        return standing.champion
    return found[-1] if found else None


def yardstick(pipeline: Pipeline, *, champion: int | None, override: str | None) -> dict[str, Any]:
    """What a candidate is measured against on a staging server: where this has changed, so may have the judgement."""
    gates = pipeline.gates
    return {
        "gates": gates.model_dump(mode="json"),
        "tolerance": kind_of(pipeline).tolerance(pipeline).model_dump(mode="json"),
        "champion": champion if compares(gates) or gates.load is not None else None,
        "override": override,
    }


def record_release(
    store: ArtifactStore,
    pipeline: Pipeline,
    candidate: Candidate,
    products: Mapping[str, ArtifactRef],
    *,
    staging: Verification,
    champion: int | None = None,
    overrides: Sequence[str] = (),
    override: str | None = None,
) -> Release:
    """Keep what was verified on a staging server, from what it was made, and by which numbers; it is the candidate.

    `champion` is the version that it was compared with.
    """
    details: dict[str, Any] = {
        "repository": str(pipeline.repository.resolve()),
        "model": candidate.model,
        "version": candidate.version,
        "versions": list(candidate.versions),
        "config": str(config_digest(candidate.config)),
        "metrics": {name: {"staging": value} for name, value in staging.metrics.items()},
        "slices": {name: dict(values) for name, values in staging.slices.items()},
        "gates": gates_json(staging.gates),
        "judged_by": yardstick(pipeline, champion=champion, override=override),
        "override": override,
        "pipeline_file": str(pipeline.source),
        "overrides": list(overrides),
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(candidate.config, encoding="utf-8")
        ref = store.record(
            pipeline=pipeline.name, stage=RELEASE, content=Path(folder), materials=products, details=details
        )
    store.alias(pipeline.name, "candidate", ref)
    return Release(ref=ref, record=store.get_record(ref))


def record_promotion(
    store: ArtifactStore,
    release: Release,
    *,
    action: Action,
    live: Verification,
    replicas: Sequence[Replica],
    reason: str | None = None,
) -> Standing:
    """Keep that the release is the champion from now on; the aliases follow. The config is committed already."""
    pipeline = release.ref.pipeline
    former = store.aliases(pipeline).get(HISTORY)
    materials = {"release": release.ref} | ({} if former is None else {"former": former})
    ref = store.record(
        pipeline=pipeline,
        stage=PROMOTION,
        content=release.ref.content,
        materials=materials,
        metrics=dict(live.metrics),
        details={
            "action": action,
            "reason": reason,
            "release": str(release.ref),
            "gates": gates_json(live.gates),
            "servers": [replica.address.http_url for replica in replicas],
        },
    )
    store.alias(pipeline, HISTORY, ref)
    return point_aliases(store, pipeline)


def point_aliases(store: ArtifactStore, pipeline: str) -> Standing:
    """Make the aliases say what the history says; changes nothing where they do."""
    now = standing(store, pipeline)
    aliases = store.aliases(pipeline)
    wanted = {"champion": now.champion, "previous": now.previous, "candidate": now.candidate}
    for name, release in wanted.items():
        if release is None and name in aliases:
            store.unalias(pipeline, name)
        elif release is not None and aliases.get(name) != release.ref:
            store.alias(pipeline, name, release.ref)
    return now


def pin(store: ArtifactStore, release: Release) -> bool:
    """Keep a release's versions in the repository for good; whether that is new."""
    name = f"{PIN}{release.ref.number}"
    if name in store.aliases(release.ref.pipeline):
        return False
    store.alias(release.ref.pipeline, name, release.ref)
    return True


def unpin(store: ArtifactStore, release: Release) -> bool:
    """Leave a release to retention again; whether it was pinned."""
    name = f"{PIN}{release.ref.number}"
    if name not in store.aliases(release.ref.pipeline):
        return False
    store.unalias(release.ref.pipeline, name)
    return True


def used_versions(store: ArtifactStore, repository: Path) -> frozenset[int]:
    """Return the version numbers that releases into this repository have used; none is ever used again."""
    return frozenset(
        cast("int", record.details["version"])
        for _, record in store.list(None, RELEASE)
        if record.details["repository"] == str(repository.resolve())
    )


def superfluous(
    standing: Standing, *, model: str, repository: Path, keep: int, listed: Sequence[int]
) -> tuple[int, ...]:
    """Which versions retention removes: those that only releases beyond the newest `keep` list.

    Never one that the config lists now, nor one of the champion, the previous one, the candidate or a pinned release,
    nor one of which no release knows. Those that were removed before are among them.
    """
    own = [r for r in standing.releases if r.model == model and r.repository == repository.resolve()]
    named = {r.ref.record for r in (standing.champion, standing.previous, standing.candidate) if r is not None}
    kept = [r for r in own if r in own[-keep:] or r.ref.record in named | standing.pinned]
    known = {version for release in own for version in release.versions}
    needed = {version for release in kept for version in release.versions} | set(listed)
    return tuple(sorted(known - needed))


def gates_json(gates: Sequence[GateResult]) -> list[dict[str, Any]]:
    """The results of gates as records and reports hold them."""
    return [
        {"gate": g.gate, "runtime": g.runtime, "measured": g.measured, "allowed": g.allowed, "passed": g.passed}
        for g in gates
    ]


def config_digest(config: str) -> Digest:
    """Of a config's bytes."""
    return Digest.of(config.encode("utf-8", errors="surrogateescape"))
