"""What the commands share: the two consoles, parameters with one meaning everywhere, the home and the store."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators
from rich.console import RenderableType

from flows import show
from tasks.artifacts.store import ArtifactStore
from tasks.errors import ConfigError
from tasks.events import Event, note
from tasks.home import Home, find_home

out = show.console()
err = show.console(stderr=True)

PipelineFile = Annotated[Path, Parameter(help="The pipeline file.")]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON value on standard output.")]
Overrides = Annotated[
    Sequence[str],
    Parameter(
        name="--set",
        negative=(),
        show_default=False,
        help="Set a field in place of the file's: field.sub=value. May be repeated.",
    ),
]
PORT = validators.Number(gt=0, lte=65535)
HomeFolder = Annotated[
    Path | None,
    Parameter(name="--home", help="The folder with the store; found from the current folder if left out."),
]


def home_at(folder: Path | None) -> Home:
    """The home in this folder, or else the one found from the current folder."""
    return find_home(Path.cwd()) if folder is None else Home(folder.absolute())


def open_store(folder: Path | None) -> ArtifactStore:
    """The store of a home. Raises `ConfigError` where none is."""
    home = home_at(folder)
    if not home.store.is_dir():
        raise ConfigError(
            f"there is no store at {home.store}: "
            "run a pipeline first, go to the folder of one that ran, or name the home with --home"
        )
    return ArtifactStore.open(home.store, warn=lambda text: note(notes_to_stderr, text))


def notes_to_stderr(event: Event) -> None:
    """A listener that prints notes, and nothing else."""
    if event["type"] == "note":
        err.print(f"note: {event['text']}", style="yellow", markup=False, soft_wrap=True)


def print_lines(parts: Iterable[RenderableType]) -> None:
    """Print parts of a view on standard output, one below the other."""
    for part in parts:
        out.print(part, soft_wrap=True)


def print_json(value: object) -> None:
    """Print one JSON value on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
