"""The flows `gc` and `check-drift`: what a schedule does beside training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.events import emit_event

from flows.operation.log import logged, without_tracebacks
from flows.parameters import AtLeastOne, Override, PipelineFile
from tasks import drift
from tasks.artifacts.store import ArtifactStore
from tasks.errors import ConfigError
from tasks.events import note
from tasks.home import Home, find_home
from tasks.pipeline_file import load

UPDATED = "dataset.updated"
"""The event that the triggers of deployments wait for."""


def dataset_resource(pipeline: str) -> str:
    """What the event is about: the data of a pipeline."""
    return f"enginehouse.dataset.{pipeline}"


@flow(name="gc", persist_result=False)
def gc(home: Path | None = None, keep: AtLeastOne = 3, dry_run: bool = False) -> dict[str, Any]:
    """Remove from the store what no release, no alias and none of the latest builds needs.

    Parameters:
        home: the folder with the store; found from the deployment's folder if left out
        keep: how many of the latest builds of each stage stay
        dry_run: only say what would be removed
    """
    without_tracebacks()
    room = find_home(Path.cwd()) if home is None else Home(home.absolute())
    if not room.store.is_dir():
        raise ConfigError(f"there is no store at {room.store}: name the folder that holds it with `home`")
    listener = logged(get_run_logger())
    garbage = ArtifactStore.open(room.store, warn=lambda text: note(listener, text)).gc(dry_run=dry_run, keep=keep)
    get_run_logger().info(
        "%s %d records, %d objects and %d work folders: %d bytes",
        "would remove" if dry_run else "removed",
        *(len(found) for found in (garbage.records, garbage.objects, garbage.works)),
        garbage.bytes,
    )
    return {"bytes": garbage.bytes, "records": len(garbage.records), "objects": len(garbage.objects)}


@flow(name="check-drift", persist_result=False)
def check_drift(pipeline: PipelineFile, recent: Path, overrides: Sequence[Override] = ()) -> dict[str, Any]:
    """Compare recent data with the training's, by the recipe's own measure; say `dataset.updated` where it drifted.

    Parameters:
        pipeline: the pipeline file
        recent: recent data or requests, in whatever form the recipe's `drift` reads
        overrides: what the event passes on to the training, such as `data.NAME.version=2026-07`
    """
    without_tracebacks()
    opened = load(pipeline)
    found = drift.check(opened, recent.absolute(), home=find_home(opened.folder), listener=logged(get_run_logger()))
    get_run_logger().info("%s: %s, %s", opened.name, "drifted" if found.drifted else "no drift", found.scores)
    if found.drifted:
        emit_event(
            UPDATED,
            resource={"prefect.resource.id": dataset_resource(opened.name)},
            payload={"overrides": list(overrides), "drift": dict(found.scores), "recent": str(recent)},
        )
    return {"pipeline": opened.name, "drifted": found.drifted, "scores": dict(found.scores)}
