"""Releases on a real Triton server: promoted, rolled back, pinned, kept, and brought together again after a death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from flows.releases import describe, listing, repair, roll_back, set_pin
from tasks.errors import ConfigError, NotReady, Refused
from tasks.publish import Repository, commit_config
from tasks.toolchain import triton, triton_client
from tasks.toolchain.processes import start_time
from tests.waiting import eventually

TESTS = Path(__file__).parents[1]
_spec = spec_from_file_location("release_lab", TESTS / "release_lab.py")
release_lab = module_from_spec(_spec)
sys.modules["release_lab"] = release_lab
_spec.loader.exec_module(release_lab)
Lab = release_lab.Lab
ENGINEHOUSE = Path(sys.executable).with_name("enginehouse")


@pytest.fixture
def lab(tmp_path, triton_installation):
    release_lab.no_proxy()
    made = Lab(tmp_path / "lab")
    yield made
    made.stop()


def promoted(lab, *numbers, **options) -> list:
    releases = []
    for number in numbers:
        releases.append(lab.release(number, **options))
        lab.promote(releases[-1])
    return releases


def states(lab) -> dict[str, str]:
    return {row["release"].partition("@")[2]: row["state"] for row in listing(lab.desk())}


def versions(lab) -> list[int]:
    return sorted(int(path.name) for path in lab.folder.iterdir() if path.is_dir())


def test_a_release_goes_from_candidate_to_champion_to_previous_and_comes_back_to_the_byte(lab):
    first = lab.release(1, stage=True)
    assert states(lab) == {"1": "candidate"}
    assert not lab.target.observe(), "a candidate is served to nobody"
    lab.promote(first)
    config = lab.config
    assert lab.ask() == 1

    second = lab.release(2, max_batch_size=4, stage=True)
    assert (states(lab), lab.ask()) == ({"1": "champion", "2": "candidate"}, 1)
    lab.promote(second)
    assert (states(lab), lab.ask(), lab.ask(1), lab.ask(2)) == ({"1": "previous", "2": "champion"}, 2, 1, 2)
    assert lab.config != config

    server = lab.target.observe()[0].address
    done = roll_back(lab.desk(), reason="it was wrong")
    assert (done["state"], done["release"], done["previous"]) == ("rolled back", "adding/release@1", None)
    assert lab.config == config
    assert lab.ask() == 1
    assert triton_client.ready_versions(server, "adding") == (1,)
    assert triton_client.model_config(server, "adding")["max_batch_size"] == 8
    assert states(lab) == {"1": "champion", "2": "former"}
    assert lab.target.observe()[0].address == server, "the server was moved, not started anew"

    assert roll_back(lab.desk("adding/release@1"))["state"] == "unchanged"
    with pytest.raises(Refused, match="no champion before the present one"):
        roll_back(lab.desk())

    shown = describe(lab.desk())
    assert [step["action"] for step in shown["history"]] == ["promote", "roll back"]
    assert shown["history"][1]["reason"] == "it was wrong"
    assert shown["config"] == config
    aliases = lab.store.aliases("adding")
    assert str(aliases["champion"]) == "adding/release@1"
    assert "previous" not in aliases
    assert lab.store.verify() == ()


def test_going_back_twice_goes_further_back_and_not_forth_again(lab):
    promoted(lab, 1, 2, 3)
    assert lab.roll_back()["release"] == "adding/release@2"
    assert lab.ask() == 2
    assert lab.roll_back()["release"] == "adding/release@1"
    assert lab.ask() == 1
    lab.promote(lab.release(4))
    assert lab.ask() == 4
    assert versions(lab) == [1, 2, 3, 4], "a version's number is not used again"
    assert lab.roll_back()["release"] == "adding/release@1"


def test_retention_removes_what_no_kept_release_lists_and_a_rollback_puts_it_back(lab):
    lab.keep = 2
    lab.configure()
    releases = promoted(lab, 1)
    set_pin(lab.desk("adding/release@1"))
    releases += promoted(lab, 2, 3, 4, 5, 6)
    assert versions(lab) == [1, 4, 5, 6], "the pinned one, and those that the last two releases list"
    content = {p.name: p.read_bytes() for p in (lab.folder / "1").iterdir()}
    set_pin(lab.desk("adding/release@1"), remove=True)
    lab.promote(lab.release(7))
    assert versions(lab) == [5, 6, 7]

    assert lab.roll_back(to="2")["release"] == "adding/release@2"
    assert (lab.ask(), lab.ask(1), lab.ask(2)) == (2, 1, 2)
    assert (lab.folder / "1" / "model.onnx").read_bytes() == content["model.onnx"]
    assert versions(lab) == [1, 2, 5, 6, 7], "the champion's, and those of the last two releases"
    lab.promote(lab.release(8))
    assert lab.ask(8) == 8, "the number of a version that was removed is not used again either"


def test_a_damaged_version_is_put_back_out_of_the_store(lab):
    promoted(lab, 1, 2)
    model = lab.folder / "1" / "model.onnx"
    model.chmod(0o644)
    model.write_bytes(b"damaged")
    lab.roll_back()
    assert model.read_bytes() == release_lab.adding(1)
    assert lab.ask() == 1


def test_a_broken_candidate_leaves_the_champion_serving_and_the_config_as_it_was(lab):
    promoted(lab, 1)
    broken = lab.release(2, stage=False)
    model = lab.folder / "2" / "model.onnx"
    model.chmod(0o644)
    model.write_bytes(release_lab.adding(2, broken=True))
    stat = model.stat()
    provenance = lab.folder / "2" / "provenance.json"
    value = json.loads(provenance.read_text())
    entry = value["files"][0]
    entry |= {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    provenance.write_text(json.dumps(value))
    config = lab.config
    with pytest.raises(NotReady, match="loading adding"):
        lab.promote(broken)
    assert (lab.config, lab.ask(), states(lab)["1"]) == (config, 1, "champion")
    assert any("serves what it served before" in event.get("text", "") for event in lab.heard)


STEPS = ["load", "commit", "record", "history", "aliases"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("act", ["promote", pytest.param("rollback", marks=pytest.mark.slow)])
def test_a_process_killed_before_any_step_is_repaired(lab, step, act):
    """Killed with SIGKILL just before the step; then `repair` in this process."""
    promoted(lab, 1, 2)
    third = lab.release(3)
    config = lab.config
    child = subprocess.run(
        [sys.executable, str(TESTS / "release_kill.py"), str(lab.root), act, str(third.ref), step],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    to, from_ = (3, 2) if act == "promote" else (1, 2)
    done_already = step not in ("load", "commit")
    assert (lab.config != config) == done_already
    done = repair(lab.desk())
    expected = to if done_already else from_
    assert done["state"] == ("unchanged" if step == "load" else "repaired")
    assert lab.ask() == expected
    assert states(lab)[str(expected)] == "champion"
    assert str(lab.store.aliases("adding")["champion"]) == f"adding/release@{expected}"
    assert repair(lab.desk())["state"] == "unchanged"
    server = lab.target.observe()[0].address
    listed = {1: (1,), 2: (1, 2), 3: (2, 3)}[expected]
    assert eventually(lambda: triton_client.ready_versions(server, "adding") == listed)


def test_a_server_killed_serves_the_champion_again_after_repair(lab):
    promoted(lab, 1, 2)
    (record,) = [triton.observe(path) for path in lab.home.serve.glob("*.json")]
    os.kill(record.pid, signal.SIGKILL)
    assert eventually(lambda: start_time(record.pid) is None)
    done = repair(lab.desk())
    assert lab.ask() == 2
    assert done["release"] == "adding/release@2"


def test_the_config_edited_by_somebody_is_no_release_and_repair_says_so(lab):
    promoted(lab, 1)
    commit_config(
        Repository(lab.root / "models").folder("adding"),
        lab.config.replace("max_batch_size: 8", "max_batch_size: 2"),
        replacing=lab.config,
    )
    with pytest.raises(Refused, match="is that of no release of adding"):
        repair(lab.desk())
    assert lab.roll_back(to="1")["state"] == "rolled back"
    assert "max_batch_size: 8" in lab.config


def test_the_command_lists_shows_rolls_back_and_exits_with_its_status(lab):
    promoted(lab, 1, 2)

    def enginehouse(*arguments, status=0):
        done = subprocess.run(
            [str(ENGINEHOUSE), "releases", *arguments],
            cwd=lab.root,
            env=os.environ | {"ENGINEHOUSE_HOME": str(lab.home.root)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == status, done.stderr
        return done

    rows = json.loads(enginehouse("ls", "--json").stdout)
    assert [(row["release"], row["state"]) for row in rows] == [
        ("adding/release@1", "previous"),
        ("adding/release@2", "champion"),
    ]
    assert "adding/release@2" in enginehouse("ls").stdout
    shown = json.loads(enginehouse("show", "adding", "--json").stdout)
    assert (shown["release"], shown["state"]) == ("adding/release@2", "champion")
    card = enginehouse("show").stdout
    assert "promote" in card
    assert "repository" in card
    assert str(lab.folder.parent) in card
    assert "adding/release@1: pinned" in enginehouse("pin", "adding/release@1").stdout
    back = json.loads(enginehouse("rollback", "--reason", "too slow", "--json").stdout)
    assert (back["state"], back["release"], back["version"]) == ("rolled back", "adding/release@1", 1)
    assert lab.ask() == 1
    assert "no champion before" in enginehouse("rollback", status=9).stderr
    assert "nothing to repair" in enginehouse("repair").stdout
    assert "has no release" in enginehouse("show", "nothing", status=2).stderr
    again = json.loads(enginehouse("promote", str(lab.file), "--json").stdout)
    assert (again["state"], again["release"]) == ("unchanged", "adding/release@1")


def test_promoting_asks_the_live_server_the_whole_test_data(lab):
    lab.promote(lab.release(1), measure=True)
    (row,) = listing(lab.desk())
    assert row["metrics"] == {"offset": {"staging": 1, "live": 1}}
    assert row["state"] == "champion"


def test_a_name_that_is_no_release_gets_one_clear_error(lab):
    promoted(lab, 1)
    with pytest.raises(ConfigError):
        lab.desk("adding/release@7")
    with pytest.raises(ConfigError):
        lab.roll_back(to="7")


def test_a_model_of_another_pipeline_is_refused_until_it_is_taken_over(lab):
    """Two pipelines that publish one model name into one repository, and a pipeline that was renamed."""
    promoted(lab, 1)
    other = Lab(lab.root, name="other")
    with pytest.raises(Refused, match=r"is the model of pipeline adding, .*\n.*`publish.takes_over: adding`"):
        other.release(5)
    assert (lab.ask(), versions(lab)) == (1, [1])
    plan = [str(ENGINEHOUSE), "plan", str(other.file), "--json"]
    refused = subprocess.run(plan, capture_output=True, text=True, timeout=60, check=False)
    assert (refused.returncode, "publish.takes_over: adding" in refused.stderr) == (9, True)

    other.takes_over = "adding"
    other.configure()
    promoted(other, 5)
    assert (other.ask(), other.ask(1)) == (5, 1)
    other.takes_over = "null"
    other.configure()
    promoted(other, 6)
    assert other.ask() == 6, "it is taken over once, and then is its own"
    lab.configure()
    assert states(lab) == {"1": "taken over by other"}
    for act in (lambda: lab.roll_back(to="1"), lambda: repair(lab.desk()), lambda: lab.release(7)):
        with pytest.raises(Refused, match="is the model of pipeline other"):
            act()
    (lab.folder / "1" / "model.onnx").unlink()
    assert other.roll_back()["state"] == "rolled back", "what the former pipeline made is put back out of the store"
    assert (other.ask(), other.ask(1)) == (5, 1)
