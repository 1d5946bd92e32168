"""What the integration tests share: real processes, real servers."""

from __future__ import annotations

import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tasks.errors import ToolMissing
from tasks.toolchain.triton import TritonInstallation, find_installation


@pytest.fixture(scope="session")
def triton_installation() -> TritonInstallation:
    """The Triton that `make` or `enginehouse serve setup` has made. Never skipped: a green run must mean something."""
    try:
        return find_installation()
    except ToolMissing as error:
        pytest.fail(f"{error}\n`make test` sets one up, as does `enginehouse serve setup`", pytrace=False)


@pytest.fixture(scope="session")
def prefect_lab():
    """`tests/prefect_lab.py`."""
    spec = spec_from_file_location("prefect_lab", Path(__file__).parents[1] / "prefect_lab.py")
    module = module_from_spec(spec)
    sys.modules["prefect_lab"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def team(prefect_lab, tmp_path_factory):
    """A Prefect server and a worker for the whole session."""
    with prefect_lab.team(tmp_path_factory.mktemp("team")) as made:
        yield made


@pytest.fixture(scope="session")
def tiny(team):
    """The team, with a deployment `tiny` that trains in a second."""
    team.pipeline("tiny")
    team.deploy("tiny")
    return team


@pytest.fixture(scope="session")
def dead_run(team):
    """A run whose worker and process were killed, and when: it is marked while other tests run."""
    team.pipeline("dead", sleep=0.5, epochs=100)
    team.deploy("dead")
    run = team.start("dead")["id"]
    team.wait_for(lambda: "train: begins" in team.logs(run), timeout=60)
    team.kill(run, worker=True)
    died = time.monotonic()
    team.start_worker()
    return run, died
