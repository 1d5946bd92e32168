"""Pipeline files, good and bad: every problem comes out with its file, line and field, and with its mend."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks.config import keyed
from tasks.errors import ConfigError
from tasks.pipeline_file import load

GOOD = """\
name: digits
recipe: recipe.py:Digits
data:
  digits: {version: "1"}
shapes:
  batch: {min: 1, opt: 8, max: 32}
inputs:
  image: {dtype: float32, shape: [batch, 1, 8, 8]}
train: {nproc_per_node: 2, batch_size: 64}
engine: {kind: onnxruntime}
serve:
  max_batch_size: 32
  dynamic_batching: {max_queue_delay_microseconds: 500}
gates:
  parity: {atol: 1e-4}
  metrics:
    accuracy: {min: 0.95}
publish: {repository: ../models}
deploy: {kind: process}
"""

RECIPE = """\
from elsewhere import Imported
class Digits:
    pass
def make():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pipeline.yaml").write_text(GOOD)
    (tmp_path / "recipe.py").write_text(RECIPE)
    return tmp_path


def edited(folder: Path, old: str, new: str) -> Path:
    assert GOOD.count(old) == 1, old
    (folder / "pipeline.yaml").write_text(GOOD.replace(old, new))
    return folder / "pipeline.yaml"


def test_a_good_file_gives_a_typed_pipeline_with_absolute_paths(folder: Path) -> None:
    pipeline = load(folder / "pipeline.yaml")
    assert pipeline.name == pipeline.model == "digits"
    assert pipeline.inputs["image"].shape == ("batch", 1, 8, 8)
    assert pipeline.gates.parity.atol == 1e-4
    assert pipeline.gates.metrics["accuracy"].min == 0.95
    assert pipeline.serve.dynamic_batching is not None
    assert pipeline.serve.dynamic_batching.max_queue_delay_microseconds == 500
    assert pipeline.engine.kind == "onnxruntime"
    assert pipeline.deploy.kind == "process"
    assert pipeline.source == folder / "pipeline.yaml"
    assert pipeline.folder == folder
    assert pipeline.recipe_file == folder / "recipe.py"
    assert pipeline.recipe_attribute == "Digits"
    assert pipeline.repository == folder / "../models"
    assert pipeline.world_size == 2


def test_what_is_left_out_has_a_default(folder: Path) -> None:
    minimal = 'name: a\nrecipe: recipe.py:Digits\ndata: {d: {version: "1"}}\ninputs: {x: {dtype: bool, shape: [3]}}\n'
    (folder / "pipeline.yaml").write_text(minimal)
    pipeline = load(folder / "pipeline.yaml")
    assert (pipeline.engine.kind, pipeline.deploy.kind) == ("onnxruntime", "process")
    assert pipeline.serve.max_batch_size == 0
    assert pipeline.train.seed == 0


def test_a_byte_order_mark_windows_line_ends_and_a_relative_name_are_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "pipeline.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    monkeypatch.chdir(folder)
    assert load(Path("pipeline.yaml")).source == folder / "pipeline.yaml"


def test_a_recipe_may_be_imported_or_assigned_in_its_file(folder: Path) -> None:
    assert load(edited(folder, "recipe.py:Digits", "recipe.py:Imported")).recipe_attribute == "Imported"


def test_an_alias_repeats_what_it_names(folder: Path) -> None:
    file = edited(
        folder, "shapes:\n  batch: {min: 1, opt: 8, max: 32}", "shapes: {batch: &r {min: 1, opt: 8, max: 32}, s: *r}"
    )
    file.write_text(file.read_text().replace("[batch, 1, 8, 8]", "[batch, s]"))
    pipeline = load(file)
    assert pipeline.shapes["s"] == pipeline.shapes["batch"]


