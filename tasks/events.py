"""What a run tells while it goes: one small stream of events for the terminal, for Prefect and for machines.

Every event is a flat dictionary of JSON values with a `type`; `flows` decides how each is shown. The types:

    stage_started   stage, why            a stage is being built; `why` names what changed
    progress        stage, done, total, text, metrics; of a training also samples_per_second, seconds_left
    line            stage, line           one line that a child process printed
    stage_ended     stage, state, artifact, seconds, metrics
    note            text                  something a person should know that is no error
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]
Listener = Callable[[Event], None]

PROGRESS_PREFIX = "::progress "
"""A program reports its progress on lines of standard output that begin so; the rest of the line is JSON."""


def silent(event: Event) -> None:
    """The listener of whoever does not want to know."""


def note(listener: Listener, text: str) -> None:
    """Tell something that is no error."""
    listener({"type": "note", "text": text})


def line_listener(listener: Listener, stage: str) -> Callable[[str], None]:
    """Return what `toolchain.command.run` calls for each line of a child: progress is parsed, the rest passed on."""

    def on_line(line: str) -> None:
        if line.startswith(PROGRESS_PREFIX):
            try:
                reported = json.loads(line.removeprefix(PROGRESS_PREFIX))
            except json.JSONDecodeError:  # two writers mixed their lines: show it as it is
                reported = None
            if isinstance(reported, dict):
                listener({"type": "progress", "stage": stage, **reported})
                return
        listener({"type": "line", "stage": stage, "line": line})

    return on_line
