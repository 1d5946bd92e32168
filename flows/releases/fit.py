"""Whether the servers can load an engine at all: asked before anything is built, copied or started."""

from collections.abc import Sequence

from tasks.artifacts.digest import Digest
from tasks.artifacts.store import ArtifactStore
from tasks.config import Pipeline
from tasks.engines import kind_of
from tasks.errors import Refused
from tasks.targets import DeployTarget


def refuse_unfit(store: ArtifactStore, pipeline: Pipeline, name: str, engine: Digest, target: DeployTarget) -> None:
    """Raise `Refused` when the target's servers cannot load the engine, before anything is copied or started."""
    details = store.get_record(engine).details
    _refuse(f"{name} does not fit the server; nothing was copied", kind_of(pipeline).unfit(details, target.facts()))


def refuse_unfit_plan(pipeline: Pipeline, target: DeployTarget) -> None:
    """Raise `Refused` when the engine that the pipeline file describes would not fit, before an hour of training."""
    kind = kind_of(pipeline)
    if (details := kind.expected(pipeline)) is not None:
        what = f"the engine of {pipeline.name} would not fit the server; nothing was run"
        _refuse(what, kind.unfit(details, target.facts()))


def _refuse(what: str, unfit: Sequence[str]) -> None:
    if unfit:
        raise Refused(
            f"{what}:\n"
            + "\n".join(f"  {reason}" for reason in unfit)
            + "\nbuild it for what serves (engine.target, engine.compute_capability), or serve with what it is for"
        )
