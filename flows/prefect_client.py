"""A client of the Prefect server that belongs to a home: the one that the settings name, else the kept one."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from flows import server
from tasks.home import Home


@contextmanager
def connected(home: Home) -> Iterator[SyncPrefectClient | None]:
    """The client, and within the block Prefect's settings to match; None where no server is named and none is kept."""
    kept = server.kept(home)
    named = get_current_settings().api.url or (None if kept is None else kept.url)
    if named is None:
        yield None
        return
    with temporary_settings({PREFECT_API_URL: named}), get_client(sync_client=True) as client:
        yield client
