"""The flows `gc` and `check-drift`: what a schedule does beside training."""

from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.events import emit_event
from pydantic import Field

from flows.parameters import HomeFolder, Override, PipelineFile
from tasks import drift
from tasks.artifacts.store import ArtifactStore
from tasks.errors import ConfigError
from tasks.events import Event, Listener, note
from tasks.home import Home, find_home
from tasks.pipeline_file import load

UPDATED = "dataset.updated"
"""The event that the triggers of deployments wait for."""


def dataset_resource(pipeline: str) -> str:
    """What the event is about: the data of a pipeline."""
    return f"enginehouse.dataset.{pipeline}"


@flow(name="gc", persist_result=False)
def gc(
    home: HomeFolder = None,
    keep: Annotated[int, Field(ge=1, description="How many of the latest builds of each stage stay.")] = 3,
    dry_run: Annotated[bool, Field(description="Only say what would be removed.")] = False,
) -> dict[str, Any]:
    """Remove from the store what no release, no alias and none of the latest builds needs."""
    room = find_home(Path.cwd()) if home is None else Home(home.absolute())
    if not room.store.is_dir():
        raise ConfigError(f"there is no store at {room.store}: name the folder that holds it with `home`")
    listener = _logged()
    garbage = ArtifactStore.open(room.store, warn=lambda text: note(listener, text)).gc(dry_run=dry_run, keep=keep)
    get_run_logger().info(
        "%s %d records, %d objects and %d work folders: %d bytes",
        "would remove" if dry_run else "removed",
        *(len(found) for found in (garbage.records, garbage.objects, garbage.works)),
        garbage.bytes,
    )
    return {"bytes": garbage.bytes, "records": len(garbage.records), "objects": len(garbage.objects)}


@flow(name="check-drift", persist_result=False)
def check_drift(
    pipeline: PipelineFile,
    recent: Annotated[Path, Field(description="Recent data or requests: what the recipe's `drift` reads.")],
    overrides: Annotated[
        list[Override],
        Field(description="What the event passes on to the training, such as `data.NAME.version=2026-07`."),
    ] = [],  # noqa: B006 - Prefect makes the form's default of it, and nobody changes it
) -> dict[str, Any]:
    """Compare recent data with the training's, by the recipe's own measure; say `dataset.updated` where it drifted."""
    opened = load(pipeline)
    found = drift.check(opened, recent.absolute(), home=find_home(opened.folder), listener=_logged())
    get_run_logger().info("%s: %s, %s", opened.name, "drifted" if found.drifted else "no drift", found.scores)
    if found.drifted:
        emit_event(
            UPDATED,
            resource={"prefect.resource.id": dataset_resource(opened.name)},
            payload={"overrides": list(overrides), "drift": dict(found.scores), "recent": str(recent)},
        )
    return {"pipeline": opened.name, "drifted": found.drifted, "scores": dict(found.scores)}


def _logged() -> Listener:
    logger = get_run_logger()

    def listen(event: Event) -> None:
        if event["type"] == "note":
            logger.warning(event["text"])
        elif event["type"] == "line":
            logger.info("%s: %s", event["stage"], event["line"])

    return listen
