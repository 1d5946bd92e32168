"""Runs the flow in a process of its own, for `enginehouse run`: no Prefect server is needed, and none stays.

    python -I -u -m flows.local request.json

Prefect starts a temporary server as a child of the process that runs a flow. So that it dies with the run however the
run dies, the command line starts this program under the supervisor. It tells what happens on lines `::event {JSON}`,
and ends with one line `::report {JSON}` or `::error {JSON}`; all other lines are Prefect's own log.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tasks.errors import EnginehouseError
from tasks.events import Event

EVENT, REPORT, ERROR = "::event ", "::report ", "::error "

DEFAULTS = {
    # The default of 20 s does not suffice for a temporary server's first start on a small machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


def say(prefix: str, value: dict[str, Any]) -> None:
    """Tell the command line something."""
    sys.stdout.write(f"{prefix}{json.dumps(value)}\n")
    sys.stdout.flush()


def tell(event: Event) -> None:
    """The listener of the flow."""
    say(EVENT, event)


def main() -> None:
    """Run the flow that the request asks for."""
    request = json.loads(Path(sys.argv[1]).read_bytes())
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Prefect reads its settings at import.
    from flows.train_to_deploy import LISTENER, train_to_deploy

    LISTENER.set(tell)
    try:
        report = train_to_deploy(**request)
    except EnginehouseError as error:
        say(ERROR, {"kind": error.kind, "message": str(error), "exit_status": error.exit_status})
        sys.exit(error.exit_status)
    say(REPORT, report)


if __name__ == "__main__":
    main()
