"""The commands `enginehouse up`, `down` and `notify`."""

from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from flows.cli.console import PORT, HomeFolder, Json, home_at, out, print_json
from flows.operation import server
from tasks.artifacts.durable import reported
from tasks.errors import ConfigError


def up(
    *,
    port: Annotated[int | None, Parameter(help="Where it listens; a free one if left out.", validator=PORT)] = None,
    worker: Annotated[
        bool, Parameter(negative=(), help=f"Also a worker for the process work pool {server.POOL}.")
    ] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Start a Prefect server on this machine and keep it: runs of this home find it, and start in seconds."""
    room = home_at(home)
    with reported(room.root, "the home"):
        found, started = server.up(room, port=port, worker=worker)
    if as_json:
        print_json({"started": bool(started), "processes": [asdict(process) for process in found]})
        return
    for process in found:
        told = "runs now" if process.name in started else "runs already"
        place = f"{process.ui} (API {process.url})" if process.name == "server" else f"for the work pool {server.POOL}"
        out.print(f"Prefect {process.name} {told}: {place}, pid {process.pid}", markup=False, soft_wrap=True)
    out.print(f"for other programs: export PREFECT_API_URL={found[0].url}", markup=False, soft_wrap=True)
    out.print("end it: enginehouse down", markup=False, soft_wrap=True)


def down(*, home: HomeFolder = None, as_json: Json = False) -> None:
    """End the Prefect server that `enginehouse up` has started, and its worker."""
    room = home_at(home)
    with reported(room.root, "the home"):
        ended = server.down(room)
    if as_json:
        print_json([asdict(process) for process in ended])
        return
    for process in ended:
        out.print(f"ended the Prefect {process.name} (pid {process.pid})", markup=False, soft_wrap=True)
    if not ended:
        out.print("no Prefect server of this home runs", markup=False, soft_wrap=True)


def notify(
    url: Annotated[
        str | None, Parameter(help="A webhook (https://…), or an address of Apprise's such as mailtos://… for e-mail.")
    ] = None,
    /,
    *,
    remove: Annotated[bool, Parameter(negative=(), help="Tell nobody any more.")] = False,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Have Prefect tell somebody when a run ends badly or no worker takes it."""
    if (url is None) != remove:
        raise ConfigError("enginehouse notify: expected either an address or --remove")
    from flows.operation import notify as notifications

    room = home_at(home)
    names = notifications.remove(room) if url is None else notifications.register(room, url)
    if as_json:
        print_json(names)
        return
    for name in names:
        out.print(f"{'removed' if remove else 'registered'} {name}", markup=False, soft_wrap=True)
    if not names:
        out.print("nothing was registered", markup=False)
