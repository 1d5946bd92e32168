"""Stage `deploy`: moves the servers to a verified release, commits it, and keeps its record.

The order makes every instant safe. The new version lies in the repository, listed by nobody. The servers are moved one
after the other, with the config in the call; each is asked again. Only then `config.pbtxt` is replaced, so that a
server that restarts in between serves what was the champion. Whatever fails, those already moved are moved back.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tasks.artifacts.digest import Digest, digest_of
from tasks.artifacts.record import ArtifactRef
from tasks.artifacts.store import ArtifactStore
from tasks.config import Pipeline
from tasks.errors import EnginehouseError
from tasks.events import Listener, note
from tasks.home import Home
from tasks.served import Candidate, Verification, disagreements, verify_server
from tasks.targets import DeployTarget, Replica
from tasks.toolchain import triton_client
from tasks.toolchain.model_repository import CONFIG, Repository, clear_leftovers, commit_config, models_of

STAGE = "deploy"
RELEASE = "release"
"""The kind under which releases are recorded: `digits/release@3`."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A set of versions with the whole config's bytes, and what proved it."""

    ref: ArtifactRef
    model: str
    version: int
    metrics: Mapping[str, Mapping[str, float]]
    """Per metric: `staging` and `live`."""


@contextmanager
def release_lock(home: Home, repository: Path, model: str) -> Iterator[None]:
    """Keep two releases of one model apart; waits for the other. Ends with the process that holds it."""
    home.locks.mkdir(parents=True, exist_ok=True)
    name = digest_of([str(repository.resolve()), model]).short
    with (home.locks / f"{model}-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def recorded_release(
    store: ArtifactStore, pipeline: Pipeline, candidate: Candidate, products: Mapping[str, ArtifactRef]
) -> Release | None:
    """Return the newest release record, if it is of exactly this candidate, proven by exactly these measurements."""
    record = store.latest(pipeline.name, RELEASE)
    if record is None or record.details["repository"] != str(pipeline.repository.resolve()):
        return None
    if record.details["config"] != str(_config_digest(candidate)) or record.details["version"] != candidate.version:
        return None
    if {name: m.content for name, m in record.materials.items()} != {n: r.content for n, r in products.items()}:
        return None
    ref = store.resolve(f"{pipeline.name}/{RELEASE}")
    return Release(
        ref=ref,
        model=candidate.model,
        version=candidate.version,
        metrics=cast("Mapping[str, Mapping[str, float]]", record.details["metrics"]),
    )


def settled(candidate: Candidate, *, target: DeployTarget) -> Sequence[Replica] | None:
    """Return the servers if they run and agree with the candidate, else `None`. Milliseconds, over plain HTTP."""
    replicas = target.observe()
    if not replicas or any(disagreements(replica.address, candidate) for replica in replicas):
        return None
    return replicas


def move(
    pipeline: Pipeline,
    candidate: Candidate,
    *,
    committed: str | None,
    target: DeployTarget,
    home: Home,
    listener: Listener,
) -> tuple[Verification, Sequence[Replica]]:
    """Bring every server to the candidate and ask it everything, live; then commit the config.

    `committed` is the text of `config.pbtxt` as it was observed. Raises `NotReady`, `GateFailed` or `CommandFailed`
    when a server does not follow; those already moved serve `committed` again then.
    """
    repository = Repository(pipeline.repository)
    folder = repository.folder(candidate.model)
    others = [model for model in models_of(repository) if model != candidate.model]
    # A champion that is replaced anyway is not loaded first: it may be the very reason for the new release.
    first = [candidate.model] if committed == candidate.config else []
    replicas = target.ensure([*others, *first], listener)
    moved: list[Replica] = []
    try:
        for replica in replicas:
            if disagreements(replica.address, candidate):
                clear_leftovers(folder)
                moved.append(replica)
                triton_client.load(replica.address, candidate.model, config_text=candidate.config, log=replica.log)
            with tempfile.TemporaryDirectory() as work:
                verification = verify_server(
                    replica.address,
                    pipeline,
                    candidate,
                    runtime="live",
                    work=Path(work),
                    log=home.serve / f"{replica.name}-evaluation.log",
                    listener=listener,
                )
        commit_config(folder, candidate.config, replacing=committed)
    except BaseException:
        for replica in reversed(moved):
            _move_back(replica, candidate.model, committed, listener)
        raise
    return verification, replicas


def _move_back(replica: Replica, model: str, committed: str | None, listener: Listener) -> None:
    try:
        if committed is None:
            triton_client.unload(replica.address, model)
        else:
            triton_client.load(replica.address, model, config_text=committed, log=replica.log)
    except EnginehouseError as error:  # the first failure is the one to report; this one is told beside it
        note(listener, f"{replica.address.http_url} could not be moved back to the champion: {error}")
    else:
        note(listener, f"{replica.address.http_url} serves what it served before")


def record_release(
    store: ArtifactStore,
    pipeline: Pipeline,
    candidate: Candidate,
    products: Mapping[str, ArtifactRef],
    *,
    staging: Verification,
    live: Verification,
    replicas: Sequence[Replica],
) -> Release:
    """Keep what was released, from what, proven by which numbers; the aliases `champion` and `previous` follow."""
    metrics: dict[str, dict[str, float]] = {}
    for runtime, verification in (("staging", staging), ("live", live)):
        for name, value in verification.metrics.items():
            metrics.setdefault(name, {})[runtime] = value
    details: dict[str, Any] = {
        "repository": str(pipeline.repository.resolve()),
        "model": candidate.model,
        "version": candidate.version,
        "versions": list(candidate.versions),
        "config": str(_config_digest(candidate)),
        "metrics": metrics,
        "gates": [
            {"gate": g.gate, "runtime": g.runtime, "measured": g.measured, "allowed": g.allowed, "passed": g.passed}
            for g in (*staging.gates, *live.gates)
        ],
        "servers": [replica.address.http_url for replica in replicas],
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(candidate.config, encoding="utf-8")
        ref = store.record(
            pipeline=pipeline.name, stage=RELEASE, content=Path(folder), materials=products, details=details
        )
    former = store.aliases(pipeline.name).get("champion")
    if former is not None:
        store.alias(pipeline.name, "previous", former)
    store.alias(pipeline.name, "champion", ref)
    return Release(ref=ref, model=candidate.model, version=candidate.version, metrics=metrics)


def _config_digest(candidate: Candidate) -> Digest:
    return Digest.of(candidate.config.encode())


def used_versions(store: ArtifactStore, pipeline: Pipeline) -> frozenset[int]:
    """Return the version numbers that releases into this repository have used; none is ever used again."""
    return frozenset(
        cast("int", record.details["version"])
        for _, record in store.list(pipeline.name, RELEASE)
        if record.details["repository"] == str(pipeline.repository.resolve())
    )
