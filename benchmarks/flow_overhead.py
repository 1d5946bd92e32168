"""The flow's own cost against a bare Prefect flow of as many empty tasks, and what a run waits for at its start.

    python benchmarks/flow_overhead.py [flow|start]…      (both without a name)

`flow` runs, in one process and on one server that is up already, in turn: our flow over a pipeline in which everything
is built (each stage a task that finds its product in the store), and a flow of as many tasks that do nothing. What ours
takes longer is opening the job (the pipeline file, the code's and the data's identity), the report with its artifacts,
and what a stage costs that is found: its key, the store, the name of its task run. `start` takes the parts of a run's
start without a server, and with one that `up` keeps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.operation import server
from tasks.home import Home

ROOT = Path(__file__).parents[1]
ROUNDS = 5


def environment(folder: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "ENGINEHOUSE_"))}
    return clean | {"PREFECT_HOME": str(folder / "prefect-home"), "ENGINEHOUSE_HOME": str(folder / "home")} | more


def timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def python(code: str, env: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", code], env=env, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def enginehouse(*arguments: str, env: dict[str, str]) -> None:
    command = Path(sys.executable).with_name("enginehouse")
    done = subprocess.run([str(command), *arguments], env=env, check=False, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}")


def pipeline(folder: Path) -> Path:
    """digits, trained for one epoch: what it learns is of no account here."""
    made = folder / "digits"
    made.mkdir(exist_ok=True)
    for file in (ROOT / "examples" / "digits").glob("*.*"):
        text = file.read_text().replace("max_epochs: 20", "max_epochs: 1").replace("min: 0.95", "min: 0.0")
        (made / file.name).write_text(text.replace("../../model_repo", "../model_repo"))
    return made / "pipeline.yaml"


def start() -> dict[str, float]:
    """Seconds that a run's start is made of."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = environment(folder)
        found = {
            "importing the command line": timed(lambda: python("import flows.cli", env)),
            "importing Prefect's settings": timed(lambda: python("import prefect.settings", env)),
            "importing the flow": timed(lambda: python("import flows.train_to_deploy", env)),
            "importing the server": timed(lambda: python("import prefect.server.api.server", env)),
        }
        for what in ("a temporary server, its database new", "a temporary server, its database there"):
            found[what] = timed(lambda: _temporary(folder, env))
        found["up, its database new"] = timed(lambda: enginehouse("up", env=env))
        found["up, while it runs"] = timed(lambda: enginehouse("up", env=env))
        enginehouse("down", env=env)
        found["up, its database there"] = timed(lambda: enginehouse("up", env=env))
        file = str(pipeline(folder))
        build = ("run", file, "--until", "engine")
        enginehouse(*build, env=env)
        again = (*build, "--rebuild", "engine")
        found["a run that builds one small stage, on the kept server"] = timed(lambda: enginehouse(*again, env=env))
        enginehouse("down", env=env)
        found["the same, with a temporary server"] = timed(lambda: enginehouse(*again, env=env))
        found["a run with nothing to do"] = timed(lambda: enginehouse(*build, env=env))
        return {what: round(seconds, 2) for what, seconds in found.items()}


def _temporary(folder: Path, env: dict[str, str]) -> None:
    log = folder / "server.log"
    with server.temporary(log, {**server.QUIET, **env}) as (url, process):
        server.await_answer(url, lambda: process.poll() is None, log)


def flow() -> dict[str, float]:
    """What our flow costs beyond Prefect's own, on a server that is up."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = environment(folder)
        home = Home(folder / "home")
        enginehouse("up", env=env)
        try:
            file = pipeline(folder)
            enginehouse("run", str(file), "--until", "validate", env=env)
            kept = server.kept(home)
            assert kept is not None
            inner = env | {"PREFECT_API_URL": kept.url}
            command = [sys.executable, __file__, "--inside", str(file)]
            done = subprocess.run(command, env=inner, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
            return found
        finally:
            enginehouse("down", env=env)


def inside(file: Path) -> None:
    from prefect import flow as prefect_flow
    from prefect import task

    from flows import train_to_deploy as module
    from flows.chain import KEYED
    from flows.train_to_deploy import train_to_deploy

    parts: dict[str, list[float]] = {}

    def measured(name: str) -> None:
        action = getattr(module, name)

        def taking_time(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            done = action(*arguments, **options)
            parts.setdefault(name, []).append(time.perf_counter() - began)
            return done

        setattr(module, name, taking_time)

    measured("open_job")
    measured("publish_report")

    def ours() -> int:
        report = train_to_deploy(pipeline=file, until="validate")
        assert all(stage["state"] == "reused" for stage in report["stages"])
        return len(report["stages"])

    stages = ours()
    assert 0 < stages <= len(KEYED)

    @task
    def nothing() -> None:
        pass

    @prefect_flow
    def bare() -> None:
        for _ in range(stages):
            nothing()

    bare()
    pairs = []
    for turn in range(ROUNDS):
        first, second = (ours, bare) if turn % 2 else (bare, ours)
        taken = {first: timed(first), second: timed(second)}
        pairs.append((taken[ours], taken[bare]))
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    more = statistics.median(a - b for a, b in pairs)
    fixed = {name: statistics.median(seconds) for name, seconds in parts.items()}
    found = {
        "our flow, everything reused (s)": mine,
        "a bare flow of as many empty tasks (s)": theirs,
        "more than the bare one (s)": more,
        "of it opening the job (s)": fixed["open_job"],
        "of it the report (s)": fixed["publish_report"],
        "of it each stage (s)": (more - sum(fixed.values())) / stages,
    }
    print(json.dumps({"stages": stages} | {what: round(seconds, 3) for what, seconds in found.items()}))


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]))
        return
    wanted = sys.argv[1:] or ["flow", "start"]
    found = {name: {"flow": flow, "start": start}[name]() for name in wanted}
    print(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
