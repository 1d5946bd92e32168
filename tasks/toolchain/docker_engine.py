"""A Docker engine, through Docker's own SDK: found, and its errors in words. The only module that imports the SDK."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from http import HTTPStatus
from typing import Any

from tasks.errors import NotReady, ToolMissing

PREFIX = "org.enginehouse."
"""Of the labels by which containers and images of ours are known again."""


@cache
def engine() -> Any:
    """A `docker.DockerClient` on $DOCKER_HOST or the default socket. Raises ToolMissing where there is none."""
    try:
        import docker
    except ImportError:
        raise ToolMissing(
            "the docker SDK",
            why="`deploy.kind: docker` speaks to the Docker engine through it",
            mend="pip install 'enginehouse[docker]'",
        ) from None
    try:
        client = docker.from_env(timeout=60)
        client.ping()
    except docker.errors.DockerException as error:
        raise ToolMissing(
            "the Docker engine",
            why=f"nothing answers at $DOCKER_HOST or the default socket: {error}",
            mend="start it (Debian and Ubuntu: apt-get install docker.io), or name its socket in $DOCKER_HOST",
        ) from error
    return client


@contextmanager
def reported(what: str) -> Iterator[None]:
    """The engine's refusals inside the block become NotReady, in its own words."""
    import docker
    import requests

    try:
        yield
    except docker.errors.APIError as error:
        raise NotReady(f"{what}: the Docker engine says: {error.explanation or error}") from error
    except requests.exceptions.RequestException as error:
        raise NotReady(
            f"{what}: the Docker engine does not answer: {error}\nstart it again, and run this again"
        ) from error


def containers_with(label: str, value: str | None = None) -> list[Any]:
    """Every container that has the label, with that value where one is given, whether it runs or not.

    One that somebody removes at this moment is left out.
    """
    wanted = label if value is None else f"{label}={value}"
    with reported("looking for containers"):
        # The SDK asks after each that it was told of; by then it may be gone.
        found: list[Any] = engine().containers.list(all=True, filters={"label": wanted}, ignore_removed=True)
    return found


def remove(container: Any, *, drain_seconds: int = 0) -> None:
    """Remove a container, after SIGTERM and as many seconds to drain; that another does so meanwhile is no error."""
    import docker

    with reported(f"removing {container.name}"):
        try:
            if drain_seconds:
                container.stop(timeout=drain_seconds)
            container.remove(force=True)
        except docker.errors.NotFound:
            pass
        except docker.errors.APIError as error:
            if error.status_code != HTTPStatus.CONFLICT:  # another is removing it: its name is not free before the end
                raise
            with suppress(docker.errors.NotFound):
                container.wait(condition="removed")


@contextmanager
def held(container: Any) -> Iterator[None]:
    """Start a created container whose standard input we hold for the time of the block.

    The engine closes that input when the block ends, or this process, however it ends: the connection goes with it.
    """
    # Before the start: a container that nobody ever held would wait for good.
    stdin = engine().api.attach_socket(container.id, params={"stdin": 1, "stream": 1})
    try:
        with reported(f"starting {container.name}"):
            container.start()
        yield
    finally:
        stdin.close()


def find_image(image: str) -> Any:
    """The image if it is on this engine; else `None`."""
    import docker

    try:
        return engine().images.get(image)
    except docker.errors.ImageNotFound:
        return None


def require_image(image: str) -> Any:
    """The image, pulled where it is not here. Raises ToolMissing with the way to make it."""
    import docker

    if (found := find_image(image)) is not None:
        return found
    mend = (
        "make it with `containers/build triton`"
        if image.startswith("enginehouse/")
        else "pull it, or name another `deploy.image`"
    )
    if image.startswith("enginehouse/"):  # made here, in no registry
        raise ToolMissing(f"the image {image}", why="the containers are made from it", mend=mend)
    try:
        return engine().images.pull(image)
    except docker.errors.APIError as error:
        raise ToolMissing(f"the image {image}", why=f"it cannot be pulled: {error.explanation}", mend=mend) from error


def tail(container: Any, count: int = 12) -> tuple[str, ...]:
    """The last lines of a container's log."""
    text: bytes = container.logs(tail=count)
    return tuple(text.decode(errors="replace").splitlines())
