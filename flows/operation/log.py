"""What our events, and our errors, say in the log of a flow run."""

import logging
from typing import Any

from tasks.errors import EnginehouseError
from tasks.events import Event, Listener


def logged(logger: Any) -> Listener:
    """A listener that writes lines, notes and the stages' beginnings and ends to a run's logger."""

    def listen(event: Event) -> None:
        match event["type"]:
            case "line":
                logger.info("%s: %s", event["stage"], event["line"])
            case "note":
                logger.warning(event["text"])
            case "stage_started":
                logger.info("%s: begins (%s)", event["stage"], event["why"] or "not done yet")
            case "stage_ended":
                logger.info("%s: %s %s", event["stage"], event["state"], event["artifact"] or "")
            case _:
                pass  # progress comes several times a second: too much for a log

    return listen


def without_tracebacks() -> None:
    """Let Prefect's log tell an error of ours by its message alone: where in our code it was raised helps nobody."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_told_plainly)  # the same filter a second time changes nothing


def _told_plainly(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, EnginehouseError):
        record.msg = record.getMessage().replace(repr(error), f"{type(error).__name__}: {error}")
        record.args, record.exc_info = (), None
    return True
