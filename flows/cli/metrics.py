"""The commands `enginehouse metrics`."""

import errno
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators

from flows.cli.console import PORT, HomeFolder, home_at, notes_to_stderr, out
from tasks.errors import ConfigError, Problem, Refused
from tasks.events import note
from tasks.home import Home
from tasks.toolchain import processes

DEFAULT_PORT = 9847
"""Of no other exporter's that is well known."""

metrics = App(name="metrics", help="Numbers for Prometheus.")


@metrics.command
def serve(
    *,
    port: Annotated[int, Parameter(help="Where it listens.", validator=PORT)] = DEFAULT_PORT,
    host: Annotated[str, Parameter(help="The address; others than this machine's own see it too.")] = "127.0.0.1",
    interval: Annotated[
        float, Parameter(help="Seconds between two looks at the sources.", validator=validators.Number(gte=1))
    ] = 15.0,
    home: HomeFolder = None,
) -> None:
    """Answer Prometheus at /metrics until it is stopped."""
    from prometheus_client import start_http_server

    from flows.operation.exporter import Exporter

    exporter = Exporter(_home(home))
    try:
        start_http_server(port, addr=host, registry=exporter.registry())
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            who = processes.listener(port)
            told = f"port {port} is taken{f' by {who}' if who else ''}\nname another one with --port"
            raise Refused(told) from error
        told = f"nothing can listen at {host}:{port}: {error.strerror}"
        hint = "--host names an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
        raise ConfigError(Problem(told, hint=hint)) from error
    out.print(f"metrics of {exporter.home.root} at http://{host}:{port}/metrics", markup=False, soft_wrap=True)
    exporter.keep_fresh(interval).join()


@metrics.command(name="print")
def print_(*, home: HomeFolder = None) -> None:
    """Print the numbers once, in Prometheus' text format: for a textfile collector, or to look at."""
    from prometheus_client import generate_latest

    from flows.operation.exporter import Exporter

    exporter = Exporter(_home(home))
    exporter.refresh()
    sys.stdout.write(generate_latest(exporter.registry()).decode())


def _home(folder: Path | None) -> Home:
    """The home, which may be made later: an exporter starts with the machine, before the first run."""
    home = home_at(folder)
    if not home.root.is_dir():
        note(notes_to_stderr, f"nothing ran yet in {home.root}; --home names another folder")
    return home
