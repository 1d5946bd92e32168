"""What was released: every release in a line, or one with its history, from which data and code, by which numbers."""

from collections.abc import Mapping
from typing import Any

from flows.releases.desk import Desk, known
from tasks import publish
from tasks.artifacts.store import ArtifactStore
from tasks.errors import Refused
from tasks.releases import Release, Standing


def listing(desk: Desk) -> list[dict[str, Any]]:
    """Every release of the pipeline, oldest first."""
    now = desk.standing
    rows = []
    for release in now.releases:
        last = now.last_promotion(release)
        rows.append(
            {
                **_named(desk, now, release),
                "verified": release.record.finished,
                "promoted": None if last is None else last.record.finished,
                "by": None if last is None else last.record.actor,
                "override": release.override,
                "metrics": merged_metrics(release, now),
            }
        )
    return rows


def _named(desk: Desk, now: Standing, release: Release) -> dict[str, Any]:
    return {
        "release": str(release.ref),
        "state": _state(desk, now, release),
        "pinned": release.ref.record in now.pinned,
        "model": release.model,
        "version": release.version,
        "versions": list(release.versions),
        "repository": str(release.repository),
    }


def describe(desk: Desk) -> dict[str, Any]:
    """What exactly a release is, from which data and code, proven by which numbers, and who promoted it when."""
    now = desk.standing
    release = desk.named or now.champion or now.candidate
    if release is None:
        raise Refused(f"{desk.name} has no champion\n{known(now)}")
    record = release.record
    engine, train = record.materials["engine"], _trained(desk.store, release)
    return {
        **_named(desk, now, release),
        "record": str(release.ref.record),
        "config": release.config(desk.store),
        "materials": {name: str(material.content) for name, material in record.materials.items()},
        "engine": [
            {"path": file.path, "size": file.size, "digest": str(file.digest)}
            for file in desk.store.content(engine.content).files
        ],
        "data": None if train is None else train.get("data"),
        "code": None if train is None else train.get("code"),
        "environment": None if train is None else train.get("environment"),
        "metrics": merged_metrics(release, now),
        "slices": record.details.get("slices", {}),
        "gates": release.gates,
        "override": release.override,
        "verified": {"at": record.finished, "by": record.actor},
        "history": [
            {
                "action": step.action,
                "at": step.record.finished,
                "by": step.record.actor,
                "reason": step.reason,
                "servers": step.record.details["servers"],
            }
            for step in now.history
            if step.release == release.ref.record
        ],
        "pipeline_file": str(release.pipeline_file),
        "overrides": list(release.overrides),
    }


def _state(desk: Desk, now: Standing, release: Release) -> str:
    if release != now.champion:
        return now.state(release)
    owner = publish.observe(publish.Repository(release.repository), release.model).owner
    return now.state(release) if owner in (None, desk.name) else f"taken over by {owner}"


def merged_metrics(release: Release, now: Standing) -> dict[str, dict[str, float]]:
    """Per metric, per runtime: what was measured on staging, and on the live server when it was promoted."""
    merged = {name: dict(values) for name, values in release.metrics.items()}
    for step in now.history:
        if step.release == release.ref.record:
            for name, value in step.metrics.items():
                merged.setdefault(name, {})["live"] = value
    return merged


def trained_on(store: ArtifactStore, release: Release) -> Any:
    """The identity of the data that the release was trained on (`data_identity`); `None` where that is not known."""
    train = _trained(store, release)
    return None if train is None else train.get("data")


def _trained(store: ArtifactStore, release: Release) -> Mapping[str, Any] | None:
    """The key of the training that the release's engine comes from."""
    record = store.get_record(release.record.materials["validate"].record)
    trained = record.materials.get("train")
    key = None if trained is None else store.get_record(trained.record).key
    return None if key is None else key.to_json()
