"""Operated by Prefect: a real server, on PostgreSQL where that is installed, and a real worker."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tasks.errors import Refused

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[2]
ENGINEHOUSE = Path(sys.executable).with_name("enginehouse")


def stages(team, pipeline):
    rows = team.json("artifacts", "ls")
    return [row["artifact"] for row in rows if row["artifact"].startswith(f"{pipeline}/")]


def test_the_checkouts_deployments_are_registered_without_a_question(team):
    team.sh("prefect", "deploy", "--all", "--prefect-file", ROOT / "prefect.yaml", cwd=ROOT)
    registered = {
        f"{flow}/{found['name']}": found
        for found in team.api("POST", "/deployments/filter", {})
        if "enginehouse" in found["tags"]
        for flow in [team.api("GET", f"/flows/{found['flow_id']}")["name"]]
    }
    assert set(registered) == {
        "train-to-deploy/digits", "train-to-deploy/mnist", "promote/promote", "rollback/rollback", "repair/repair",
        "pin/pin", "show/show", "ls/ls", "gc/gc", "check-drift/check-drift",
    }  # fmt: skip
    for name, found in registered.items():
        assert found["version"], name
        assert found["description"], name
        assert found["work_pool_name"] == "enginehouse"
        assert found["pull_steps"] == [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}], (
            name
        )
        assert not any(schedule["active"] for schedule in found["schedules"])
        undocumented = [
            parameter
            for parameter, schema in found["parameter_openapi_schema"]["properties"].items()
            if "description" not in schema
        ]
        assert undocumented == [], name
    digits = registered["train-to-deploy/digits"]
    assert (digits["global_concurrency_limit"]["limit"], digits["concurrency_options"]["collision_strategy"]) == (
        1,
        "ENQUEUE",
    )
    names = {found["name"] for found in team.api("POST", "/automations/filter", {})}
    assert {"digits has new data", "mnist has new data", "mnist after prepare-data"} <= names


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_the_variants_for_other_pools_are_registered_as_they_are(kind, team):
    """Registered only; tests/integration/test_docker_pool.py runs the one for docker."""
    setup = ("enginehouse", "runs", "setup", "--pool", f"enginehouse-{kind}", "--type", kind)
    team.sh(*setup)
    assert team.sh(*setup).stdout == "all is set up already\n"
    team.sh(
        "env", f"PIPELINES={team.root}", "prefect", "deploy", "--all", "--prefect-file",
        ROOT / "containers" / "prefect" / f"{kind}.yaml",
    )  # fmt: skip
    found = team.api("GET", f"/deployments/name/train-to-deploy/digits-{kind}")
    assert found["job_variables"]["command"] == "python3 -m prefect flow-run execute"
    assert found["pull_steps"] == [{"prefect.deployments.steps.set_working_directory": {"directory": "/work"}}]


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"until": "nonsense"}, "until"),
        ({"overrides": ["train.seed"]}, "overrides[0]"),
        ({"rebuild": ["verify"]}, "rebuild[0]"),
        ({"pipeline": "recipe.py"}, "pipeline"),
        ({"override": ""}, "override"),
    ],
    ids=str,
)
def test_a_bad_parameter_is_refused_with_its_name_and_nothing_is_queued(parameters, field, team):
    before = len(team.runs_of("tiny"))
    found = team.api("GET", "/deployments/name/train-to-deploy/tiny")
    with pytest.raises(httpx.HTTPStatusError) as refused:
        team.api("POST", f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters})
    assert refused.value.response.status_code in (409, 422)
    assert f"field '{field}'" in refused.value.response.text
    assert len(team.runs_of("tiny")) == before


def test_the_commands_name_a_bad_parameter(team):
    told = team.sh("prefect", "deployment", "run", "train-to-deploy/tiny", "--param", "until=nonsense", status=1)
    assert "field 'until'" in told.stdout + told.stderr
    refused = team.sh("enginehouse", "runs", "start", "train-to-deploy/tiny", "--param", "until=nonsense", status=2)
    assert "field 'until'" in refused.stderr
    refused = team.sh("enginehouse", "runs", "start", "train-to-deploy/tiny", "--param", "untill=train", status=2)
    assert "no parameter untill" in refused.stderr
    lost = team.root / "nowhere" / "summary.md"
    before = len(team.runs_of("tiny"))
    refused = team.sh("enginehouse", "runs", "start", "train-to-deploy/tiny", "--summary", lost, status=2)
    assert str(lost) in refused.stderr
    assert len(team.runs_of("tiny")) == before, "a summary that cannot be written costs no run"


def test_what_is_not_there_is_named_with_what_to_do(team):
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.states import Scheduled, Suspended

    from flows.operation import runs
    from tasks.errors import ConfigError

    later = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(hours=1))
    with SyncPrefectClient(team.url, httpx_settings={"trust_env": False}) as client:
        deployment = client.read_deployment_by_name("train-to-deploy/tiny")
        run = str(client.create_flow_run_from_deployment(deployment.id, state=later).id)
        for text in ("0" * 36, "0000----", "ffffffff", str(uuid.uuid4())):
            with pytest.raises(ConfigError, match="runs ls"):
                runs.find(client, text)
        assert str(runs.find(client, run.upper()).id) == run
        with pytest.raises(ConfigError, match="prefect deploy"):
            runs.start(client, "train-to-deploy/nothing", {})

        # By the name that is shown, by the type behind it, or either.
        client.set_flow_run_state(run, Suspended(timeout_seconds=3600), force=True)
        for states in (["Suspended"], ["paused", "Completed"], ["failed", "SUSPENDED"]):
            assert run in {row["id"] for row in runs.listing(client, states=states)}
        assert run not in {row["id"] for row in runs.listing(client, states=["completed", "Late"])}
        with pytest.raises(ConfigError, match="suspended"):
            runs.listing(client, states=["asleep"])
        runs.cancel(client, runs.find(client, run))


def test_whoever_stops_waiting_for_a_cancellation_is_told_that_it_goes_on(team, monkeypatch):
    from prefect.client.orchestration import SyncPrefectClient

    from flows.operation import runs

    def interrupt(*_):
        raise KeyboardInterrupt

    with SyncPrefectClient(team.url, httpx_settings={"trust_env": False}) as client:
        run = runs.find(client, team.start("tiny", "train.seed=99"))
        monkeypatch.setattr(runs, "_wait_cancelled", interrupt)
        with pytest.raises(KeyboardInterrupt, match=f"runs show {run.id}"):
            runs.cancel(client, run)
    team.wait(str(run.id), "Cancelled")


def test_who_follows_a_run_that_no_worker_takes_is_told_once(team, monkeypatch):
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.states import Scheduled

    from flows.operation import runs

    monkeypatch.setattr(runs, "TAKEN_WITHIN", 0)
    monkeypatch.setattr(runs, "LATE_LINES", 1.5)
    with SyncPrefectClient(team.url, httpx_settings={"trust_env": False}) as client:
        deployment = client.read_deployment_by_name("train-to-deploy/tiny")
        later = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(hours=1))
        run = client.create_flow_run_from_deployment(deployment.id, state=later)
        lines: list[str] = []
        runs.follow(client, run, lines.append, until=lambda _: bool(lines))
        runs.cancel(client, run)
    (told,) = lines
    assert "prefect worker start --pool enginehouse" in told


@pytest.mark.parametrize("state", ["Scheduled", "Suspended"])
def test_a_run_that_waits_with_a_process_behind_it_is_cancelled_at_once(state, team):
    from prefect import states
    from prefect.client.orchestration import SyncPrefectClient

    from flows.operation import runs

    later = datetime.now(UTC) + timedelta(hours=1)
    with SyncPrefectClient(team.url, httpx_settings={"trust_env": False}) as client:
        deployment = client.read_deployment_by_name("train-to-deploy/tiny")
        run = client.create_flow_run_from_deployment(deployment.id, state=states.Scheduled(scheduled_time=later))
        client.update_flow_run(run.id, infrastructure_pid="4000000")
        if state == "Suspended":
            client.set_flow_run_state(run.id, states.Suspended(timeout_seconds=3600), force=True)
        ended = runs.cancel(client, client.read_flow_run(run.id), within=0)
    assert runs.state_of(ended).name == "Cancelled"


def test_a_run_that_ci_starts_is_followed_and_the_second_one_has_nothing_to_do(team, tmp_path):
    summary = tmp_path / "summary.md"
    script = ROOT / "examples/ci/retrain.sh"
    first = team.sh("sh", script, "train-to-deploy/tiny", summary)
    assert "train: built tiny/train@1" in first.stderr
    began = time.monotonic()
    second = team.sh("sh", script, "train-to-deploy/tiny", summary)
    assert "tiny: nothing has changed, so nothing was done" in second.stderr
    assert time.monotonic() - began < 40
    page = summary.read_text()
    assert page.count("**train-to-deploy/tiny: Completed**") == 2
    assert "| train | reused | tiny/train@1 |" in page


def test_ci_ends_with_the_runs_kind_of_failure(team, tmp_path):
    summary = tmp_path / "summary.md"
    failed = team.sh(
        "enginehouse", "runs", "start", "train-to-deploy/tiny", "--set", "train.nope=1", "--summary", summary,
        status=2,
    )  # fmt: skip
    assert "configuration" in failed.stderr
    assert "train.nope" in summary.read_text()


def test_an_event_starts_a_run_with_its_parameters(team):
    before = {run["id"] for run in team.runs_of("tiny")}
    event = {
        "event": "dataset.updated",
        "occurred": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "id": str(uuid.uuid4()),
        "resource": {"prefect.resource.id": "enginehouse.dataset.tiny"},
        "payload": {"overrides": ["data.rows.version=v2"]},
    }
    team.api("POST", "/events", [event])
    new: list = []

    def came():
        new[:] = [run for run in team.runs_of("tiny") if run["id"] not in before]
        return bool(new)

    team.wait_for(came, timeout=60)
    assert new[0]["parameters"]["overrides"] == ["data.rows.version=v2"]
    team.wait(new[0]["id"], "Completed")
    assert "data.rows" in team.logs(new[0]["id"])


def test_a_run_starts_when_another_deployment_has_finished(team, tmp_path):
    shipped = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    (mnist,) = [each for each in shipped["deployments"] if each["name"] == "mnist"]
    (trigger,) = [each for each in mnist["triggers"] if each["name"] == "mnist after prepare-data"]
    trigger |= {"enabled": True, "name": "after tiny"}
    trigger["match_related"]["prefect.resource.name"] = "tiny"
    after = {
        "name": "after",
        "entrypoint": mnist["entrypoint"],
        "parameters": {"pipeline": "tiny/pipeline.yaml", "until": "train"},
        "work_pool": {"name": team.pool},
        "triggers": [trigger],
    }
    pull = [{"prefect.deployments.steps.set_working_directory": {"directory": str(team.root)}}]
    file = tmp_path / "prefect.yaml"
    file.write_text(yaml.safe_dump({"pull": pull, "deployments": [after]}))
    team.sh("prefect", "deploy", "--all", "--prefect-file", file)
    first = team.start("tiny")
    team.wait(first, "Completed")
    team.wait_for(lambda: bool(team.runs_of("after")), timeout=60)
    team.wait(team.runs_of("after")[0]["id"], "Completed")
    team.sh("prefect", "deployment", "delete", "train-to-deploy/after")  # other tests' runs shall start nothing


def test_drift_is_found_by_the_recipe_and_starts_a_training(team, tmp_path):
    team.sh("prefect", "deploy", "--all", "--prefect-file", ROOT / "prefect.yaml", cwd=ROOT)
    recent = tmp_path / "recent.txt"
    recent.write_text("9 9 9 9\n")
    before = {run["id"] for run in team.runs_of("tiny")}
    told = team.sh(
        "enginehouse", "runs", "start", "check-drift/check-drift", "--param",
        f"pipeline={team.root}/tiny/pipeline.yaml",
        "--param", f"recent={recent}", "--set", "data.rows.version=v3",
    )  # fmt: skip
    assert "tiny: drifted" in told.stderr
    team.wait_for(lambda: {run["id"] for run in team.runs_of("tiny")} > before, timeout=60)
    (new,) = [run for run in team.runs_of("tiny") if run["id"] not in before]
    assert new["parameters"]["overrides"] == ["data.rows.version=v3"]
    team.wait(new["id"], "Completed")


def test_a_run_killed_at_ten_instants_goes_on_each_time_and_builds_each_stage_once(team, dead_run):
    run, kills = team.start("killed"), 0
    for instant in range(10):
        worker = instant % 4 != 0
        chance = random.Random(f"kill {instant}")
        team.wait_for(lambda: bool(team.processes(run)) or team.state(run) == "Completed", timeout=60)
        time.sleep(chance.uniform(0.2, 6))
        if team.state(run) == "Completed":
            break
        team.kill(run, worker=worker)
        kills += 1
        if worker:
            team.start_worker()
        else:
            team.wait(run, "Crashed", timeout=30)
        # Of one that was killed before it could sign, only who killed it can know so soon that it is dead.
        team.resume(run, force=team.run(run)["state"]["type"] == "PENDING")
    assert kills >= 5, "it ended too early for the test to mean anything"
    team.wait(run, "Completed", timeout=180)
    assert sorted(stages(team, "killed")) == [
        f"killed/{stage}@1" for stage in ("engine", "export", "train", "triton_config", "validate")
    ]
    assert team.json("artifacts", "verify") == []
    other = team.start("reference")
    team.wait(other, "Completed")
    rows = [row for name in ("killed", "reference") for row in team.json("artifacts", "ls", name)]
    content = {row["artifact"]: row["content"] for row in rows}
    # The recipes differ by how long they sleep, which is in no product but their keys.
    assert content["killed/train@1"] == content["reference/train@1"]


def test_a_run_that_lives_is_not_resumed_and_another_of_its_deployment_waits(team):
    run = team.start("endless")
    team.wait_for(lambda: "train: begins" in team.logs(run), timeout=60)
    waiting = team.start("endless", "train.seed=9")
    team.wait(waiting, "AwaitingConcurrencySlot", timeout=60)
    team.sh("enginehouse", "runs", "cancel", waiting)
    assert team.state(waiting) == "Cancelled"
    refused = team.sh("enginehouse", "runs", "resume", run[:8], status=9)
    assert "lives on this machine" in refused.stderr
    team.sh("enginehouse", "runs", "cancel", run[:8])
    assert team.state(run) == "Cancelled"


def test_ctrl_c_cancels_the_run_that_is_followed_and_returns_when_its_processes_are_gone(team):
    told = team.root / "followed.log"
    with told.open("wb") as log:
        following = subprocess.Popen(
            [ENGINEHOUSE, "runs", "start", "train-to-deploy/endless", "--set", "train.seed=5"],
            cwd=team.root,
            env=team.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    team.wait_for(lambda: "train: begins" in told.read_text(), timeout=90, what=told.read_text)
    run = team.runs_of("endless")[-1]["id"]
    assert team.processes(run)
    following.send_signal(signal.SIGINT)
    assert following.wait(90) == 130, told.read_text()
    assert team.processes(run) == []
    assert team.state(run) == "Cancelled"
    newest = max(team.home.glob("runs/*-endless/report.md"))
    assert newest.read_text().startswith("# endless: cancelled")


def test_a_stage_whose_program_was_killed_is_tried_again(team):
    recipe = team.pipeline("mortal").with_name("recipe.py")
    mark = recipe.with_name("killed-once")
    dies = f"""\
