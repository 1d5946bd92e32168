"""The flows of `releases`, run by Prefect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
_spec = spec_from_file_location("release_lab", TESTS / "release_lab.py")
release_lab = module_from_spec(_spec)
sys.modules["release_lab"] = release_lab
_spec.loader.exec_module(release_lab)

PROGRAM = """
import json, sys
from pathlib import Path
from flows.release_flows import ls, pin, promote, repair, rollback, show
home = Path(sys.argv[1])
done = [
    promote("adding", reason="by a schedule", home=home),
    rollback("adding", home=home),
    pin("adding/release@2", home=home),
    repair("adding", home=home),
    show("adding", home=home),
    ls("adding", home=home)[-1],
]
Path(sys.argv[2]).write_text(json.dumps(done))
"""


@pytest.fixture
def lab(tmp_path, triton_installation):
    release_lab.no_proxy()
    made = release_lab.Lab(tmp_path / "lab")
    yield made
    made.stop()


def test_the_flows_do_what_the_commands_do(lab, tmp_path, prefect_url):
    lab.promote(lab.release(1))
    lab.release(2)
    out = tmp_path / "done.json"
    environment = os.environ | {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(tmp_path / "prefect")}
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(lab.home.root), str(out)], env=environment, check=True, timeout=300
    )
    done = json.loads(out.read_text())
    states = [each["state"] for each in done]
    assert states == ["promoted", "rolled back", "pinned", "unchanged", "champion", "former"]
    assert [each["release"][-1] for each in done] == ["2", "1", "2", "1", "1", "2"]
    assert lab.ask() == 1
