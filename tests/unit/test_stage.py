"""Keyed stages: what their keys hold, and how one is found or built."""

import json
import sys
from pathlib import Path

import pytest

from tasks import export, train, validate
from tasks.artifacts.code import recipe_code
from tasks.artifacts.digest import Digest
from tasks.artifacts.store import ArtifactStore
from tasks.errors import CommandFailed, ConfigError, ExportRefused
from tasks.events import silent
from tasks.pipeline_file import load
from tasks.stage import Built, Identity, KeyedStage, KeyParts, Step, find_or_build, key_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits" / "pipeline.yaml"


@pytest.fixture(scope="module")
def pipeline():
    return load(EXAMPLE)


@pytest.fixture(scope="module")
def identity(pipeline):
    return Identity(
        code=recipe_code(pipeline.recipe_file, pipeline.recipe_attribute), data={"digits": {"version": "1"}}
    )


def test_the_environment_of_training_names_torchs_version_and_build(pipeline, identity):
    import importlib.metadata

    environment = train.STAGE.parts(pipeline, identity).environment
    assert environment["torch"] == importlib.metadata.version("torch")
    # Another machine, kernel or number of cores trains nothing again.
    assert environment.keys() == {"python", "torch", "numpy"}


def test_no_key_holds_a_path_or_a_timeout(pipeline, identity):
    for stage in (train.STAGE, export.STAGE, validate.STAGE):
        parts = stage.parts(pipeline, identity)
        text = json.dumps([parts.config, parts.code, parts.data, dict(parts.environment)])
        assert "timeout" not in text
        assert str(EXAMPLE.parent) not in text


def test_the_order_of_inputs_is_part_of_the_exports_key(identity):
    other = EXAMPLE.parents[1] / "code_or_prose" / "pipeline.yaml"
    one = load(other)
    turned = one.model_copy(update={"inputs": dict(reversed(one.inputs.items()))})
    materials = {"train": type("Ref", (), {"content": Digest.of(b"weights")})()}
    assert key_of(export.STAGE, one, identity, materials) != key_of(export.STAGE, turned, identity, materials)


def stage_that_runs(program: str, *, version: int = 1) -> KeyedStage:
    """A stage of one step: a small Python program that gets its output folder as its argument."""

    def steps(site):
        output = site.work / "step" / "output"
        return (
            Step(
                name="step",
                what="the step",
                argv=(sys.executable, "-c", program, str(output)),
                timeout_seconds=60,
                output=output,
                job={"b": 1, "a": 2},
                job_file=site.work / "step.json",
            ),
        )

    def collect(site):
        site.product.mkdir(exist_ok=True)
        (site.work / "step" / "output" / "made").rename(site.product / "made")
        return Built(metrics={"size": 1.0})

    return KeyedStage(
        name="toy",
        version=version,
        reproducible=True,
        materials=(),
        parts=lambda pipeline, identity: KeyParts(config={"seed": pipeline.train.seed}),
        steps=steps,
        collect=collect,
    )


WRITES = "import sys, pathlib; print('hello'); (pathlib.Path(sys.argv[1]) / 'made').write_text('x')"


def fails_with(report: dict) -> str:
    return f"""
import json, pathlib, sys
(pathlib.Path(sys.argv[1]) / "error.json").write_text(json.dumps({report!r}))
sys.exit(1)
"""


def build(stage, pipeline, identity, store, listener=silent, **options):
    return find_or_build(stage, pipeline, identity, {}, store=store, listener=listener, **options)


def test_a_stage_is_built_once_and_then_found(pipeline, identity, tmp_path):
    store = ArtifactStore.open(tmp_path / "store")
    events = []
    first = build(stage_that_runs(WRITES), pipeline, identity, store, events.append)
    second = build(stage_that_runs("raise SystemExit('it must not run')"), pipeline, identity, store)
    assert (first.state, second.state) == ("built", "reused")
    assert first.artifact == second.artifact
    assert second.metrics == {"size": 1.0}
    assert {"type": "line", "stage": "toy", "line": "hello"} in events
    assert (store.path(first.artifact) / "made").read_text() == "x"
    assert "hello" in store.byproduct(first.artifact, "build.log").read_text()
    record = store.get_record(first.artifact)
    assert record.commands[0][0] == sys.executable
    assert {"platform", "cpu", "cpus"} <= record.environment.keys()


def test_a_raised_version_builds_anew(pipeline, identity, tmp_path):
    store = ArtifactStore.open(tmp_path / "store")
    build(stage_that_runs(WRITES), pipeline, identity, store)
    assert build(stage_that_runs(WRITES, version=2), pipeline, identity, store).state == "built"


def test_a_job_file_keeps_the_order_that_it_was_given(pipeline, identity, tmp_path):
    store = ArtifactStore.open(tmp_path / "store")
    program = """
import pathlib, sys
output = pathlib.Path(sys.argv[1])
(output / "made").write_text((output.parents[1] / "step.json").read_text())
"""
    artifact = build(stage_that_runs(program), pipeline, identity, store).artifact
    assert list(json.loads((store.path(artifact) / "made").read_text())) == ["b", "a"]


@pytest.mark.parametrize(
    ("report", "error", "text"),
    [
        (
            {"kind": "configuration", "message": "no", "hint": "do", "file": "/r.py", "line": 3},
            ConfigError,
            "/r.py:3: no (do)",
        ),
        ({"kind": "export refused", "message": "static", "hint": "squeeze"}, ExportRefused, "static\nsqueeze"),
        (
            {"kind": "training failed", "message": "loss is nan", "hint": None},
            CommandFailed,
            "the step failed: loss is nan",
        ),
    ],
)
def test_what_a_program_explains_is_raised_as_the_error_it_names(report, error, text, pipeline, identity, tmp_path):
    store = ArtifactStore.open(tmp_path / "store")
    with pytest.raises(error) as raised:
        build(stage_that_runs(fails_with(report)), pipeline, identity, store)
    assert str(raised.value).startswith(text)
    assert store.list() == ()
    assert build(stage_that_runs(WRITES), pipeline, identity, store).state == "built"


def test_a_program_that_just_dies_shows_its_last_lines_and_its_log(pipeline, identity, tmp_path):
    store = ArtifactStore.open(tmp_path / "store")
    with pytest.raises(CommandFailed) as raised:
        build(stage_that_runs("print('on its way'); import os; os.abort()"), pipeline, identity, store)
    assert "SIGABRT" in str(raised.value)
    assert "on its way" in str(raised.value)
    assert raised.value.log.exists()
