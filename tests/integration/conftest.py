"""What the integration tests share: real processes, real servers."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
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


GRANDCHILD = """
        code = (
            "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "open('grandchild.new', 'w').write(str(os.getpid())); os.rename('grandchild.new', 'grandchild'); "
            "time.sleep(600)"
        )
        import sys
        subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent)
        time.sleep(600)"""

MANY = [f"many{number}" for number in range(9)]


@pytest.fixture(scope="session")
def team(prefect_lab, tmp_path_factory):
    """A Prefect server and a worker for the whole session, and deployments of every pipeline that the tests run."""
    with prefect_lab.team(tmp_path_factory.mktemp("team")) as made:
        made.pipeline("tiny")
        made.pipeline("killed", sleep=0.15, epochs=8)
        made.pipeline("reference", epochs=8)
        made.pipeline("endless", sleep=0.5, epochs=200)
        made.pipeline("stubborn", extra=GRANDCHILD.strip())
        made.pipeline("asked", more="approve: before_promote")
        for number, name in enumerate(MANY):
            made.pipeline(name, epochs=2 + number)  # equal ones would share one product
        made.deploy(
            *((name, name, "train") for name in ("tiny", "endless", "stubborn", *MANY)),
            # A pipeline by two deployments: each has a queue of its own, so that they do run at once.
            ("dead", "endless", "train"),
            ("again", "many0", "train"),
            ("killed", "killed", "validate"),
            ("reference", "reference", "validate"),
            ("asked", "asked", "deploy"),
        )
        yield made


@pytest.fixture(scope="session")
def dead_run(team):
    """A run whose worker and process were killed, and when: it is marked while other tests run."""
    run = team.start("dead", "train.seed=3")
    team.wait_for(lambda: "train: begins" in team.logs(run), timeout=60)
    team.kill(run, worker=True)
    died = datetime.now(UTC)
    team.start_worker()
    return run, died


@pytest.fixture(scope="session")
def ten_commands(prefect_lab, tmp_path_factory):
    """The first commands of docs/prefect.md, run in one shell, each with what it printed."""
    return prefect_lab.run_page(tmp_path_factory.mktemp("page"))
