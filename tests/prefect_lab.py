"""A team's Prefect: a real server (on PostgreSQL where that is installed), one worker, and small pipelines.

Used by the tests with the marker `services`. All of them share one server and, but for those that kill it, one worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tasks.home import VARIABLE
from tasks.toolchain.triton import find_free_ports

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

RECIPE = '''
"""A model that is trained in a second, or as slowly as a test needs it."""

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

SLEEP = {sleep}


def rows(count, seed):
    made = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return [({{"x": row}}, np.int64(row[:2].sum() > 0)) for row in made]


class Accuracy:
    def __init__(self):
        self.right = self.seen = 0

    def update(self, outputs, targets):
        self.right += int((outputs["y"].argmax(1) == targets).sum())
        self.seen += len(targets)

    def result(self):
        return {{"accuracy": self.right / self.seen}}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)


class Tiny:
    outputs = ("y",)

    def model(self):
        return Network()

    def train_data(self):
        {extra}
        return rows(64, 1)

    def validation_data(self):
        return rows(16, 2)

    def test_data(self):
        return rows(16, 3)

    def loss(self, outputs, targets):
        time.sleep(SLEEP)
        return nn.functional.cross_entropy(outputs["y"], targets, reduction="none")

    def metric(self):
        return Accuracy()

    def drift(self, reference, recent):
        mean = float(np.mean([inputs["x"] for inputs, _ in reference]))
        now = float(np.loadtxt(Path(recent)).mean())
        return {{"drifted": abs(now - mean) > 0.5, "before": mean, "now": now}}
'''

PIPELINE = """
name: {name}
recipe: recipe.py:Tiny
data: {{rows: {{version: "1"}}}}
shapes: {{batch: {{min: 1, opt: 4, max: 16}}}}
inputs: {{x: {{dtype: float32, shape: [batch, 4]}}}}
train: {{max_epochs: {epochs}, batch_size: 16, checkpoint: {{every_steps: 4}}}}
serve: {{max_batch_size: 16}}
publish: {{repository: ../models}}
{more}
"""

DEPLOYMENT = """
  - name: {name}
    entrypoint: flows.train_to_deploy.train_to_deploy
    version: "1"
    tags: [tiny]
    parameters: {{pipeline: {pipeline}/pipeline.yaml, until: {until}}}
    work_pool: {{name: {pool}, job_variables: {{env: {{PREFECT_FLOWS_HEARTBEAT_FREQUENCY: "30"}}}}}}
    concurrency_limit: {{limit: 1, collision_strategy: ENQUEUE}}
    triggers:
      - type: event
        match: {{prefect.resource.id: enginehouse.dataset.{name}}}
        expect: [dataset.updated]
        parameters:
          overrides:
            __prefect_kind: json
            value: {{__prefect_kind: jinja, template: "{{{{ event.payload.get('overrides', []) | tojson }}}}"}}