# what to replace, by what, line, field, part of the message, part of the hint
BAD = [
    # Names that do not exist, and near ones
    ("batch_size: 64", "batch_sise: 64", 9, "train.batch_sise", "no such field", "did you mean train.batch_size?"),
    ("engine: {", "engin: {", 10, "engin", "no such field", "did you mean engine?"),
    ("atol", "absolute", 15, "gates.parity.absolute", "no such field", "gates.parity has atol, rtol"),
    ("name: digits", "name: digits\nmax_batch_size: 3", 2, "max_batch_size", "no such field", "serve.max_batch_size?"),
    ("dtype: float32", "dtype: float32, shap: 3", 8, "inputs.image.shap", "no such field", "inputs.image.shape?"),
    ("{kind: onnxruntime}", "{kind: onnxruntime, x: 1}", 10, "engine.x", "no such field", "engine has kind"),
    ("{kind: process}", "{kind: process, htp_port: 1}", 19, "deploy.htp_port", "no such field", "deploy.http_port?"),
    ("name: digits", "<<: {name: digits}", 1, "<<", "no such field", None),
    # Required
    ("name: digits\n", "", None, "name", "missing", "The pipeline's name"),
    ("recipe: recipe.py:Digits\n", "", None, "recipe", "missing", "FILE.py:CLASS"),
    ("dtype: float32, ", "", 8, "inputs.image.dtype", "missing", "NumPy name"),
    (", max: 32", "", 6, "shapes.batch.max", "missing", "largest size"),
    ("{kind: onnxruntime}", "{}", 10, "engine.kind", "expected the kind: onnxruntime or tensorrt", None),
    # Types, and the traps of YAML
    ("batch_size: 64", 'batch_size: "64"', 9, "train.batch_size", "whole number, got the text '64'", "without quotes"),
    ("batch_size: 64", "batch_size: 64.0", 9, "train.batch_size", "expected a whole number, got the number 64.0", None),
    ("batch_size: 64", "batch_size: 1_024", 9, "train.batch_size", "whole number", "write 1024, without underscores"),
    ("batch_size: 64", "batch_size: true", 9, "train.batch_size", "expected a whole number, got true", None),
    ("batch_size: 64", "batch_size: ~", 9, "train.batch_size", "whole number, got nothing", "leave the field out"),
    ("batch_size: 64", "batch_size: 064", 9, "train.batch_size", "different numbers to different readers", "write 64"),
    ("batch_size: 64", "batch_size: [64]", 9, "train.batch_size", "expected a whole number, got a list", None),
    ("batch_size: 64", f"batch_size: {'9' * 5000}", 9, "train.batch_size", "not a number that can be read", None),
    ("atol: 1e-4", "atol: small", 15, "gates.parity.atol", "expected a number, got the text 'small'", None),
    ("atol: 1e-4", "atol: .inf", 15, "gates.parity.atol", "expected a finite number", None),
    ("atol: 1e-4", "atol: .nan", 15, "gates.parity.atol", "expected a finite number", None),
    ("name: digits", "name: 7", 1, "name", "expected a text, got the number 7", 'in quotes: "7"'),
    ("name: digits", "name: no way: really", 1, None, "not valid YAML: mapping values are not allowed here", None),
    ('version: "1"', "version: 1.10", 4, "data.digits.version", "expected a text, got the number 1.1", '"1.10"'),
    ("train: {nproc_per_node: 2, batch_size: 64}", "train: 3", 9, "train", "a mapping, got the number 3", None),
    ("train: {nproc_per_node: 2, batch_size: 64}", "train:", 9, "train", "mapping, got nothing", "leave the field out"),
    ("[batch, 1, 8, 8]", "batch", 8, "inputs.image.shape", "expected a list, got the text 'batch'", None),
    ("{kind: onnxruntime}", "onnxruntime", 10, "engine", "expected a mapping, got the text", None),
    ("{kind: process}", "[process]", 19, "deploy", "expected a mapping, got a list", None),
    # Values
    ("float32", "float23", 8, "inputs.image.dtype", "'float32'", "did you mean float32?"),
    ("float32", "torch.float32", 8, "inputs.image.dtype", "got the text 'torch.float32'", "did you mean float32?"),
    ("batch_size: 64", "batch_size: 0", 9, "train.batch_size", "expected at least 1, got the number 0", None),
    ("batch_size: 64", "batch_size: 64, precision: fp16", 9, "train.precision", "expected 'fp32'", None),
    ("batch_size: 64", "batch_size: 64, learning_rate: 0", 9, "train.learning_rate", "expected more than 0", None),
    ("batch_size: 64", "batch_size: 64, seed: 4294967296", 9, "train.seed", "expected less than 4294967296", None),
    ("[batch, 1, 8, 8]", "[batch, 0]", 8, "inputs.image.shape.1", "at least 1, got 0", None),
    ("[batch, 1, 8, 8]", "[batch, -1]", 8, "inputs.image.shape.1", "the name of an axis of shapes", None),
    ("[batch, 1, 8, 8]", "[batch, yes]", 8, "inputs.image.shape.1", "the axis yes is not declared in shapes", None),
    ("[batch, 1, 8, 8]", "[]", 8, "inputs.image.shape", "at least one entry", None),
    ("max: 32", "max: 4", 6, "shapes.batch", "expected min <= opt <= max, got min 1, opt 8, max 4", None),
    ("  image: {", "  pixel image: {", 8, "inputs.pixel image", "expected a Python identifier", None),
    ("  image: {", "  class: {", 8, "inputs.class", "expected a Python identifier", None),
    ("name: digits", "name: ../up", 1, "name", "expected up to 100 letters, digits", None),
    ("name: digits", "name: digits\nmodel: a/b", 2, "model", "expected up to 100 letters, digits", None),
    ("name: digits", "name: digits\nmodel: .hidden", 2, "model", "the first a letter or digit", None),
    ("{min: 0.95}", "{}", 17, "gates.metrics.accuracy", "expected min, max, min_improvement or max_loss", None),
    ("{min: 0.95}", "{min: 2, max: 1}", 17, "gates.metrics.accuracy", "min 2 and max 1: nothing passes", None),
    ("    accuracy:", "    top.1:", 17, "gates.metrics.top.1", "without '.'", None),
    ("../models", "~/models", 18, "publish.repository", "'~' and variables are not expanded", None),
    ("../models", "s3://models", 18, "publish.repository", "expected a folder, got 's3://models'", None),
    ("../models", "$HOME/models", 18, "publish.repository", "'~' and variables are not expanded", None),
    ("{kind: onnxruntime}", "{kind: onnxruntim}", 10, "engine.kind", "onnxruntime or tensorrt", "mean onnxruntime?"),
    ("{kind: process}", "{kind: kubernetes}", 19, "deploy.kind", "there is no kind 'kubernetes'", None),
    ("{kind: onnxruntime}", "{kind: tensorrt, precision: fp12}", 10, "engine.precision", "'fp16'", "mean fp32?"),
    # Exactly one of
    ('{version: "1"}', "{}", 4, "data.digits", "exactly one of distribution, path and version, got none", None),
    ('{version: "1"}', "{version: a, path: b}", 4, "data.digits", "got path and version", None),
    ('\n  digits: {version: "1"}', " {}", 3, "data", "at least one entry", None),
    # Fields that contradict each other
    ("batch_size: 64", "batch_size: 65", 9, "train.batch_size", "2 processes of train.nproc_per_node", None),
    ("max_batch_size: 32", "max_batch_size: 64", 12, "serve.max_batch_size", "more than shapes.batch.max, 32", None),
    ("max_batch_size: 32", "max_batch_size: 0", 13, "serve.dynamic_batching", "serve.max_batch_size is 0", None),
    ("min: 1,", "min: 4,", 6, "shapes.batch.min", "that serve.max_batch_size, 32, lets Triton send", None),
    ("[batch, 1, 8, 8]", "[8, batch]", 8, "inputs.image.shape.1", "must be the first axis of inputs.image.shape", None),
    ("[batch, 1, 8, 8]", "[batch, batch]", 8, "inputs.image.shape.1", "must be the first axis", None),
    ("[batch, 1, 8, 8]", "[batch, length]", 8, "inputs.image.shape.1", "not declared in shapes", None),
    ("max: 32}", "max: 32}\n  length: {min: 1, opt: 2, max: 3}", 7, "shapes.length", "no shape of inputs uses", None),
    ("[batch, 1, 8, 8]", "[1, 8, 8]", 8, "inputs.image.shape", "serve.max_batch_size, 32, lets Triton batch", None),
    ("microseconds: 500", "microseconds: 500, preferred_batch_size: [33]", 13,
     "serve.dynamic_batching.preferred_batch_size.0", "33 is more than serve.max_batch_size, 32", None),
    # The YAML itself
    ("publish: {repository: ../models}", "name: again", 18, "name", "given twice, first in line 1", "remove one"),
    ("batch_size: 64", "batch_size: 64, batch_size: 32", 9, "train.batch_size", "given twice, first in line 9", None),
    ("{kind: process}", "{kind: process", 20, None, "not valid YAML", None),
    ("  parity: {atol", "\tparity: {atol", 15, None, "not valid YAML", "indent with spaces"),
    ("{kind: process}", "!!python/object:os.system ls", 19, "deploy", "is not read here", None),
    ("{kind: process}", "!custom {kind: process}", 19, "deploy", "the YAML tag !custom is not read here", None),
    ("{kind: process}", "*nothing", 19, None, "undefined alias", None),
    ("data:\n", "data: &a\n  more: *a\n", 3, "data.more", "an alias (*) to something that contains it", None),
    ("{kind: process}", "{kind: process}\n---\nname: b", 20, None, "found another document", None),
    ("{kind: process}", "{[a]: b}", 19, "deploy", "expected a text as the key", None),
    # The recipe
    ("recipe.py:Digits", "recipe.py", 2, "recipe", "expected FILE.py:CLASS such as recipe.py:Digits", None),
    ("recipe.py:Digits", "recipe:Digits", 2, "recipe", "expected FILE.py:CLASS", None),
    ("recipe.py:Digits", "recpie.py:Digits", 2, "recipe", "the recipe's file is not there", "did you mean recipe.py?"),
    ("recipe.py:Digits", "no/recipe.py:Digits", 2, "recipe", "is not there", "/no is not there either"),
    ("recipe.py:Digits", "recipe.py:Digit", 2, "recipe", "there is no class Digit", "did you mean Digits?"),
    ("recipe.py:Digits", "recipe.py:make", 2, "recipe", "recipe.py:4: make is a function", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "message", "hint"), BAD, ids=[f"{b[3]}-{b[1][:30]!r}" for b in BAD]
)
def test_bad_input_is_named_with_line_field_and_mend(
    folder: Path, old: str, new: str, line: int | None, field: str | None, message: str, hint: str | None
) -> None:
    file = edited(folder, old, new)
    with pytest.raises(ConfigError) as caught:
        load(file)
    found = [p for p in caught.value.problems if p.field == field and message in p.message]
    assert len(found) == 1, str(caught.value)
    assert found[0].file == file
    assert found[0].line == line
    assert hint is None or hint in (found[0].hint or ""), str(found[0])
    assert "pydantic" not in str(caught.value)


