"""The commands `init`, `doctor` and `engine`: what comes before a run."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from flows import show
from flows.cli.console import Json, Overrides, err, out, print_json
from flows.words import invoked
from tasks.errors import ToolMissing

engine = App(name="engine", help="The tools that engines are built with.")


def init(
    folder: Annotated[Path, Parameter(help="The new folder.")],
    /,
    *,
    name: Annotated[str | None, Parameter(help="The pipeline's name; the folder's if left out.")] = None,
) -> None:
    """Write a new pipeline's folder: pipeline.yaml, recipe.py, prefect.yaml and a test."""
    from tasks import init as template

    for path in template.init(folder, name or folder.absolute().name):
        out.print(f"wrote {path}", markup=False, soft_wrap=True)
    following = shlex.join([*invoked(), "run", str(folder / "pipeline.yaml")])
    out.print(f"next: {following}", markup=False, soft_wrap=True)


def doctor(
    pipeline: Annotated[
        Path | None, Parameter(help="A pipeline file, whose target and engine are looked at too.")
    ] = None,
    /,
    *,
    overrides: Overrides = (),
    as_json: Json = False,
) -> None:
    """Look whether every tool is there, and whether the versions fit each other and the target."""
    from flows.doctor import examine, worst
    from tasks.pipeline_file import load

    findings = examine(None if pipeline is None else load(pipeline, overrides))
    if as_json:
        print_json([finding.to_json() for finding in findings])
    else:
        lines = [[f.subject, f.state, f.found, f.mend] for f in findings]
        out.print(show.rows(["", "", "found", "what to do"], lines))
    if worst(findings) == "error":
        sys.exit(ToolMissing.exit_status)


@engine.command(name="setup")
def engine_setup(
    name: Annotated[Literal["modelopt", "tensorrt-rtx"], Parameter(help="Which tool.")],
    /,
    *,
    into: Annotated[Path | None, Parameter(help="The folder; a default one of this environment if left out.")] = None,
) -> None:
    """Install a tool that engines are prepared with, in an environment of its own."""
    from tasks.toolchain import builder_environment

    made = builder_environment.setup(name, folder=into, say=lambda line: err.print(line, style="dim", markup=False))
    out.print(f"{name} is ready: {made.folder}", markup=False, soft_wrap=True)
