"""What a person reads: durations, sizes, and the tables that a run ends with."""

import io

import pytest
from rich.console import Console

from flows import show
from flows.report import markdown

REPORT = {
    "pipeline": "digits",
    "state": "released",
    "seconds": 42.1,
    "stages": [
        {
            "stage": "train",
            "state": "built",
            "artifact": "digits/train@1",
            "content": "sha256:0",
            "seconds": 8.6,
            "metrics": {},
        },
        {"stage": "deploy", "state": "released", "artifact": None, "content": None, "seconds": 75.0, "metrics": {}},
    ],
    "metrics": {"accuracy": {"pytorch": 0.98054, "live": 0.98054}},
    "gates": [{"gate": "parity", "runtime": "onnx", "measured": 1e-6, "allowed": "<= 0.0001", "passed": True}],
    "release": {
        "name": "digits/release@1",
        "model": "digits",
        "version": 1,
        "repository": "/somewhere/long/model_repo",
        "promoted": True,
    },
    "served": {
        "http": "http://127.0.0.1:8000",
        "grpc": "127.0.0.1:8001",
        "metrics": {},
        "call": "curl -s http://127.0.0.1:8000/v2/models/digits/infer -d @/a/long/path/to/the/model.request",
        "stop": "enginehouse serve stop",
    },
}


def printed(parts, width=60):
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=True)
    return capture.get()


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (125, "2 min 05 s")])
def test_durations(seconds, text):
    assert show.duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (155_500, "155.5 kB"), (2.5e12, "2.5 TB")])
def test_sizes(count, text):
    assert show.size(count) == text


def test_the_summary_keeps_what_is_to_be_pasted_on_one_line():
    text = printed(show.summary(REPORT))
    assert f"call it    {REPORT['served']['call']}\n" in text
    assert "1 min 15 s" in text
    assert "0.9805" in text


def test_a_summary_without_a_release_says_what_was_built():
    text = printed(show.summary(REPORT | {"state": "built", "release": None, "served": None}))
    assert "digits: built" in text
    assert "call it" not in text


def test_a_plan_keeps_a_command_on_one_line_and_quotes_it():
    argv = ["python", "-m", "something", "a b", "x" * 80]
    prospect = {"stage": "train", "state": "miss", "artifact": None, "reasons": ["never built before"], "actions": []}
    assert f"    $ python -m something 'a b' {'x' * 80}\n" in printed(show.plan_view([prospect | {"commands": [argv]}]))


def test_the_markdown_report_has_every_part():
    page = markdown(REPORT)
    for text in (
        "# digits: released",
        "| train | built | digits/train@1 | 8.6 |",
        "| accuracy | 0.9805 | 0.9805 |",
        "`digits/release@1`",
    ):
        assert text in page


def test_the_help_is_of_a_readable_width_when_it_is_piped():
    import os
    import subprocess
    import sys

    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "--rebuild" in done.stdout


def test_what_an_artifact_was_made_of_is_told_once():
    def node(name, materials=(), dependents=()):
        return {
            "names": [name],
            "stage": name,
            "record": f"sha256:{name}",
            "content": "sha256:0123456789ab",
            "materials": {child["names"][0]: child for child in materials},
            "dependents": list(dependents),
        }

    train = node("train")
    export = node("export", [train])
    engine = node("engine", [export])
    tree = show.lineage_tree(node("release", [engine, node("validate", [train, export, engine])]))
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as drawn:
        console.print(tree)
    lines = [line.replace("  sha256:0123456789ab", "").strip(" │├└─") for line in drawn.get().splitlines()]
    told = ["release", "engine", "export", "train", "validate", "train", "export  (as above)", "engine  (as above)"]
    assert lines == told
