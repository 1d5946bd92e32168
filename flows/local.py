"""Runs the flow in a process of its own, for `enginehouse run`: no Prefect server is needed, and none stays.

    python -I -u -m flows.local request.json

The server is the one that Prefect's settings name, else the one that `enginehouse up` keeps for this home, else a
temporary one, a child of this process. So that it dies with the run however the run dies, the command line starts this
program under the supervisor. It tells what happens on lines `::event {JSON}`, and ends with one line `::report {JSON}`
or `::error {JSON}`; all other lines are Prefect's own log.
"""

import atexit
import json
import os
import sys
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flows.operation import server
from tasks.errors import EnginehouseError
from tasks.events import Event
from tasks.home import find_home

EVENT, REPORT, ERROR = "::event ", "::report ", "::error "


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


def find_server(pipeline: Path, log: Path) -> Callable[[], None]:
    """Make Prefect use the server that is there, or a temporary one; returns what waits until that answers.

    A temporary one is started before the flow is imported: both take seconds, and neither needs the other.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    from flows.operation.api import check_server

    if get_current_settings().api.url is not None:
        return check_server
    kept = server.kept(find_home(pipeline.parent))
    if kept is not None:
        os.environ["PREFECT_API_URL"] = kept.url
        wait = check_server
    else:
        # Closed when Prefect has sent its last events, which it does at exit: what is registered first is called last.
        url, process = _AT_EXIT.enter_context(server.temporary(log, os.environ))
        os.environ["PREFECT_API_URL"] = url
        os.environ["PREFECT_SERVER_UI_ENABLED"] = "0"  # nothing shall lead to pages that are gone with the run

        def wait() -> None:
            server.await_answer(url, lambda: process.poll() is None, log)

    refresh_global_settings_context()
    return wait


_AT_EXIT = ExitStack()


def main() -> None:
    """Run the flow that the request asks for."""
    file = Path(sys.argv[1])
    request = json.loads(file.read_bytes())
    for name, value in server.QUIET.items():
        os.environ.setdefault(name, value)
    without_proxy(os.environ)
    atexit.register(_AT_EXIT.close)
    try:
        answers = find_server(Path(request["pipeline"]), file.with_suffix(".prefect"))
        from flows.train_to_deploy import LISTENER, train_to_deploy

        LISTENER.set(tell)
        answers()
        report = train_to_deploy(**request)
    except EnginehouseError as error:
        say(ERROR, {"kind": error.kind, "message": str(error), "exit_status": error.exit_status})
        sys.exit(error.exit_status)
    say(REPORT, report)


if __name__ == "__main__":
    main()