mark = Path({str(mark)!r})
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), 9)
"""
    recipe.write_text(recipe.read_text().replace("return rows(16, 3)", f"{dies}        return rows(16, 3)"))
    team.deploy(("mortal", "mortal", "validate"))
    run = team.start("mortal")
    team.wait(run, "Completed", timeout=180)
    assert mark.exists()
    assert "Retry 1/2" in team.logs(run)
    assert stages(team, "mortal").count("mortal/validate@1") == 1


def test_cancel_ends_a_grandchild_that_ignores_being_asked(team):
    run = team.start("stubborn")
    mark = team.root / "stubborn" / "grandchild"
    team.wait_for(mark.exists, timeout=90)
    pid = int(mark.read_text())
    began = time.monotonic()
    team.sh("enginehouse", "runs", "cancel", run)
    left = 75 - (time.monotonic() - began)
    team.wait_for(lambda: not psutil.pid_exists(pid), timeout=left)
    assert team.state(run) == "Cancelled"
    assert stages(team, "stubborn") == []
    assert team.json("artifacts", "verify") == []
    assert team.json("runs", "ls", "--state", "cancelled")[0]["state"] == "Cancelled"


def test_ten_pipelines_at_once_share_a_store_and_the_same_one_twice_is_built_once(team):
    names = [f"many{number}" for number in range(9)]
    runs = [team.start(name) for name in [*names, "again"]]
    for run in runs:
        team.wait(run, "Completed", timeout=240)
    for name in names:
        assert stages(team, name) == [f"{name}/train@1"]

    def told():
        return [
            word for run in (runs[0], runs[-1]) for word in ("built", "reused") if f"train: {word}" in team.logs(run)
        ]

    team.wait_for(lambda: sorted(told()) == ["built", "reused"], timeout=30, what=told)  # lines come a little later
    assert team.json("artifacts", "verify") == []


def test_approval_is_asked_for_and_its_answer_is_kept(team):
    run = team.start("asked")
    team.wait(run, "Suspended", timeout=180)
    team.wait_for(lambda: not team.processes(run), timeout=30)  # the worker is free
    assert team.json("releases", "ls", "asked")[0]["state"] == "candidate"
    page = team.report(run)
    assert "# asked: waiting" in page
    assert "candidate `asked/release@1`" in page
    assert "| verify | verified |" in page
    assert "| parity" in page.partition("## Gates")[2]
    assert "| staging | passed |" in page.partition("## Gates")[2]
    team.sh("enginehouse", "runs", "resume", run, status=9)
    team.sh("enginehouse", "runs", "approve", run, "--by", "a tester", "--reason", "looks right")
    team.wait(run, "Completed", timeout=180)
    shown = team.json("releases", "show", "asked")
    assert shown["state"] == "champion"
    assert shown["history"][0]["reason"] == "approved by a tester: looks right"
    assert stages(team, "asked").count("asked/train@1") == 1
    page = team.report(run)
    assert page.startswith("# asked: released")
    assert team.titles(run)[-3:] == [f"# asked: {state}" for state in ("waiting", "running", "released")]
    assert "| verify | verified |" in page, "what it did before it was suspended"

    # The next candidate, refused by the form's own call of the API.
    other = team.start("asked", "serve.max_batch_size=8")
    team.wait(other, "Suspended", timeout=180)
    answer = {"run_input": {"approve": False, "by": "a tester", "reason": "not today"}}
    team.api("POST", f"/flow_runs/{other}/resume", answer)
    ended = team.wait(other, "Rejected", timeout=180)
    assert "asked/release@2 was rejected by a tester: not today" in ended["state"]["message"]
    assert "Traceback" not in team.logs(other)
    page = team.report(other)
    assert page.startswith("# asked: rejected")
    assert "was rejected by a tester: not today" in page
    assert "candidate `asked/release@2`" in page
    assert "| staging | passed |" in page.partition("## Gates")[2], "what the staging server has shown"
    assert other not in {row["id"] for row in team.json("runs", "ls", "--state", "failed", "--limit", "200")}
    assert other in {row["id"] for row in team.json("runs", "ls", "--state", "rejected")}
    assert any(file.read_text().startswith("# asked: rejected") for file in team.home.glob("runs/*-asked/report.md"))
    with pytest.raises(Refused, match="asks again"):  # it would be rejected again, unasked
        team.resume(other)
    assert [row["state"] for row in team.json("releases", "ls", "asked")] == ["champion", "candidate"]

    # One that nobody answers.
    late = team.start("asked", "serve.max_batch_size=8", "approve_within_hours=0.0002")
    team.wait(late, "Failed", timeout=180)
    assert "never resumed" in team.run(late)["state"]["message"]
    assert [row["state"] for row in team.json("releases", "ls", "asked")] == ["champion", "candidate"]

    # One that is refused by command; and then somebody thinks better of it, and worse again, by the deployments.
    third = team.start("asked", "serve.max_batch_size=8", "gates.metrics.accuracy.min=0")
    team.wait(third, "Suspended", timeout=180)
    team.sh("enginehouse", "runs", "reject", third, "--by", "a tester", "--reason", "nor today")
    assert "nor today" in team.wait(third, "Rejected", timeout=180)["state"]["message"]
    for name in ("promote", "rollback"):
        team.sh("prefect", "deploy", "--name", name, "--prefect-file", ROOT / "prefect.yaml", cwd=ROOT)
    for flow, release, serving in (("promote", "asked/release@2", 2), ("rollback", "asked", 1)):
        parameters = [f"release={release}", f"home={team.home}", "reason=tried"]
        options = [word for parameter in parameters for word in ("--param", parameter)]
        team.sh("enginehouse", "runs", "start", f"{flow}/{flow}", *options)
        shown = team.json("releases", "show", "asked")
        assert shown["release"] == f"asked/release@{serving}"
        assert shown["history"][-1]["reason"] == "tried"


def test_a_run_whose_worker_and_process_are_gone_is_marked_within_two_minutes(dead_run, team):
    run, died = dead_run  # long before, while other tests ran
    state = team.wait(run, "Crashed", timeout=120)["state"]
    assert "No sign of life" in state["message"]
    assert (datetime.fromisoformat(state["timestamp"]) - died).total_seconds() < 120


def test_the_server_works_on_postgresql(team):
    assert team.database is not None, "PostgreSQL is not installed: apt-get install postgresql"
    assert team.database.startswith("postgresql+asyncpg://")
    settings = (team.root.parent / "server.log").read_text()
    assert "sqlite" not in settings.lower()
    assert not list((team.root.parent / "server").glob("prefect.db*"))


def test_the_page_of_ten_commands_does_what_it_says(ten_commands):
    """Each has ended well, or the shell would not have come so far."""
    assert len(ten_commands) == 10
    said = dict(ten_commands)
    assert "Completed" in said["enginehouse runs ls"]
    assert any("schedule" in command and "0 3 * * *" in command for command in said)
