"""The typed pipeline: strict, frozen, split into what is keyed and what is placement, open for new kinds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tasks import config
from tasks.artifacts.digest import canonical_json
from tasks.config import ENGINES, AxisRange, Gates, Input, Pipeline, Role, Serve, Settings, Train, keyed, kinds, role
from tasks.config.kinds import UnknownKindError, load_kind
from tasks.config.reference import field_docs, inner_group, reference
from tasks.errors import ConfigError
from tasks.pipeline_file import load

REPOSITORY = Path(__file__).parents[2]


def pipeline(**changes: Any) -> Pipeline:
    fields = {
        "name": "digits",
        "recipe": "recipe.py:Digits",
        "data": {"digits": {"version": "1"}},
        "shapes": {"batch": {"min": 1, "opt": 8, "max": 32}},
        "inputs": {"image": {"dtype": "float32", "shape": ["batch", 1, 8, 8]}},
    }
    return Pipeline.model_validate({**fields, **changes}, context={"source": Path("/somewhere/pipeline.yaml")})


def groups(group: type[Settings] = Pipeline) -> list[type[Settings]]:
    inner = [inner_group(info.annotation) for info in group.model_fields.values()]
    return [group, *(g for i in inner if i is not None for g in groups(i))]


def all_groups() -> list[type[Settings]]:
    installed = [load_kind(entry, kind).Config for entry in (ENGINES, config.DEPLOY_TARGETS) for kind in kinds(entry)]
    return [*groups(), *installed]


def test_every_field_has_a_docstring() -> None:
    missing = [f"{g.__name__}.{f}" for g in all_groups() for f in g.model_fields if not field_docs(g).get(f)]
    assert missing == []


def test_every_field_that_holds_no_group_is_marked_keyed_or_placement() -> None:
    unmarked = [
        f"{g.__name__}.{f}"
        for g in groups()
        for f, info in g.model_fields.items()
        if inner_group(info.annotation) is None and role(g, f) is None
    ]
    assert unmarked == []


def test_the_reference_in_docs_is_up_to_date() -> None:
    page = REPOSITORY / "docs" / "pipeline-file.md"
    assert page.read_text() == reference(), f"write it with: python -m tasks.config.reference {page}"


def test_the_references_example_is_a_pipeline(tmp_path: Path) -> None:
    example = reference().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "pipeline.yaml").write_text(example)
    (tmp_path / "recipe.py").write_text("class Digits: pass\n")
    assert load(tmp_path / "pipeline.yaml").name == "digits"


def test_placement_is_no_part_of_the_key() -> None:
    assert keyed(Train()) == keyed(Train(timeout_minutes=1.0))
    assert "timeout_minutes" not in keyed(Train())
    assert keyed(pipeline(publish={"repository": "a"}).publish) == {}
    local = pipeline(deploy={"kind": "process", "http_port": 8000, "ready_timeout_seconds": 5})
    assert keyed(local.deploy) == {"kind": "process"}


@pytest.mark.parametrize(
    "change",
    [
        {"nproc_per_node": 2},
        {"max_epochs": 2},
        {"batch_size": 2},
        {"learning_rate": 0.5},
        {"seed": 1},
        {"num_threads": 2},
    ],
)
def test_what_changes_the_weights_is_part_of_the_key(change: dict[str, Any]) -> None:
    assert keyed(Train(**change)) != keyed(Train())


def test_defaults_and_whole_numbers_give_the_same_key_as_when_written_out() -> None:
    written = pipeline(train={"max_epochs": 10, "seed": 0}, gates={"parity": {"atol": 0.0001}})
    assert keyed(written) == keyed(pipeline())
    one, also_one = (pipeline(gates={"metrics": {"loss": {"max": value}}}) for value in (1, 1.0))
    assert canonical_json(keyed(one)) == canonical_json(keyed(also_one))


def test_keyed_gives_json_of_nested_groups_mappings_and_lists() -> None:
    serve = Serve.model_validate({"max_batch_size": 8, "instance_group": [{"count": 2}], "dynamic_batching": {}})
    assert keyed(serve) == {
        "max_batch_size": 8,
        "dynamic_batching": {"max_queue_delay_microseconds": 0, "preferred_batch_size": []},
        "instance_group": [{"count": 2, "kind": "KIND_AUTO"}],
    }
    assert config.as_json(pipeline().inputs) == {"image": {"dtype": "float32", "shape": ["batch", 1, 8, 8]}}
    canonical_json(keyed(pipeline()))


def test_a_pipeline_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        pipeline().train.seed = 3  # type: ignore[misc]


def test_python_values_work_as_well_as_mappings() -> None:
    built = pipeline(
        train=Train(seed=3),
        shapes={"batch": AxisRange(min=1, opt=1, max=4)},
        inputs={"x": Input(dtype="int64", shape=("batch", 3))},
        engine=load_kind(ENGINES, "onnxruntime").Config(kind="onnxruntime"),
        gates=Gates(),
    )
    assert built.train.seed == 3
    assert built.engine.kind == "onnxruntime"


def test_a_model_may_have_a_name_of_its_own() -> None:
    assert pipeline().model == "digits"
    assert pipeline(model="digits_v2").model == "digits_v2"


def test_an_error_outside_a_file_still_names_the_field() -> None:
    with pytest.raises(ValidationError, match=r"precision.*fp12|fp12.*precision") as caught:
        pipeline(engine={"kind": "tensorrt", "precision": "fp12"})
    assert caught.value.errors()[0]["loc"] == ("engine",)


def test_sequence_axes_may_repeat_and_inputs_without_batch_are_fine_when_triton_does_not_batch() -> None:
    built = pipeline(
        shapes={"length": {"min": 1, "opt": 8, "max": 32}},
        inputs={"mask": {"dtype": "bool", "shape": ["length", "length"]}, "state": {"dtype": "float16", "shape": [4]}},
    )
    assert built.serve.max_batch_size == 0


# A new kind is a new module and an entry point, and nothing else


@pytest.fixture
def another_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    info = tmp_path / "another_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[enginehouse.engines]\nanother = another_engine:Engine\nbroken = another_engine_gone:Engine\n"
    )
    (tmp_path / "another_engine.py").write_text(
        "from typing import Literal\n"
        "from tasks.config import EngineConfig, Keyed, Placement\n"
        "class Config(EngineConfig):\n"
        "    kind: Literal['another']\n"
        "    level: Keyed[int] = 3\n"
        "    cache: Placement[str] = '.'\n"
        "class Engine:\n"
        "    Config = Config\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("another_engine", None)


def test_a_kind_of_another_distribution_is_found_checked_and_explained(another_distribution: Path) -> None:
    folder = another_distribution
    assert "another" in kinds(ENGINES)
    built = pipeline(engine={"kind": "another", "level": 5})
    assert keyed(built.engine) == {"kind": "another", "level": 5}
    (folder / "recipe.py").write_text("class Digits: pass\n")
    (folder / "pipeline.yaml").write_text(
        "name: digits\nrecipe: recipe.py:Digits\ndata: {d: {version: a}}\n"
        "inputs: {x: {dtype: bool, shape: [3]}}\nengine:\n  kind: another\n  levl: 5\n"
    )
    with pytest.raises(
        ConfigError, match=r"yaml:7: engine.levl: there is no such field \(did you mean engine.level\?\)"
    ):
        load(folder / "pipeline.yaml")


def test_a_kind_that_cannot_be_imported_says_why(another_distribution: Path) -> None:
    with pytest.raises(
        UnknownKindError, match=r"'broken' .* cannot be imported: No module named 'another_engine_gone'"
    ):
        load_kind(ENGINES, "broken")


def test_the_public_names_are_there_and_told_apart_from_roles() -> None:
    assert all(hasattr(config, name) for name in config.__all__)
    assert role(Train, "seed") is Role.KEYED
    assert role(Train, "timeout_minutes") is Role.PLACEMENT
    assert role(Pipeline, "train") is None
