"""The whole chain with the real command, on a real Triton server: one release of digits, looked at from all sides."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.waiting import eventually

KEYED = ["train", "export", "engine", "triton_config", "validate"]


@pytest.fixture(scope="module")
def digits(workspaces):
    """A workspace in which digits was released; its tests leave it as it is."""
    return workspaces("digits")


@pytest.fixture(scope="module")
def first(digits):
    return digits.report("run", digits.pipeline("digits"))


def states(report):
    return {stage["stage"]: stage["state"] for stage in report["stages"]}


def test_the_first_run_builds_verifies_and_serves_everything(digits, first):
    assert states(first) == {
        **dict.fromkeys(KEYED, "built"),
        "verify": "verified",
        "publish": "published",
        "deploy": "released",
    }
    assert first["release"]["name"] == "digits/release@1"
    assert first["release"]["version"] == 1
    assert all(gate["passed"] for gate in first["gates"])
    assert {gate["runtime"] for gate in first["gates"]} >= {"pytorch", "onnx", "staging", "live"}


def test_the_live_servers_accuracy_is_pytorchs(digits, first):
    accuracy = first["metrics"]["accuracy"]
    assert accuracy.keys() == {"pytorch", "onnx", "staging", "live"}
    assert accuracy["pytorch"] >= 0.95
    assert abs(accuracy["live"] - accuracy["pytorch"]) <= 0.001


def test_the_printed_call_can_be_pasted(digits, first):
    done = subprocess.run(first["served"]["call"], shell=True, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["model_name"] == "digits"
    assert [output["name"] for output in answer["outputs"]] == ["logits"]


def test_a_second_run_reuses_everything_and_imports_neither_prefect_nor_torch(digits, first):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "flows.cli", "run", str(digits.pipeline("digits")), "--json"],
        env=digits.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert set(states(report).values()) == {"reused"}
    assert report["state"] == "unchanged"
    assert report["served"] == first["served"]
    assert {(g["gate"], g["runtime"]) for g in report["gates"]} == {(g["gate"], g["runtime"]) for g in first["gates"]}
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "tasks.stage" in imported
    assert not imported & {"prefect", "torch", "onnx", "onnxruntime", "numpy", "grpc"}


def test_what_is_served_can_be_seen(digits, first):
    (server,) = digits.report("serve", "status")
    assert server["models"] == ["digits 1"]
    assert server["http"] == first["served"]["http"]
    with urllib.request.urlopen(f"{server['http']}/v2/models/digits/versions/1") as answer:
        assert json.load(answer)["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]


def test_the_release_knows_what_it_was_made_of(digits, first):
    lineage = digits.report("artifacts", "lineage", "digits@champion")

    def names(node):
        return {*node["names"], *(name for child in node["materials"].values() for name in names(child))}

    assert names(lineage) == {"digits/release@1", *(f"digits/{stage}@1" for stage in KEYED)}
    assert digits.report("artifacts", "verify") == []


@pytest.mark.parametrize(
    ("change", "rebuilt"),
    [
        (["serve.max_batch_size=16"], {"triton_config"}),
        (["train.seed=7"], {"train"}),
        (["train.max_epochs=1"], {"train"}),
        (["export.opset_version=21"], {"export"}),
        (["shapes.batch.max=64", "serve.max_batch_size=32"], {"export"}),
        (["gates.parity.atol=0.01"], {"export"}),
        (["train.timeout_minutes=7"], set()),
        (["deploy.ready_timeout_seconds=7"], set()),
        (["gates.metrics.accuracy.min=0.5"], set()),
    ],
)
def test_a_changed_field_misses_where_it_matters_and_nowhere_else(digits, first, change, rebuilt):
    plan = digits.report("plan", digits.pipeline("digits"), *(word for c in change for word in ("--set", c)))
    missed = {stage["stage"]: stage["reasons"] for stage in plan["stages"] if stage["state"] == "miss"}
    assert missed.keys() & set(KEYED) == rebuilt
    field = change[0].partition("=")[0].rpartition(".")[2]
    assert all(any(field in reason for reason in reasons) for reasons in (missed[name] for name in rebuilt))


def edit(workspace, old, new, file="recipe.py"):
    path = workspace.pipeline("digits").parent / file
    text = path.read_text()
    assert old in text, (old, text)
    path.write_text(text.replace(old, new))


def missed(workspace):
    plan = workspace.report("plan", workspace.pipeline("digits"), "--until", "validate")
    return {stage["stage"] for stage in plan["stages"] if stage["state"] == "miss"}


def test_a_moved_copy_hits_and_an_edited_recipe_misses(digits, first, tmp_path):
    copy = digits.copy(tmp_path / "elsewhere")
    assert missed(copy) == set()
    edit(copy, "class Digits", "# a comment\nclass Digits")
    assert missed(copy) == set()
    (copy.pipeline("digits").parent / "notes.py").write_text("unrelated = True\n")
    assert missed(copy) == set()
    edit(copy, "class Digits", "import notes\n\n\nclass Digits")
    assert missed(copy) == {"train"}


def test_an_edited_metric_measures_again_and_trains_nothing(digits, first, tmp_path):
    copy = digits.copy(tmp_path / "elsewhere")
    recipe = copy.pipeline("digits").parent / "recipe.py"
    recipe.write_text(
        recipe.read_text().replace("def result(self)", "def unused(self):\n        pass\n\n    def result(self)")
    )
    assert missed(copy) == {"validate"}


def test_until_stops_and_from_takes_what_is_there(digits, first, tmp_path):
    copy = digits.copy(tmp_path / "elsewhere")
    report = copy.report("run", copy.pipeline("digits"), "--until", "export", "--set", "train.max_epochs=1")
    assert states(report) == {"train": "built", "export": "built"}
    plan = copy.report("plan", copy.pipeline("digits"), "--from", "export", "--until", "engine")
    assert plan["stages"][0]["artifact"] == "digits/train@2"
    assert plan["stages"][1]["state"] == "hit"


def test_a_rebuild_gives_the_same_bytes(digits, first, tmp_path):
    copy = digits.copy(tmp_path / "elsewhere")
    before = copy.report("artifacts", "show", "digits/train")["content"]
    report = copy.report(
        "run", copy.pipeline("digits"), "--until", "export", "--rebuild", "train", "--rebuild", "export"
    )
    assert states(report) == {"train": "built", "export": "built"}
    assert copy.report("artifacts", "show", "digits/train@2")["content"] == before


def test_a_corrupt_object_is_found_named_and_rebuilt(digits, first, tmp_path):
    copy = digits.copy(tmp_path / "elsewhere")
    content = copy.report("artifacts", "show", "digits/export")["content"]
    (model,) = [file for file in content["files"] if file["path"] == "model.onnx"]
    hex_digest = model["digest"].removeprefix("sha256:")
    (stored,) = [p for p in (copy.home / "store").rglob("*") if p.is_file() and hex_digest in str(p).replace("/", "")]
    data = bytearray(stored.read_bytes())
    data[100] ^= 1
    stored.chmod(0o644)
    stored.write_bytes(data)
    done = copy.enginehouse("artifacts", "verify", status=7)
    assert "digits/export@1" in done.stderr
    assert "digits/release@1" in done.stderr
    report = copy.report("run", copy.pipeline("digits"), "--until", "validate")
    assert states(report)["export"] == "built"
    assert copy.report("artifacts", "verify") == []


def test_a_changed_config_alone_moves_the_server_without_a_new_version(digits, first, tmp_path):
    copy = digits.copy(tmp_path / "elsewhere")
    try:
        started = copy.report("run", copy.pipeline("digits"))
        # The copy is another repository, so its release is a new one; the version in it is used as it is.
        assert states(started) == {
            **dict.fromkeys([*KEYED, "publish"], "reused"),
            "verify": "verified",
            "deploy": "released",
        }
        copy.enginehouse("serve", "stop")
        started = copy.report("run", copy.pipeline("digits"))
        assert states(started) == {**dict.fromkeys([*KEYED, "verify", "publish"], "reused"), "deploy": "started"}
        report = copy.report("run", copy.pipeline("digits"), "--set", "serve.max_batch_size=16")
        assert states(report)["train"] == "reused"
        assert report["release"]["version"] == 1
        assert report["served"]["http"] == started["served"]["http"]
        config = (copy.repository / "digits" / "config.pbtxt").read_text()
        assert "max_batch_size: 16" in config
        with urllib.request.urlopen(f"{report['served']['http']}/v2/models/digits/config") as answer:
            assert json.load(answer)["max_batch_size"] == 16
        again = copy.report("run", copy.pipeline("digits"), "--set", "serve.max_batch_size=16")
        assert again["state"] == "unchanged"
        new = copy.report("run", copy.pipeline("digits"), "--set", "train.seed=3")
        assert new["release"]["version"] == 2
        assert sorted(p.name for p in (copy.repository / "digits").iterdir()) == ["1", "2", "config.pbtxt"]
        (server,) = copy.report("serve", "status")
        assert server["models"] == ["digits 1", "digits 2"]

        # Going back restores the versions and the config, and a run that nothing changed for does not undo it.
        back = copy.report("releases", "rollback", "digits", "--reason", "wrong")
        assert (back["release"], back["version"], back["servers"]) == ("digits/release@3", 1, [server["http"]])
        assert (copy.repository / "digits" / "config.pbtxt").read_text() == config
        refused = copy.enginehouse("run", copy.pipeline("digits"), "--set", "train.seed=3", status=9)
        assert "digits/release@4, which this run would release, was rolled back by" in refused.stderr
        forth = copy.report("releases", "promote", "digits/release@4")
        assert (forth["state"], forth["metrics"]["accuracy"].keys()) == ("promoted", {"staging", "live"})
        assert copy.report("run", copy.pipeline("digits"), "--set", "train.seed=3")["state"] == "unchanged"
        shown = copy.report("releases", "show", "digits")
        assert shown["release"] == "digits/release@4"
        assert shown["data"].keys() == {"digits"}
    finally:
        copy.enginehouse("serve", "stop")


def test_a_failed_gate_leaves_the_champion_serving(digits, first, tmp_path):
    copy = digits.copy(tmp_path / "elsewhere")
    config = (copy.repository / "digits" / "config.pbtxt").read_bytes()
    done = copy.enginehouse("run", copy.pipeline("digits"), "--set", "train.max_epochs=1", status=5)
    assert "metrics.accuracy on pytorch: measured 0." in done.stderr
    assert (copy.repository / "digits" / "config.pbtxt").read_bytes() == config
    assert [p.name for p in (copy.repository / "digits").iterdir() if p.is_dir()] == ["1"]


def test_gc_keeps_what_the_release_needs(digits, first, tmp_path):
    copy = digits.copy(tmp_path / "elsewhere")
    for epochs in (1, 2):
        copy.report("run", copy.pipeline("digits"), "--until", "train", "--set", f"train.max_epochs={epochs}")
    would = copy.report("artifacts", "gc", "--dry-run", "--keep", "1")
    assert would["names"] == ["digits/train@2"]
    assert copy.report("artifacts", "gc", "--keep", "1") == would
    assert {row["artifact"] for row in copy.report("artifacts", "ls")} == {
        "digits/release@1",
        "digits/promotion@1",
        "digits/train@3",
        *(f"digits/{stage}@1" for stage in KEYED),
    }
    assert copy.report("artifacts", "verify") == []
    assert "keep" in copy.enginehouse("artifacts", "gc", "--keep", "0", status=2).stderr


@pytest.fixture(scope="module")
def seen(first, prefect_url):
    """What Prefect's server has of the first run: a function from a kind of thing to all of that kind."""
    page = Path(first["page"]).read_text()
    run = re.search(r"/flow-run/([0-9a-f-]{36})", page)[1]

    def ask(kind):
        asked = urllib.request.Request(
            f"{prefect_url}/{kind}/filter",
            json.dumps({"flow_runs": {"id": {"any_": [run]}}}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.load(answer)

    return ask


def test_prefects_task_runs_are_named_after_what_they_made(first, seen):
    names = {f"{stage}: digits/{stage}@1 (built)" for stage in KEYED}
    names |= {"verify (verified)", "publish: version 1 (published)", "deploy (released)"}
    # The server learns of a task run's end by an event, a little after the flow has ended.
    assert eventually(lambda: {run["name"] for run in seen("task_runs")} == names)


def test_prefect_shows_the_report_with_the_curves_and_where_the_release_is_served(first, seen):
    shown = {each["key"]: each for each in seen("artifacts")}
    assert shown.keys() == {
        "digits-training",
        "digits-stages",
        "digits-metrics",
        "digits-report",
        "digits-release-1",
        "digits-served",
    }
    assert shown["digits-training"]["data"] == 100
    assert shown["digits-training"]["task_run_id"]
    assert "accuracy" in shown["digits-training"]["description"]
    reports = [each["data"] for each in seen("artifacts") if each["key"] == "digits-report"]
    (report,) = [text for text in reports if text.startswith("# digits: released\n")]
    assert "](data:image/png;base64," in report
    assert "`digits/release@1`" in report
    assert first["served"]["http"] in shown["digits-served"]["data"]
    assert "/runs/flow-run/" in shown["digits-release-1"]["data"] or "/flow-run/" in shown["digits-release-1"]["data"]


def test_the_runs_folder_holds_the_report_for_people_and_for_machines(first):
    page = Path(first["page"])
    assert page.read_text().startswith("# digits: released\n")
    assert "![curves of the training](curves.png)" in page.read_text()
    assert page.with_name("curves.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads(page.with_name("report.json").read_text())
    assert (values["state"], values["stages"]) == ("released", first["stages"])
