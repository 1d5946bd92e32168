"""The stage that puts a version into a Triton model repository: observe, plan, place, commit.

A reconciling stage: it works out what differs from what is wanted, and run twice it does nothing the second time. It
talks to no server. Between `place_version`, which nobody sees yet, and `commit_config`, by which the version is
released, a caller loads `plan.config_text` on a staging server and moves the replicas.

    todo = plan(observe(repository, "digits"), wanted)
    if todo.reuses is None:
        place_version(todo, source)
        todo = plan(observe(repository, "digits"), wanted)    # now reuses it, also if others published meanwhile
    ...                                                       # verify todo.config_text, move the servers
    commit(todo)

The champion is by rule the highest listed version, since that is what a request without a version reaches. The one
before it stays listed, so that going back loads nothing.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.artifacts.content import FileEntry
from tasks.artifacts.record import ArtifactRef
from tasks.errors import Refused, StoreUnusable
from tasks.toolchain.config_pbtxt import parse, signature_of, with_versions
from tasks.toolchain.model_repository import ModelFolder, Published, Repository, observe
from tasks.toolchain.model_writing import clear_leftovers, commit_config, place, seal, staging
from tasks.toolchain.provenance import PROVENANCE, Origin, Provenance

__all__ = [
    "STAGE",
    "ModelFolder",
    "Provenance",
    "PublishPlan",
    "Published",
    "Repository",
    "Wanted",
    "clear_leftovers",
    "commit",
    "commit_config",
    "observe",
    "place_version",
    "plan",
    "refuse_somebody_elses",
    "release_config",
    "remove_versions",
    "require_usable",
    "restore_version",
]

STAGE = "publish"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What should be the model's champion."""

    pipeline: str
    model: str
    """Triton's name of the model, which is the name of its folder."""
    engine: ArtifactRef
    files: tuple[FileEntry, ...]
    """The files of the version, which are the engine's content."""
    config: ArtifactRef
    config_text: str
    """The content of `config`: a config.pbtxt that lists no versions."""
    actor: str
    """user@host."""
    takes_over: str | None = None
    """Another pipeline whose model it may go on with."""
    used: frozenset[int] = frozenset()
    """Numbers that records of former releases name: never used again, though their folders may be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    """What has to be done, and to what it was compared; printing it changes nothing."""

    observed: ModelFolder
    wanted: Wanted
    version: int
    """The champion to be."""
    reuses: Published | None
    """The version, if it is there already."""
    previous: int | None
    """The version that stays listed beside it."""
    config_text: str
    """The whole config.pbtxt of the release."""

    @property
    def steps(self) -> tuple[str, ...]:
        """What would be done, in order; empty if everything is as it should be."""
        steps = [f"clear {name}, left by a publisher that died" for name in self.observed.leftovers]
        if self.reuses is None:
            engine = self.wanted.engine
            steps.append(f"place version {self.version} from {engine} ({engine.content.short})")
        if self.config_text != self.observed.config:
            listed = ", ".join(str(v) for v in (self.previous, self.version) if v is not None)
            verb = "write" if self.observed.config is None else "replace"
            steps.append(f"{verb} config.pbtxt, listing {listed}")
        return tuple(steps)

    def __str__(self) -> str:
        where = f"model {self.wanted.model} in {self.observed.repository.path}"
        if not self.steps:
            return f"{where}: version {self.version} is published; nothing to do"
        lines = [f"{where}:", *(f"  {step}" for step in self.steps)]
        old = (self.observed.config or "").splitlines()
        changes = list(difflib.unified_diff(old, self.config_text.splitlines(), lineterm="", n=0))[2:]
        lines += [f"    {line}" for line in changes if not line.startswith("@@")]
        left = {**self.observed.foreign, **{str(v): why for v, why in self.observed.damaged.items()}}
        lines += [f"  left as it is: {name}, which {why}" for name, why in left.items()]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "repository": str(self.observed.repository.path),
            "model": self.wanted.model,
            "version": self.version,
            "reused": self.reuses is not None,
            "previous": self.previous,
            "champion": self.observed.champion,
            "config": self.config_text,
            "steps": list(self.steps),
        }


def plan(observed: ModelFolder, wanted: Wanted) -> PublishPlan:
    """Which version the wanted engine becomes, and what that changes.

    A version that holds the same content is used again if nothing above it is listed; else a number above every one
    that ever was.

    Raises:
        Refused: the folder is somebody else's model, or clients of the champion could not talk to the wanted one.
    """
    assert parse(wanted.config_text).name == wanted.model == observed.model
    refuse_somebody_elses(observed, wanted.pipeline, takes_over=wanted.takes_over)
    _refuse_another_signature(observed, wanted)
    champion = observed.champion
    same = [
        published
        for version, published in observed.versions.items()
        if published.provenance.engine.content == wanted.engine.content and (champion is None or version >= champion)
    ]
    reuses = max(same, key=lambda published: published.version, default=None)
    version = reuses.version if reuses else max(observed.taken | wanted.used, default=0) + 1
    # One listed version that cannot load blocks them all, so a damaged or missing one is not carried on.
    kept = [v for v in observed.listed if v < version and v in observed.there - observed.damaged.keys()]
    previous = max(kept, default=None)
    return PublishPlan(
        observed=observed,
        wanted=wanted,
        version=version,
        reuses=reuses,
        previous=previous,
        config_text=release_config(wanted.config_text, version, previous),
    )


def refuse_somebody_elses(observed: ModelFolder, pipeline: str, *, takes_over: str | None) -> None:
    """Raise `Refused` where the model is not the pipeline's: made by hand, or published by another pipeline.

    `takes_over` names the other pipeline whose model this one may go on with.
    """
    if why := observed.made_by_hand:
        raise Refused(
            f"{observed.folder} is a model made by hand ({why}), and stays as it is\n"
            "choose another `model` name in the pipeline file, or move that folder away"
        )
    if observed.owner not in (None, pipeline, takes_over):
        raise Refused(
            f"{observed.folder} is the model of pipeline {observed.owner}, whose champion {pipeline} would replace\n"
            "choose another `model` name or another `publish.repository` in the pipeline file, or let it go on with "
            f"that model by `publish.takes_over: {observed.owner}`"
        )


def require_usable(repository: Repository, model: str) -> None:
    """Raise `StoreUnusable` where the model could not be published: asked before hours of training. Writes nothing."""
    mend = "name another `publish.repository` in the pipeline file, or let this user write there"
    folder = repository.folder(model)
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise StoreUnusable(
            f"the model repository cannot be read: {error.strerror}: {error.filename}\n{mend}"
        ) from error
    if not nearest.is_dir():
        raise StoreUnusable(f"the model repository {repository.path} cannot be a folder: {nearest} is a file\n{mend}")
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=True):
        raise StoreUnusable(f"the model repository {repository.path} cannot be written: {nearest} is read-only\n{mend}")


def release_config(base_config: str, champion: int, previous: int | None) -> str:
    """The whole config of a release; `previous` stays loaded beside the champion."""
    assert previous is None or previous < champion, "requests without a version reach the highest one"
    return with_versions(base_config, [champion] if previous is None else [previous, champion])


def place_version(plan: PublishPlan, source: Callable[[Path], None]) -> Published:
    """Put the engine's files in the place of a version, whole or not at all; nothing serves it yet.

    `source` makes the folder that it is given and copies the engine's files into it, comparing their digests. Should
    another publisher take the number meanwhile, the version gets the next free one, or is the other's if that has the
    same content: plan again afterwards.

    Raises:
        Refused: the copied files are not the engine's; or the new plan is refused.
        StoreUnusable: the repository cannot be written. Nothing has changed.
    """
    if plan.reuses is not None:
        clear_leftovers(plan.observed.folder)
        return plan.reuses
    wanted = plan.wanted
    assert all(f.path != PROVENANCE for f in wanted.files), "the name is ours"
    with staging(plan.observed.folder) as stage:
        content = stage / "version"
        source(content)
        provenance = Provenance(
            pipeline=wanted.pipeline,
            model=wanted.model,
            version=plan.version,
            engine=Origin.of(wanted.engine),
            config=Origin.of(wanted.config),
            files=seal(content, wanted.files),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            actor=wanted.actor,
        )
        while True:
            if target := place(content, plan.observed.folder, provenance):
                return Published(model=wanted.model, version=plan.version, folder=target, provenance=provenance)
            plan = _plan_again(plan)
            if plan.reuses is not None:
                return plan.reuses
            provenance = replace(provenance, version=plan.version)


def restore_version(
    observed: ModelFolder, version: int, origin: Provenance, files: Sequence[FileEntry], source: Callable[[Path], None]
) -> None:
    """Put a version that retention removed, or that was damaged, back in its place: the same bytes, the same number.

    `origin` says what it was; `source` copies the engine's files, as for `place_version`.

    Raises:
        Refused: the copied files are not the engine's, or something else has the number.
        StoreUnusable: the repository cannot be written. Nothing has changed.
    """
    with staging(observed.folder) as stage:
        content = stage / "version"
        source(content)
        provenance = replace(origin, version=version, files=seal(content, files))
        if version in observed.damaged:
            (observed.folder / str(version)).rename(stage / "damaged")
        if place(content, observed.folder, provenance) is None:
            raise Refused(f"{observed.folder / str(version)} is there and is not ours\nmove it away, and run again")


def remove_versions(observed: ModelFolder, versions: Sequence[int]) -> None:
    """Take versions of ours that nothing lists out of the repository; each goes at one instant.

    Raises:
        StoreUnusable: the repository cannot be written.
    """
    assert not set(versions).intersection(observed.listed), "a listed version is served"
    assert observed.versions.keys() >= set(versions), "only what we placed is ours to remove"
    for version in versions:
        with staging(observed.folder) as stage:
            (observed.folder / str(version)).rename(stage / "removed")


def commit(plan: PublishPlan) -> bool:
    """Release the plan's version by replacing config.pbtxt; returns whether anything changed. See `commit_config`."""
    assert plan.reuses is not None, "place the version and plan again"
    return commit_config(plan.observed.folder, plan.config_text, replacing=plan.observed.config)


def _plan_again(old: PublishPlan) -> PublishPlan:
    return plan(observe(old.observed.repository, old.wanted.model), old.wanted)


def _refuse_another_signature(observed: ModelFolder, wanted: Wanted) -> None:
    if observed.config is None or observed.champion is None:
        return
    champions, wanteds = signature_of(observed.config), signature_of(wanted.config_text)
    if champions != wanteds:
        raise Refused(
            f"the inputs or outputs of {wanted.engine} differ from those of the champion, version {observed.champion} "
            f"of {observed.folder}, and one config.pbtxt holds for all versions\n"
            f"  champion: {champions}\n  wanted:   {wanteds}\n"
            "publish it under another `model` name in the pipeline file"
        )
