"""Fixtures for every test: workspaces in which the real command runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.toolchain.triton import find_free_ports

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell ignores it for what runs beside it, and so would all that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
ENGINEHOUSE = Path(sys.executable).with_name("enginehouse")


@dataclass(frozen=True)
class Workspace:
    """A folder of a user: pipelines, a home, a model repository, and the command that works on them."""

    root: Path
    prefect_url: str | None = None
    """A Prefect server; without one each run starts a temporary one, which takes about ten seconds."""

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
        if self.prefect_url is not None:
            settings["PREFECT_API_URL"] = self.prefect_url
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
        return Workspace(root, self.prefect_url)


def copy_of_examples(root: Path, prefect_url: str | None) -> Workspace:
    shutil.copytree(ROOT / "examples", root / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return Workspace(root, prefect_url)


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory):
    """A real Prefect server for the whole session."""
    (port,) = find_free_ports(1)
    home = tmp_path_factory.mktemp("prefect-server")
    url = f"http://127.0.0.1:{port}/api"
    environment = os.environ | {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_API_PORT": str(port),
    }
    prefect = Path(sys.executable).with_name("prefect")
    with (home / "log").open("w") as log:
        server = subprocess.Popen(
            [str(prefect), "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 180
        while not answers(f"{url}/health"):
            assert server.poll() is None, (home / "log").read_text()
            assert time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture
def workspace(tmp_path, prefect_url):
    """The examples in a folder of their own; servers that a test starts end with it."""
    made = copy_of_examples(tmp_path / "user", prefect_url)
    yield made
    made.enginehouse("serve", "stop")


@pytest.fixture(scope="session")
def workspaces(tmp_path_factory, prefect_url):
    """Make workspaces that live as long as the session: `workspaces(name)`."""
    made: list[Workspace] = []

    def make(name: str) -> Workspace:
        made.append(copy_of_examples(tmp_path_factory.mktemp(name) / "user", prefect_url))
        return made[-1]

    yield make
    for each in made:
        each.enginehouse("serve", "stop")
