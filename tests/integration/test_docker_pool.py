"""A docker work pool for real: each run is a container of the trainer image, with the flow from its installed wheel.

Needs `enginehouse/trainer:cpu` (`containers/build trainer`) and an engine at $DOCKER_HOST.
"""

from __future__ import annotations

import shutil

import pytest
import yaml

from tasks.toolchain.docker_engine import containers_with
from tests.prefect_lab import ROOT, Team, server, wait_for

pytestmark = pytest.mark.docker

SHIPPED = ROOT / "containers" / "prefect" / "docker.yaml"


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    root = tmp_path_factory.mktemp("pool")
    with server(root, database=None) as url:
        made = Team(root=root / "work", url=url, database=None, pool="enginehouse-docker")
        example = made.root / "examples" / "digits"
        shutil.copytree(ROOT / "examples" / "digits", example)
        for path in [made.root, *made.root.rglob("*")]:  # the container's user is not ours
            path.chmod(0o777 if path.is_dir() else 0o666)
        made.sh("enginehouse", "runs", "setup", "--pool", made.pool, "--type", "docker")
        # As it is shipped, but for the network: the server of this test listens on this machine alone.
        wanted = yaml.safe_load(SHIPPED.read_text())
        (deployment,) = wanted["deployments"]
        deployment["work_pool"]["job_variables"]["network_mode"] = "host"
        file = root / "docker.yaml"
        file.write_text(yaml.safe_dump(wanted))
        made.sh("env", f"PIPELINES={made.root}", "prefect", "deploy", "--all", "--prefect-file", file)
        made.start_worker()
        yield made
        made.stop_worker()


def containers_of(identity: str) -> list[str]:
    return [str(container.short_id) for container in containers_with("io.prefect.flow-run-id", identity)]


def test_a_run_is_trained_in_a_container_out_of_the_wheel(team: Team) -> None:
    run = team.start("digits-docker", "train.max_epochs=2", "gates.metrics.accuracy.min=0.1")
    team.wait(run, "Completed", timeout=300)
    rows = team.json("artifacts", "ls", "--home", team.root / ".enginehouse")
    stages = ["train", "export", "engine", "triton_config", "validate"]
    assert sorted(row["artifact"] for row in rows) == sorted(f"digits/{stage}@1" for stage in stages)
    wait_for(lambda: containers_of(run) == [], timeout=30)


def test_a_cancelled_run_leaves_no_container(team: Team) -> None:
    run = team.start("digits-docker", "train.max_epochs=2000", "train.seed=1")
    team.wait_for(lambda: "train: begins" in team.logs(run), timeout=120)
    assert len(containers_of(run)) == 1
    team.sh("enginehouse", "runs", "cancel", run)
    assert team.state(run) == "Cancelled"
    wait_for(lambda: containers_of(run) == [], timeout=75)
