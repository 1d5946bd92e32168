"""Bad input to the real command: one clear error without a traceback, the documented exit status, nothing changed."""

import json
import os
import socket
from pathlib import Path

import pytest


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, (old, text)
    file.write_text(text.replace(old, new, 1))


def in_pipeline(old, new):
    return lambda w: edit(w.pipeline("digits"), old, new)


def in_recipe(old, new):
    return lambda w: edit(w.pipeline("digits").parent / "recipe.py", old, new)


def sets(*changes):
    return [word for change in changes for word in ("--set", change)]


TABLE = {
    "a misspelt field": (
        in_pipeline("max_epochs", "max_epoch"),
        [],
        2,
        ["pipeline.yaml:", "train.max_epoch", "max_epochs"],
    ),
    "an unknown field": (
        in_pipeline("name: digits", "name: digits\ncolour: red"),
        [],
        2,
        ["pipeline.yaml:3", "colour"],
    ),
    "a wrong type": (in_pipeline("max_epochs: 20", "max_epochs: many"), [], 2, ["train.max_epochs", "many"]),
    "a name that leads elsewhere": (in_pipeline("name: digits", "name: ../digits"), [], 2, ["pipeline.yaml:2", "name"]),
    "a model name with a slash": (in_pipeline("name: digits", "name: digits\nmodel: a/b"), [], 2, ["model", "a/b"]),
    "yaml that is none": (in_pipeline("name: digits", "name: [digits"), [], 2, ["pipeline.yaml:"]),
    "a key given twice": (in_pipeline("name: digits", "name: digits\nname: again"), [], 2, ["name", "pipeline.yaml:3"]),
    "an undeclared axis": (in_pipeline("[batch, 1, 8, 8]", "[bacth, 1, 8, 8]"), [], 2, ["bacth", "batch"]),
    "fields that contradict": (None, sets("serve.max_batch_size=64"), 2, ["serve.max_batch_size", "shapes.batch.max"]),
    "an unknown engine": (None, sets("engine.kind=tensorflow"), 2, ["engine.kind", "onnxruntime", "tensorrt"]),
    "an engine whose tool is missing": (None, sets("engine.kind=tensorrt", "engine.target=26.05"), 3, ["tool missing"]),
    "a missing recipe": (
        lambda w: (w.pipeline("digits").parent / "recipe.py").unlink(),
        [],
        2,
        ["recipe.py", "pipeline.yaml:3"],
    ),
    "a missing class": (in_pipeline("recipe.py:Digits", "recipe.py:Digit"), [], 2, ["Digit", "Digits"]),
    "a recipe with a syntax error": (in_recipe("class Digits", "clas Digits"), [], 2, ["recipe.py:"]),
    "a recipe that raises": (
        in_recipe("class Digits:", "raise RuntimeError('out of coffee')\n\n\nclass Digits:"),
        [],
        2,
        ["out of coffee", "recipe.py"],
    ),
    "a distribution that is not installed": (
        None,
        sets("data.digits.distribution=no-such-thing"),
        2,
        ["no-such-thing"],
    ),
    "a path that is not there": (in_pipeline("{distribution: scikit-learn}", "{path: data.csv}"), [], 2, ["data.csv"]),
    "an unknown stage": (None, ["--from", "exprot"], 2, ["--from", "exprot"]),
    "stages the wrong way round": (None, ["--from", "engine", "--until", "train"], 2, ["engine", "train"]),
    "nothing to start from": (None, ["--from", "export", "--until", "export"], 2, ["train", "--from"]),
    "a setting without a value": (None, ["--set", "train.seed"], 2, ["train.seed", "="]),
    "an option that does not exist": (None, ["--rebild", "train"], 2, ["--rebild"]),
}


@pytest.mark.parametrize("case", TABLE)
def test_bad_input_gets_one_clear_error(case, workspace):
    spoil, arguments, status, expected = TABLE[case]
    if spoil is not None:
        spoil(workspace)
    done = workspace.enginehouse("run", workspace.pipeline("digits"), *arguments, status=status)
    for text in expected:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not workspace.repository.exists()
    assert not list((workspace.home / "store").glob("names/*/*"))


def test_the_error_is_json_when_json_is_asked_for(workspace):
    done = workspace.enginehouse("run", workspace.pipeline("digits"), "--set", "train.seed=x", "--json", status=2)
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "configuration"
    assert error["exit_status"] == 2
    assert "train.seed" in error["message"]


def test_a_store_that_cannot_be_written_is_named(workspace):
    workspace.home.write_text("a file where the folder should be")
    done = workspace.enginehouse("run", workspace.pipeline("digits"), status=8)
    assert str(workspace.home) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_pipeline_file_is_named(workspace):
    done = workspace.enginehouse("run", "nowhere.yaml", status=2)
    assert "nowhere.yaml" in done.stderr


def test_questions_before_any_run_say_what_to_do(workspace):
    done = workspace.enginehouse("artifacts", "ls", status=2)
    assert "run a pipeline first" in done.stderr
    assert workspace.enginehouse("serve", "status").stdout == "no server runs\n"
    assert workspace.enginehouse("serve", "stop").stdout == "no server runs\n"


def test_help_lists_the_exit_statuses(workspace):
    text = workspace.enginehouse("--help").stdout
    assert "5    a gate failed" in text
    for command in ("run", "plan", "artifacts", "serve", "init"):
        assert command in text


@pytest.fixture(scope="module")
def built(workspaces):
    """A workspace in which everything up to the gates is built and nothing is served."""
    workspace = workspaces("built")
    workspace.report("run", workspace.pipeline("digits"), "--until", "validate")
    return workspace


def test_an_occupied_port_is_named_with_who_listens(built, tmp_path):
    copy = built.copy(tmp_path / "copy")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = copy.enginehouse("run", copy.pipeline("digits"), "--set", f"deploy.http_port={port}", status=6)
    assert str(port) in done.stderr
    assert str(os.getpid()) in done.stderr
    assert not (copy.repository / "digits" / "config.pbtxt").exists()
    assert copy.report("serve", "status") == []


def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(built, tmp_path):
    copy = built.copy(tmp_path / "copy")
    broken = tmp_path / "tritonserver"
    broken.write_text("#!/bin/sh\necho cannot find libsomething.so\nexit 127\n")
    broken.chmod(0o755)
    environment = copy.environment
    done = copy.enginehouse(
        "run", copy.pipeline("digits"), status=6, env=environment | {"ENGINEHOUSE_TRITON": str(broken)}
    )
    assert "libsomething.so" in done.stderr
    assert not copy.repository.exists() or not list(copy.repository.glob("*/config.pbtxt"))


def test_a_model_made_by_hand_is_left_as_it_is(built, tmp_path):
    copy = built.copy(tmp_path / "copy")
    (copy.repository / "digits" / "1").mkdir(parents=True)
    (copy.repository / "digits" / "config.pbtxt").write_text('name: "digits"\n')
    done = copy.enginehouse("run", copy.pipeline("digits"), status=9)
    assert "made by hand" in done.stderr
    assert (copy.repository / "digits" / "config.pbtxt").read_text() == 'name: "digits"\n'
    assert copy.report("serve", "status") == []
