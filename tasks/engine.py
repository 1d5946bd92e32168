"""Stage `engine`: the exported graph becomes what the server runs, by the kind that the pipeline file names."""

from __future__ import annotations

from tasks.config import Pipeline
from tasks.engines import kind_of
from tasks.pipeline_file import at_their_lines
from tasks.stage import Built, Identity, KeyedStage, KeyParts, Site, Step


def _parts(pipeline: Pipeline, _identity: Identity) -> KeyParts:
    with at_their_lines(pipeline):
        return kind_of(pipeline).parts(pipeline)


def _steps(site: Site) -> tuple[Step, ...]:
    with at_their_lines(site.pipeline):
        return kind_of(site.pipeline).steps(site)


def _collect(site: Site) -> Built:
    site.product.mkdir(parents=True, exist_ok=True)
    with at_their_lines(site.pipeline):
        return kind_of(site.pipeline).collect(site)


def _check(pipeline: Pipeline) -> None:
    with at_their_lines(pipeline):
        kind_of(pipeline).check(pipeline)


def _preview(pipeline: Pipeline) -> tuple[str, ...]:
    return kind_of(pipeline).preview(pipeline)


STAGE = KeyedStage(
    name="engine",
    version=1,
    reproducible=False,  # a kind that compiles by timing is not; for the others equal bytes are found equal anyway
    materials=("export", "precision"),
    parts=_parts,
    steps=_steps,
    collect=_collect,
    check=_check,
    preview=_preview,
)
