"""What stays in the model repository: the newest releases, and those that a person pinned."""

from typing import Any

from flows.releases.desk import Desk, known
from tasks import publish
from tasks.artifacts.store import ArtifactStore
from tasks.config import Pipeline
from tasks.errors import EnginehouseError, Refused
from tasks.events import Listener, note
from tasks.releases import pin, standing, superfluous, unpin
from tasks.targets import DeployTarget


def set_pin(desk: Desk, *, remove: bool = False) -> dict[str, Any]:
    """Keep the named release's versions in the repository whatever `publish.keep` says, or stop doing so."""
    release = desk.named or desk.standing.champion
    if release is None:
        raise Refused(f"{desk.name} has no champion; name the release to pin\n{known(desk.standing)}")
    changed = unpin(desk.store, release) if remove else pin(desk.store, release)
    state = ("unpinned" if remove else "pinned") if changed else "unchanged"
    return {"pipeline": desk.name, "state": state, "release": str(release.ref)}


def retain(store: ArtifactStore, pipeline: Pipeline, target: DeployTarget, listener: Listener) -> list[str]:
    """Remove the versions that only releases beyond `publish.keep` need, and what the target keeps of them; what was
    done, in words."""
    observed = publish.observe(publish.Repository(pipeline.repository), pipeline.model)
    now = standing(store, pipeline.name)
    needless = superfluous(
        now,
        model=pipeline.model,
        repository=pipeline.repository,
        keep=pipeline.publish.keep,
        listed=observed.listed,
    )
    done = []
    if gone := [version for version in needless if version in observed.versions]:
        publish.remove_versions(observed, gone)
        done.append(
            f"removed version {', '.join(map(str, gone))} of {pipeline.model} from the repository (publish.keep)"
        )
    try:
        # Also what could not be forgotten when its version went.
        done += target.forget(pipeline.model, now.contents(pipeline.model, needless))
    except EnginehouseError as error:  # the release is served all the same
        done.append(f"what {pipeline.deploy.kind} keeps of it stays: {error}")
    for text in done:
        note(listener, text)
    return done