"""


@contextmanager
def postgres() -> Iterator[str | None]:
    """A cluster of its own on a free port, and the URL of its database; `None` where PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        yield None
        return
    programs = found[-1].parent
    # It refuses to run as root. Its folder is no one of pytest's, which only their own user may enter.
    user = "postgres" if os.getuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="enginehouse-postgres-"))
    if user is not None:
        shutil.chown(folder, user)
    data = folder / "data"
    (port,) = find_free_ports(1)
    options: dict[str, Any] = {"cwd": "/", "timeout": 120, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if user is not None:
        options |= {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    subprocess.check_call(
        [programs / "initdb", "-D", data, "-U", "prefect", "--auth=trust", "--no-sync", "-E", "UTF8"], **options
    )
    settings = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
    subprocess.check_call(
        [programs / "pg_ctl", "-D", data, "-w", "-l", data / "log", "-o", settings, "start"], **options
    )
    try:
        yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
    finally:
        subprocess.check_call([programs / "pg_ctl", "-D", data, "-m", "immediate", "stop"], **options)
        shutil.rmtree(folder)


def wait_for(condition: Callable[[], bool], *, timeout: float, what: Callable[[], object] = str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Team:
    """A folder with pipelines, the store that they share, the server and the worker that run them."""

    root: Path
    url: str
    database: str | None
    pool: str = "enginehouse"
    worker: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        return kept | {
            VARIABLE: str(self.home),
            "PREFECT_HOME": str(self.root / "prefect"),
            "PREFECT_API_URL": self.url,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_CLI_PROMPT": "false",
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "DO_NOT_TRACK": "1",
            "COLUMNS": "400",
            "no_proxy": "127.0.0.1,localhost",
        }

    def sh(
        self, *argv: object, status: int | None = 0, cwd: Path | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a member of the team, and expect its exit status."""
        done = subprocess.run(
            [*map(str, argv)],
            cwd=cwd or self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if status is not None:
            assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.log()}"
        return done

    def json(self, *argv: object, **options: Any) -> Any:
        return json.loads(self.sh("enginehouse", *argv, "--json", **options).stdout)

    def log(self) -> str:
        file = self.root / "worker.log"
        return file.read_text()[-5000:] if file.exists() else ""

    # -- the worker

    def start_worker(self) -> None:
        with (self.root / "worker.log").open("ab") as log:
            self.worker = subprocess.Popen(
                [BIN / "prefect", "worker", "start", "--pool", self.pool],
                cwd="/",  # deployments name their folder
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, identity: str, *, worker: bool) -> None:
        """End a run's process with SIGKILL, and its worker before it."""
        if worker:
            assert self.worker is not None
            self.worker.kill()
            self.worker.wait()
        ended = self.processes(identity)
        for process in ended:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait_for(lambda: not any(lives(process) for process in ended), timeout=10)

    def processes(self, identity: str) -> list[psutil.Process]:
        """The processes of a run that are Prefect's own: those that a machine's death would take as well."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("PREFECT__FLOW_RUN_ID") == identity
                    and "supervise.py" not in " ".join(process.cmdline())
                    and "prefect" in " ".join(process.cmdline())
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def stop_worker(self) -> None:
        if self.worker is not None and self.worker.poll() is None:
            self.worker.send_signal(signal.SIGINT)
            try:
                self.worker.wait(40)
            except subprocess.TimeoutExpired:
                self.worker.kill()
                self.worker.wait()

    # -- pipelines and runs

    def pipeline(self, name: str, *, sleep: float = 0, epochs: int = 1, extra: str = "pass", more: str = "") -> Path:
        folder = self.root / name
        folder.mkdir()
        (folder / "recipe.py").write_text(RECIPE.format(sleep=sleep, extra=extra))
        (folder / "pipeline.yaml").write_text(PIPELINE.format(name=name, epochs=epochs, more=more))
        return folder / "pipeline.yaml"

    def deploy(self, *deployments: tuple[str, str, str]) -> None:
        """Register deployments (name, pipeline, until), as a prefect.yaml of the team's own would."""
        text = "pull:\n  - prefect.deployments.steps.set_working_directory: {directory: " + str(self.root) + "}\n"
        text += "deployments:" + "".join(
            DEPLOYMENT.format(name=name, pipeline=pipeline, until=until, pool=self.pool)
            for name, pipeline, until in deployments
        )
        file = self.root / "prefect.yaml"
        file.write_text(text)
        self.sh("prefect", "deploy", "--all", "--prefect-file", file)

    def start(self, name: str, *overrides: str) -> str:
        """Queue a run as the UI does; its id. A command would take seconds to start."""
        found = self.api("GET", f"/deployments/name/train-to-deploy/{name}")
        body = {"parameters": {"overrides": overrides}, "state": {"type": "SCHEDULED"}}
        return self.api("POST", f"/deployments/{found['id']}/create_flow_run", body)["id"]

    def resume(self, identity: str, *, force: bool = False) -> None:
        """What `enginehouse runs resume` does, in this process."""
        from prefect.client.orchestration import SyncPrefectClient

        from flows.operation import runs

        with SyncPrefectClient(self.url, httpx_settings={"trust_env": False}) as client:
            runs.resume(client, runs.find(client, identity), force=force)

    def api(self, method: str, path: str, body: object = None) -> Any:
        """Ask the server; a question, unlike an order, again where it was too busy to answer."""
        asks = method == "GET" or path.endswith("/filter")
        deadline = time.monotonic() + (60 if asks else 0)
        while True:
            try:
                with httpx.Client(trust_env=False, timeout=30) as client:
                    answer = client.request(method, f"{self.url}{path}", json=body)
                answer.raise_for_status()
                return answer.json() if answer.content else None
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                if refused or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def run(self, identity: str) -> dict[str, Any]:
        return self.api("GET", f"/flow_runs/{identity}")

    def state(self, identity: str) -> str:
        return self.run(identity)["state"]["name"]

    def wait(self, identity: str, *states: str, timeout: float = 120) -> dict[str, Any]:
        """Wait until a run is in one of these states; a run that ends otherwise is a failure at once."""
        run: dict[str, Any] = {}

        def there() -> bool:
            run.update(self.run(identity))
            name, kind = run["state"]["name"], run["state"]["type"]
            if kind in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") and name not in states:
                raise AssertionError(f"{name}: {run['state']['message']}\n{self.logs(identity)}")
            return name in states

        wait_for(there, timeout=timeout, what=lambda: f"{run['state']}\n{self.logs(identity)}\n{self.log()}")
        return run

    def logs(self, identity: str) -> str:
        wanted = {"logs": {"flow_run_id": {"any_": [identity]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
        return "\n".join(line["message"] for line in self.api("POST", "/logs/filter", wanted))

    def report(self, identity: str) -> str:
        """The page that a run has published last."""
        from prefect.client.orchestration import SyncPrefectClient

        from flows.operation import summary

        with SyncPrefectClient(self.url, httpx_settings={"trust_env": False}) as client:
            return summary.report(client, client.read_flow_run(identity)) or ""

    def titles(self, identity: str) -> list[str]:
        """The first lines of the pages that a run has published, oldest first."""
        wanted = {
            "artifacts": {"flow_run_id": {"any_": [identity]}, "type": {"any_": ["markdown"]}},
            "sort": "CREATED_DESC",
        }
        pages = [page for page in self.api("POST", "/artifacts/filter", wanted) if page["key"].endswith("-report")]
        return [page["data"].partition("\n")[0] for page in sorted(pages, key=lambda page: page["created"])]

    wait_for = staticmethod(wait_for)

    def runs_of(self, name: str) -> list[dict[str, Any]]:
        wanted = {"deployments": {"name": {"any_": [name]}}, "sort": "START_TIME_ASC"}
        return self.api("POST", "/flow_runs/filter", wanted)


@contextmanager
def server(root: Path, database: str | None) -> Iterator[str]:
    """A Prefect server on a free port; its URL."""
    (port,) = find_free_ports(1)
    url = f"http://127.0.0.1:{port}/api"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = kept | {
        "PREFECT_HOME": str(root / "server"),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "no_proxy": "127.0.0.1,localhost",
    }
    if database is not None:
        environment["PREFECT_API_DATABASE_CONNECTION_URL"] = database
    with (root / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [BIN / "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def answers() -> bool:
        assert process.poll() is None, (root / "server.log").read_text()
        try:
            return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    try:
        wait_for(answers, timeout=180, what=(root / "server.log").read_text)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def team(root: Path) -> Iterator[Team]:
    """A server, set up, with a worker."""
    root.mkdir(parents=True, exist_ok=True)
    with postgres() as database, server(root, database) as url:
        made = Team(root=root / "work", url=url, database=database)
        made.root.mkdir()
        made.sh("enginehouse", "runs", "setup")
        made.start_worker()
        try:
            yield made
        finally:
            made.stop_worker()
            if (made.home / "serve").exists():
                made.sh("enginehouse", "serve", "stop", status=None)


def run_page(folder: Path) -> list[tuple[str, str]]:
    """Execute the commands of docs/prefect.md, from top to bottom, in one shell; each with what it printed."""
    page = (ROOT / "docs/prefect.md").read_text()
    block = page.split("<!-- A test executes these commands", 1)[1].split("```sh\n", 1)[1].split("```", 1)[0]
    commands = block.strip().splitlines()
    (port,) = find_free_ports(1)
    ended = "\x1e"  # ASCII's record separator
    script = ["set -eu", *(f"{command.replace('4200', str(port))}\nprintf '{ended}'" for command in commands)]
    # A shell without a person starts what goes on beside it without SIGINT, by which alone the worker ends itself.
    undo = "kill -KILL %1; wait; prefect server stop; enginehouse serve stop"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "ENGINEHOUSE_"))}
    done = subprocess.run(
        ["bash", "-c", f"trap '{undo}' EXIT\n" + "\n".join(script)],
        cwd=folder,
        env=kept
        | {
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_CLI_PROMPT": "false",
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "COLUMNS": "200",
            "no_proxy": "127.0.0.1,localhost",
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    worker = folder / "my-model" / "worker.log"
    assert done.returncode == 0, (
        f"{done.stdout}\n{done.stderr}\n{worker.read_text()[-5000:] if worker.exists() else ''}"
    )
    return list(zip(commands, done.stdout.split(ended), strict=False))
