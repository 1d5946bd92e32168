"""The commands `enginehouse serve`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from flows import show
from flows.cli.console import HomeFolder, Json, err, home_at, out, print_json, print_lines
from tasks.errors import ConfigError

serve = App(name="serve", help="Triton servers on this machine.")


@serve.command(name="setup")
def serve_setup(
    *,
    into: Annotated[Path | None, Parameter(help="The folder; a default one of this environment if left out.")] = None,
) -> None:
    """Install a Triton server for this machine's processor, in an environment of its own."""
    from tasks.toolchain import triton

    def say(line: str) -> None:
        err.print(line, style="dim", markup=False, soft_wrap=True)

    installation = triton.setup(into or triton.default_folder(), say=say)
    out.print(f"Triton {installation.version} is ready: {installation.tritonserver}", markup=False, soft_wrap=True)


@serve.command(name="status")
def serve_status(*, home: HomeFolder = None, as_json: Json = False) -> None:
    """Show the Triton servers that runs have started, and what they serve."""
    from flows.serving import running

    found = [server.to_json() for server in running(home_at(home))]
    if as_json:
        print_json(found)
    elif not found:
        out.print("no server runs")
    else:
        for place, server in enumerate(found):
            print_lines([*([Text()] if place else []), *show.card(server)])


@serve.command(name="stop")
def serve_stop(
    names: Annotated[Sequence[str], Parameter(help="Names as `serve status` shows them; all if left out.")] = (),
    /,
    *,
    home: HomeFolder = None,
    as_json: Json = False,
) -> None:
    """Stop the Triton servers that runs have started, letting them finish what they are asked."""
    from flows.serving import running

    servers = {server.name: server for server in running(home_at(home))}
    if unknown := [name for name in names if name not in servers]:
        raise ConfigError(
            f"no server runs under the name {', '.join(unknown)}; running: {', '.join(servers) or 'none'}"
        )
    stopped = [server for name, server in servers.items() if not names or name in names]
    for server in stopped:
        server.stop()
        if not as_json:
            told = f"stopped {server.name} ({server.where}, {server.replica.address.http_url})"
            out.print(told, markup=False, soft_wrap=True)
    if as_json:
        print_json([server.name for server in stopped])
    elif not stopped:
        out.print("no server runs")
