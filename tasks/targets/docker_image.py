"""Releases baked into an image: the server, the exact versions and the exact config as one immutable unit.

For whoever deploys by image, such as Kubernetes or the target `docker` with `baked`: the unit is named by its digest,
and needs no model repository. Its labels say which contents it holds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import CommandFailed, NotReady
from tasks.toolchain.docker_engine import PREFIX, engine, reported, require_image

DOCKERFILE = """\
FROM {base}
COPY models {repository}
"""
REPOSITORY = "/models"


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of an image."""

    config: str
    """The whole text of its `config.pbtxt`."""
    versions: Mapping[int, Callable[[Path], None]]
    """Per version, what writes its files into a new folder."""


@dataclass(frozen=True, kw_only=True)
class Baked:
    """An image of a release, or of several models'."""

    tag: str
    id: str
    """`sha256:…` of the image's configuration."""
    digest: str | None
    """`NAME@sha256:…` in the registry; `None` where it was not pushed."""


def bake(
    tag: str,
    *,
    base: str,
    models: Mapping[str, Model],
    labels: Mapping[str, str],
    push: bool,
) -> Baked:
    """Build the image `tag` from the server's image `base`, and push it where that is asked.

    Raises `ToolMissing` without engine or base,
    `CommandFailed` where the build fails, `NotReady` where the registry does not take it; then the image is here, and
    pushing again is all that is left to do.
    """
    import docker

    require_image(base)
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        (context / "Dockerfile").write_text(DOCKERFILE.format(base=base, repository=REPOSITORY))
        (context / "models").mkdir()
        for name, model in models.items():
            place = context / "models" / name
            place.mkdir()
            for version, write in model.versions.items():
                write(place / str(version))
            (place / "config.pbtxt").write_bytes(model.config.encode("utf-8", errors="surrogateescape"))
        for path in context.rglob("*"):  # the server in the image is nobody's root
            path.chmod(0o755 if path.is_dir() else 0o644)
        try:
            with reported(f"building {tag}"):
                image, _ = engine().images.build(
                    path=folder,
                    tag=tag,
                    rm=True,
                    labels={
                        "org.opencontainers.image.title": f"enginehouse release of {', '.join(models) or 'nothing'}",
                        "org.opencontainers.image.base.name": base,
                        **{f"{PREFIX}{name}": value for name, value in labels.items()},
                    },
                )
        except docker.errors.BuildError as error:
            raise CommandFailed(
                f"building {tag}", argv=["docker", "build", "--tag", tag], ended=str(error.msg)
            ) from error
    return Baked(tag=tag, id=image.id, digest=_push(tag) if push else None)


def _push(tag: str) -> str:
    with reported(f"pushing {tag}"):
        lines = list(engine().images.push(tag, stream=True, decode=True))
    failed = [line["error"] for line in lines if "error" in line]
    if failed:
        raise NotReady(
            f"the registry does not take {tag}: {failed[-1]}\n"
            "the image is built and stays here: bring the registry back and run this again"
        )
    digests = [line["aux"]["Digest"] for line in lines if "Digest" in line.get("aux", {})]
    return f"{tag.rpartition(':')[0]}@{digests[-1]}"
