"""The Prefect server of a home, asked synchronously; what it refuses, in our words."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from flows.operation import server
from tasks.artifacts.durable import reported
from tasks.errors import ConfigError, NotReady, Problem
from tasks.home import Home


def server_url(home: Home) -> str | None:
    """Where the server is that Prefect's settings name, else the one that `enginehouse up` keeps for a home."""
    kept = server.kept(home)
    return get_current_settings().api.url or (None if kept is None else kept.url)


@contextmanager
def connected(home: Home, *, patience: float = 0) -> Iterator[SyncPrefectClient]:
    """A client of that server, and within the block Prefect's settings to match.

    Raises `ConfigError` where there is none, `NotReady` where it does not answer, or within the block not any more.
    `patience` is how many seconds a server may take that was started just now.
    """
    with reported(home.root, "the home"):
        url, former = server_url(home), server.recorded(home)
    if url is None:
        kept = "none is kept" if former is None else f"the one that was kept is gone (log: {former.log})"
        raise ConfigError(
            Problem(
                f"no Prefect server is named, and for the home {home.root} {kept}",
                hint="enginehouse up starts one; PREFECT_API_URL=http://127.0.0.1:4200/api names one that runs",
            )
        )
    deadline = time.monotonic() + patience
    with temporary_settings({PREFECT_API_URL: url}):
        while True:
            try:
                check_server()
                break
            except NotReady:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.5)
        try:
            with get_client(sync_client=True) as client:
                yield client
        except httpx.TransportError as error:
            raise NotReady(
                f"the Prefect server at {url} answers no more: {str(error) or type(error).__name__}\n"
                "what runs goes on for a while; when the server is back, `enginehouse runs ls` tells what became of it"
            ) from error


def check_server() -> None:
    """Raise `NotReady` where the server that Prefect is told to use does not answer."""
    with get_client(sync_client=True) as client:
        problem = client.api_healthcheck()
    if problem is not None:
        raise NotReady(
            f"the Prefect server at {get_current_settings().api.url} does not answer: "
            f"{str(problem) or type(problem).__name__}\n"
            "PREFECT_API_URL or the Prefect profile names it: start it, or name one that runs, such as "
            "http://127.0.0.1:4200/api; with none named the one of `enginehouse up` is used"
        )


@contextmanager
def refusals(what: str, *, hint: str | None = None) -> Iterator[None]:
    """Turn what the server does not find or does not accept into a `ConfigError` with its own words.

    `hint`: what to do where it does not find it.
    """
    try:
        yield
    except ObjectNotFound as error:
        server = get_current_settings().api.url
        raise ConfigError(Problem(f"the Prefect server at {server} knows no {what}", hint=hint)) from error
    except PrefectHTTPStatusError as error:
        if error.response.status_code not in (404, 409, 422):
            raise
        raise ConfigError(Problem(f"{what}: {_said(error.response.text)}")) from error


def page(kind: str, identity: object) -> str | None:
    """The address of something's page in the UI."""
    url = get_current_settings().ui_url
    return f"{url}/{kind}/{identity}" if url else None


def _said(text: str) -> str:
    try:
        told: Any = json.loads(text)
    except ValueError:
        return text
    detail = told.get("detail", told) if isinstance(told, dict) else told
    return detail if isinstance(detail, str) else json.dumps(detail)
