"""Fixtures for every test: workspaces in which the real command runs."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINEHOUSE = Path(sys.executable).with_name("enginehouse")


@dataclass(frozen=True)
class Workspace:
    """A folder of a user: pipelines, a home, a model repository, and the command that works on them."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def repository(self) -> Path:
        return self.root / "model_repo"

    @property
    def command(self) -> Path:
        return ENGINEHOUSE

    def pipeline(self, example: str) -> Path:
        return self.root / "examples" / example / "pipeline.yaml"

    @property
    def environment(self) -> dict[str, str]:
        settings = {
            "ENGINEHOUSE_HOME": str(self.home),
            "PREFECT_HOME": str(self.root.parent / "prefect"),
            "COLUMNS": "120",
        }
        # A user's own Prefect server is not for tests.
        kept = {name: value for name, value in os.environ.items() if name not in ("PREFECT_API_URL", "PREFECT_PROFILE")}
        return kept | settings

    def enginehouse(
        self, *arguments: object, status: int = 0, timeout: float = 400, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the command in this folder, and expect its exit status."""
        done = subprocess.run(
            [str(self.command), *map(str, arguments)],
            cwd=self.root,
            env=env or self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.last_log()}"
        return done

    def report(self, *arguments: object, **options: object) -> dict:
        """Run the command with `--json` and return what it printed."""
        return json.loads(self.enginehouse(*arguments, "--json", **options).stdout)

    def last_log(self) -> str:
        logs = sorted((self.home / "runs").glob("*.log"))
        return logs[-1].read_text()[-6000:] if logs else ""

    def copy(self, root: Path) -> "Workspace":
        """Everything but the servers, somewhere else."""
        shutil.copytree(self.root, root, ignore=shutil.ignore_patterns("serve"))
        return Workspace(root)


def copy_of_examples(root: Path) -> Workspace:
    shutil.copytree(ROOT / "examples", root / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return Workspace(root)


@pytest.fixture
def workspace(tmp_path):
    """The examples in a folder of their own; servers that a test starts end with it."""
    made = copy_of_examples(tmp_path / "user")
    yield made
    made.enginehouse("serve", "stop")


@pytest.fixture(scope="session")
def workspaces(tmp_path_factory):
    """Make workspaces that live as long as the session: `workspaces(name)`."""
    made: list[Workspace] = []

    def make(name: str) -> Workspace:
        made.append(copy_of_examples(tmp_path_factory.mktemp(name) / "user"))
        return made[-1]

    yield make
    for each in made:
        each.enginehouse("serve", "stop")
