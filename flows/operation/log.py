"""What our events say in the log of a flow run."""

from typing import Any

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
