"""What is released in a model repository, baked into one image: what the containers of `deploy.baked` are made from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tasks.artifacts.digest import Digest, digest_of
from tasks.targets import docker_image
from tasks.toolchain.config_pbtxt import listed_versions
from tasks.toolchain.docker_engine import PREFIX, engine, find_image, reported, require_image
from tasks.toolchain.model_repository import ModelFolder, Repository, models_of, observe


def released_image(name: str, *, base: str, repository: Repository, changed: Mapping[str, str | None]) -> Any:
    """The image of every released model, made and pushed if it is not there; an image of the SDK.

    `changed` puts a config in the place of a model's present one, or with `None` leaves the model out. The tag says
    what is inside, so that the same release is the same image again. It is pushed where `name` begins with a registry,
    as in `registry:5000/digits`. Raises as `docker_image.bake`.
    """
    folders = {model: observe(repository, model) for model in {*models_of(repository), *changed}}
    configs = {model: changed.get(model, folder.config) for model, folder in sorted(folders.items())}
    models = {model: _model(folders[model], text) for model, text in configs.items() if text is not None}
    contents = {
        f"content.{model}.{version}": str(folders[model].versions[version].provenance.engine.content)
        for model, held in models.items()
        for version in held.versions
    }
    labels = contents | {f"config.{model}": str(Digest.of(held.config.encode())) for model, held in models.items()}
    tag = f"{name}:{digest_of({**labels, 'base': require_image(base).id}).hex[:16]}"
    push = _names_a_registry(name)
    found = find_image(tag)
    if found is not None and (not push or any(d.startswith(f"{name}@") for d in found.attrs["RepoDigests"])):
        return found
    docker_image.bake(tag, base=base, models=models, labels=labels, push=push)
    return engine().images.get(tag)


def remove_images(name: str, labels: Mapping[str, str]) -> list[str]:
    """Remove from this engine the images of that name that have one of the labels, with that value; their tags.

    One that a container is made from stays; that another removes one meanwhile is no error.
    """
    import docker

    wanted, removed = {(f"{PREFIX}{label}", value) for label, value in labels.items()}, list[str]()
    with reported(f"looking for images of {name}"):
        # Not through `images.list`, which asks after each that it was told of: by then it may be gone.
        images = engine().api.images(name=name)
    for image in images:
        if not wanted.intersection((image["Labels"] or {}).items()):
            continue
        for tag in (tag for tag in image["RepoTags"] or () if tag.startswith(f"{name}:")):
            with reported(f"removing the image {tag}"):
                try:
                    engine().images.remove(tag)
                except docker.errors.APIError as error:
                    if error.status_code not in (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND):
                        raise
                else:
                    removed.append(tag)
    return removed


def _model(folder: ModelFolder, config: str) -> docker_image.Model:
    # One that was damaged is left out: the server is asked afterwards, and shows that it is missing.
    whole = [version for version in listed_versions(config) or () if version in folder.versions]
    return docker_image.Model(config=config, versions={v: _copy(folder.folder / str(v)) for v in whole})


def _copy(source: Path) -> Callable[[Path], None]:
    def copy(target: Path) -> None:
        shutil.copytree(source, target)

    return copy


def _names_a_registry(name: str) -> bool:
    """By Docker's own rule: the first part of a name is a registry where it could be a host."""
    first, slash, _ = name.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")
