"""Runs the flow in a process of its own, for `enginehouse run`: no Prefect server is needed, and none stays.

    python -I -u -m flows.local request.json

Prefect starts a temporary server as a child of the process that runs a flow. So that it dies with the run however the
run dies, the command line starts this program under the supervisor. It tells what happens on lines `::event {JSON}`,
and ends with one line `::report {JSON}` or `::error {JSON}`; all other lines are Prefect's own log.
"""

import json
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from tasks.errors import EnginehouseError, NotReady
from tasks.events import Event

EVENT, REPORT, ERROR = "::event ", "::report ", "::error "

DEFAULTS = {
    # The default of 20 s does not suffice for a temporary server's first start on a small machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # The temporary server is started with `-m`, which looks for modules in the current folder first: a `json.py` there
    # would be taken for Python's own.
    "PYTHONSAFEPATH": "1",
}


def say(prefix: str, value: dict[str, Any]) -> None:
    """Tell the command line something."""
    sys.stdout.write(f"{prefix}{json.dumps(value)}\n")
    sys.stdout.flush()


def tell(event: Event) -> None:
    """The listener of the flow."""
    say(EVENT, event)


def without_proxy(environ: MutableMapping[str, str]) -> None:
    """Keep what goes to this machine from a proxy, which cannot reach it: Prefect's temporary server listens here."""
    set_by_user = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = [host for host in set_by_user.split(",") if host.strip()]
    if "*" not in (host.strip() for host in hosts):
        value = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost", "::1"]))
        environ["no_proxy"] = environ["NO_PROXY"] = value


def check_server() -> None:
    """Raise `NotReady` where Prefect is told to use a server that does not answer."""
    from prefect import get_client
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url
    if url is None:
        return  # Prefect starts a temporary one
    with get_client(sync_client=True) as client:
        problem = client.api_healthcheck()
    if problem is not None:
        raise NotReady(
            f"the Prefect server at {url} does not answer: {str(problem) or type(problem).__name__}\n"
            "PREFECT_API_URL or the Prefect profile names it: start it, or unset the variable for a temporary server"
        )


def main() -> None:
    """Run the flow that the request asks for."""
    request = json.loads(Path(sys.argv[1]).read_bytes())
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    without_proxy(os.environ)
    # Prefect reads its settings at import.
    from flows.train_to_deploy import LISTENER, train_to_deploy

    LISTENER.set(tell)
    try:
        check_server()
        report = train_to_deploy(**request)
    except EnginehouseError as error:
        say(ERROR, {"kind": error.kind, "message": str(error), "exit_status": error.exit_status})
        sys.exit(error.exit_status)
    say(REPORT, report)


if __name__ == "__main__":
    main()
