"""Where Enginehouse keeps what it knows: one folder with the artifact store, the served processes and the logs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "ENGINEHOUSE_HOME"
FOLDER = ".enginehouse"


@dataclass(frozen=True, slots=True)
class Home:
    """The folder, and the rooms in it."""

    root: Path

    @property
    def store(self) -> Path:
        """The artifact store (docs/artifacts.md)."""
        return self.root / "store"

    @property
    def serve(self) -> Path:
        """Records and logs of the servers that outlive a run."""
        return self.root / "serve"

    @property
    def staging(self) -> Path:
        """Model repositories of staging servers; each lives as long as its verification."""
        return self.root / "staging"

    @property
    def runs(self) -> Path:
        """One log per run."""
        return self.root / "runs"

    @property
    def locks(self) -> Path:
        """Lock files that keep two releases of one model apart."""
        return self.root / "locks"


def find_home(start: Path) -> Home:
    """Return the home that belongs to a folder; it need not exist yet.

    `$ENGINEHOUSE_HOME` if set; else the nearest `.enginehouse` in `start` or above; else `.enginehouse` at the top of
    the git checkout that holds `start`; else in `start` itself.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Home(Path(named).expanduser().absolute())
    start = start.resolve()
    above = [start, *start.parents]
    for folder in above:
        if (folder / FOLDER).is_dir():
            return Home(folder / FOLDER)
    for folder in above:
        if (folder / ".git").exists():
            return Home(folder / FOLDER)
    return Home(start / FOLDER)