def test_one_mistake_is_one_problem(folder: Path) -> None:
    """But for a misspelt required field, which is also missing, and for what follows from it."""
    for old, new, _, field, _, _ in BAD:
        with pytest.raises(ConfigError) as caught:
            load(edited(folder, old, new))
        fields = [p.field for p in caught.value.problems]
        assert len(fields) == len(set(fields)), str(caught.value)
        if field in ("train.batch_size", "serve.max_batch_size", "gates.parity.atol", "publish.repository"):
            assert fields == [field], str(caught.value)


def test_all_problems_are_told_in_the_order_of_lines(folder: Path) -> None:
    (folder / "pipeline.yaml").write_text(
        GOOD.replace("name: digits", "name: a b")
        .replace("recipe.py:Digits", "recipe.py:Nope")
        .replace("batch_size: 64", "batch_size: many")
        .replace("kind: process", "kind: process, http_port: 70000")
    )
    with pytest.raises(ConfigError) as caught:
        load(folder / "pipeline.yaml")
    assert [(p.line, p.field) for p in caught.value.problems] == [
        (1, "name"),
        (2, "recipe"),
        (9, "train.batch_size"),
        (19, "deploy.http_port"),
    ]
    assert str(caught.value).splitlines()[2] == (
        f"{folder}/pipeline.yaml:9: train.batch_size: expected a whole number, got the text 'many'"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"just text", "expected fields such as `name: digits`, got the text 'just text'"),
        (b"- a\n- b\n", "got a list"),
        (b"name: caf\xe9\n", "is not UTF-8 text"),
        (b"a: \x00", "not valid YAML"),
        (b"[" * 20000, "too large or too deeply nested"),
        (b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
            b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n" % (n, n, *([n - 1] * 8)) for n in range(98, 110)
        ), "too large or too deeply nested"),
    ],
)  # fmt: skip
def test_what_is_no_pipeline_file_at_all_is_said_in_one_line(folder: Path, content: bytes, message: str) -> None:
    (folder / "pipeline.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(folder / "pipeline.yaml")
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file_names_the_nearest(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not there \(did you mean pipeline.yaml\?\)"):
        load(folder / "pipelin.yaml")
    with pytest.raises(ConfigError, match=r"is a folder, expected a pipeline file \(did you mean pipeline.yaml\?\)"):
        load(folder)
    with pytest.raises(ConfigError, match="enginehouse init"):
        load(folder / "nowhere" / "pipeline.yaml")


def test_a_missing_file_is_not_taken_for_the_deployments(folder: Path) -> None:
    (folder / "prefect.yaml").write_text("")
    (folder / "pipeline.yaml").unlink()
    with pytest.raises(ConfigError, match=r"is not there \(enginehouse init makes a new one\)"):
        load(folder / "pipeline.yaml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_said_to_be_so(folder: Path) -> None:
    (folder / "pipeline.yaml").chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load(folder / "pipeline.yaml")


def test_a_recipe_that_is_no_python_is_shown_with_its_own_line(folder: Path) -> None:
    (folder / "recipe.py").write_text("class Digits:\n    def broken(:\n")
    with pytest.raises(ConfigError, match=r"pipeline.yaml:2: recipe: .*recipe.py:2: not valid Python: invalid syntax"):
        load(folder / "pipeline.yaml")


# --set


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("train.seed=7", lambda p: p.train.seed == 7),
        ("train.learning_rate=1e-5", lambda p: p.train.learning_rate == 1e-5),
        ("train.max_epochs = 3", lambda p: p.train.max_epochs == 3),
        ("model=other", lambda p: p.model == "other"),
        ("export.opset_version=18", lambda p: p.export.opset_version == 18),
        ("serve.dynamic_batching=null", lambda p: p.serve.dynamic_batching is None),
        ("serve.dynamic_batching.preferred_batch_size=[4]", lambda p: '(4,)' in repr(p.serve)),
        ("serve.instance_group=[{count: 2}]", lambda p: p.serve.instance_group[0].count == 2),
        ("inputs.image.shape.1=3", lambda p: p.inputs["image"].shape == ("batch", 3, 8, 8)),
        ("gates.metrics.loss.max=0.5", lambda p: set(p.gates.metrics) == {"accuracy", "loss"}),
        ("data.digits.version='2'", lambda p: p.data["digits"].version == "2"),
        ("publish.repository=a=b", lambda p: p.publish.repository == "a=b"),
        ("engine.kind=tensorrt", lambda p: p.engine.kind == "tensorrt"),
    ],
)  # fmt: skip
def test_set_puts_a_value_in_the_place_of_the_files(folder: Path, override: str, read) -> None:
    assert read(load(folder / "pipeline.yaml", [override]))


def test_set_mends_what_is_wrong_in_the_file(folder: Path) -> None:
    file = edited(folder, "batch_size: 64", "batch_size: 064")
    assert load(file, ["train.batch_size=64"]).train.batch_size == 64


def test_setting_another_kind_drops_the_old_kinds_fields_in_whatever_order(folder: Path) -> None:
    file = edited(folder, "{kind: onnxruntime}", "{kind: tensorrt, precision: fp16}")
    assert keyed(load(file, ["engine.kind=onnxruntime"]).engine) == {"kind": "onnxruntime", "gpu": None}
    swapped = load(folder / "pipeline.yaml", ["engine.precision=fp16", "engine.kind=tensorrt"])
    assert keyed(swapped.engine) == keyed(load(file).engine)
    assert keyed(load(file, ["engine.kind=tensorrt"]).engine) == keyed(load(file).engine)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed", "--set train.seed: expected field.sub=value"),
        ("=3", "expected field.sub=value"),
        ("train..seed=3", "expected field.sub=value"),
        ("train.sead=3", r"train.sead: there is no such field; given by --set \(did you mean train.seed\?\)"),
        ("tran.seed=3", r"tran: there is no such field; given by --set \(did you mean train\?\)"),
        ("train.seed=abc", "train.seed: expected a whole number, got the text 'abc'; given by --set"),
        ("train.seed=", "expected a whole number, got nothing; given by --set"),
        ("train.seed=[1", "--set train.seed=.*: not valid YAML"),
        ("train.seed.deep=3", "train.seed: expected a whole number, got a mapping; given by --set"),
        ("name.deep=3", "--set name.deep: name is the text 'digits', which has no fields"),
        ("inputs.image.shape.9=3", "inputs.image.shape is a list of 4, expected an index from 0"),
        (
            "serve.max_batch_size=64",
            "serve.max_batch_size: 64 is more than shapes.batch.max, 32: expected at most 32; given by --set",
        ),
        ("engine.kind=tensort", "there is no kind 'tensort'.*; given by --set .did you mean tensorrt"),
        ("recipe=recipe.py:Digit", "recipe: .*there is no class Digit"),
    ],
)
def test_a_bad_set_is_told_without_a_line_of_the_file(folder: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(folder / "pipeline.yaml", [override])
    assert all(p.line is None for p in caught.value.problems)


def test_a_contradiction_between_set_and_file_points_at_the_file_where_the_mend_is(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder / "pipeline.yaml", ["train.nproc_per_node=3"])
    (problem,) = caught.value.problems
    assert (problem.line, problem.field) == (9, "train.batch_size")
