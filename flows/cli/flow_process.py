"""The flow in a process of its own under the supervisor, and what it tells us."""

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from flows import local
from tasks.artifacts.durable import reported
from tasks.errors import CommandFailed, Told
from tasks.events import Listener
from tasks.home import Home
from tasks.toolchain import command


def run_flow(home: Home, name: str, request: Mapping[str, Any], listener: Listener) -> dict[str, Any]:
    """Run the flow, hand its events to the listener, and return its report; what it raises is raised here too."""
    with reported(home.root, "the home"):  # its log grows as long as the run goes
        return _run_logged(home, name, request, listener)


def _run_logged(home: Home, name: str, request: Mapping[str, Any], listener: Listener) -> dict[str, Any]:
    home.runs.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    request_file, log = home.runs / f"{stamp}-{name}.json", home.runs / f"{stamp}-{name}.log"
    request_file.write_text(json.dumps(request))
    ended: dict[str, dict[str, Any]] = {}

    def on_line(line: str) -> None:
        for prefix in (local.EVENT, local.REPORT, local.ERROR):
            if line.startswith(prefix):
                value = json.loads(line.removeprefix(prefix))
                if prefix == local.EVENT:
                    listener(value)
                else:
                    ended[prefix] = value
                return

    try:
        command.run(
            [sys.executable, "-I", "-u", "-m", "flows.local", str(request_file)],
            log=log,
            what="the flow",
            timeout=float("inf"),
            on_line=on_line,
        )
    except CommandFailed as failure:
        told = ended.get(local.ERROR)
        if told is None:
            raise
        raise Told(told["message"], kind=told["kind"], exit_status=told["exit_status"]) from failure
    return ended[local.REPORT]
