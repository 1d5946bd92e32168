"""A release as one immutable unit for whoever deploys by image: baked into one, and as Kubernetes manifests."""

from functools import partial
from typing import Any

from flows.releases.desk import Desk, known
from flows.releases.moving import origin
from tasks.errors import Refused


def bake(desk: Desk, tag: str, *, base: str, push: bool) -> dict[str, Any]:
    """Make an image that holds the server and the named release, or the champion: one immutable unit."""
    from tasks.targets import docker_image

    now = desk.standing
    release = desk.named or now.champion
    if release is None:
        raise Refused(f"{desk.name} has no champion; name the release\n{known(now)}")
    engines = {version: origin(desk, release, version).record.materials["engine"] for version in release.versions}
    baked = docker_image.bake(
        tag,
        base=base,
        models={
            release.model: docker_image.Model(
                config=release.config(desk.store),
                versions={v: partial(desk.store.materialise, engine.content) for v, engine in engines.items()},
            )
        },
        labels={
            "release": str(release.ref),
            "record": str(release.ref.record),
            "config": release.config_digest,
            **{f"version.{version}": str(engine.content) for version, engine in engines.items()},
        },
        push=push,
    )
    return {
        "pipeline": desk.name,
        "release": str(release.ref),
        "image": baked.tag,
        "id": baked.id,
        "digest": baked.digest,
    }


def render(desk: Desk, image: str, *, replicas: int, gpus: int, kserve: bool, canary_percent: int | None) -> str:
    """Write Kubernetes manifests for the named release, or the champion, baked into `image`."""
    from tasks.targets import kubernetes

    now = desk.standing
    release = desk.named or now.champion
    if release is None:
        raise Refused(f"{desk.name} has no champion; name the release\n{known(now)}")
    unit = kubernetes.Unit(
        name=kubernetes.object_name(release.model),
        image=image,
        model=release.model,
        version=release.version,
        release=str(release.ref),
        record=str(release.ref.record),
        config=release.config(desk.store),
        replicas=replicas,
        gpus=gpus,
    )
    objects = (
        kubernetes.inference_service(unit, canary_percent=canary_percent) if kserve else kubernetes.manifests(unit)
    )
    return kubernetes.to_yaml(objects)
