"""The command `enginehouse`; the only place that exits. One module for each group of commands."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it (128 + SIGINT)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the status that the help lists."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(tokens)
        sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        message = str(interrupt) or "everything that it had started has ended; the same again goes on from here"
        _fail(tokens, kind="interrupted", message=message, exit_status=INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has had enough, as `head` does
        _abandon_output()
        sys.exit(0)
    except OSError as error:
        if _can_print():
            raise
        _abandon_output()
        _fail([], kind="output", message=f"standard output cannot be written: {error.strerror}", exit_status=4)


def _run(tokens: Sequence[str]) -> None:
    # Inside `main`, so that Ctrl-C during the imports ends like Ctrl-C at any other time.
    from cyclopts import CycloptsError

    from flows.cli.app import app
    from tasks.errors import EnginehouseError

    try:
        app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        _fail(tokens, kind="configuration", message=f"{error}\nsee enginehouse --help", exit_status=2)
    except EnginehouseError as error:
        _fail(tokens, kind=error.kind, message=str(error), exit_status=error.exit_status)


def _can_print() -> bool:
    # An error in writing names no file. Whoever could not write a whole page can write no empty line either.
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return False
    return True


def _abandon_output() -> None:
    # What is still buffered would fail again when the interpreter ends.
    with suppress(OSError):
        sys.stdout.close()


def _fail(tokens: Sequence[str], *, kind: str, message: str, exit_status: int) -> None:
    from flows.cli.console import err

    if "--json" in tokens:
        told = {"error": {"kind": kind, "message": message, "exit_status": exit_status}}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    err.print(f"[bold red]{kind}[/]", end=" ")
    err.print(message, markup=False, soft_wrap=True)
    sys.exit(exit_status)
