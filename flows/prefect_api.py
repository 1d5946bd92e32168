"""The Prefect server that the environment or the profile names, asked synchronously; what it refuses, in our words."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import get_current_settings

from flows.local import check_server
from tasks.errors import ConfigError, NotReady, Problem


@contextmanager
def connected(*, patience: float = 0) -> Iterator[SyncPrefectClient]:
    """A client of the server. Raises `ConfigError` where none is named, `NotReady` where it does not answer.

    `patience` is how many seconds a server may take that was started just now.
    """
    if get_current_settings().api.url is None:
        raise ConfigError(
            Problem(
                "no Prefect server is named, and a temporary one knows of no runs",
                hint="start one with `prefect server start`, and set PREFECT_API_URL=http://127.0.0.1:4200/api",
            )
        )
    deadline = time.monotonic() + patience
    while True:
        try:
            check_server()
            break
        except NotReady:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.5)
    with get_client(sync_client=True) as client:
        yield client


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Turn what the server does not find or does not accept into a `ConfigError` with its own words."""
    try:
        yield
    except ObjectNotFound as error:
        raise ConfigError(Problem(f"the Prefect server knows no {what}")) from error
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
