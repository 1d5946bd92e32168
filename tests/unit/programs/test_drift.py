"""The recipe's own drift check."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.drift import check
from tasks.errors import ConfigError
from tasks.events import silent
from tasks.home import Home
from tasks.init import init
from tasks.pipeline_file import load
from tasks.programs.drift import report_of
from tasks.programs.failures import ProgramFailed
from tasks.programs.recipe import Recipe

METHOD = """
    def drift(self, reference: Any, recent: Any) -> Any:
        return {"drifted": np.bool_(len(reference) == 2000), "name": len(recent.name)}

    def metric(self)"""


class Own:
    def drift(self, reference, recent):
        """Of the test's own."""


RECIPE = Recipe(name="Own", folder=None, user=Own(), outputs=("y",))


def test_the_recipes_answer_comes_back_with_its_numbers(tmp_path):
    init(tmp_path / "moving")
    recipe = tmp_path / "moving" / "recipe.py"
    recipe.write_text(recipe.read_text().replace("\n    def metric(self)", METHOD, 1))
    recent = tmp_path / "recent.csv"
    recent.touch()
    found = check(load(tmp_path / "moving" / "pipeline.yaml"), recent, home=Home(tmp_path / "home"), listener=silent)
    assert found.drifted is True
    assert found.scores == {"name": 10}


def test_a_recipe_without_the_method_is_told_what_it_is(tmp_path):
    init(tmp_path / "moving")
    with pytest.raises(ConfigError, match=r"has no method drift\(reference, recent\)") as refused:
        check(load(tmp_path / "moving" / "pipeline.yaml"), tmp_path, home=Home(tmp_path / "home"), listener=silent)
    assert refused.value.problems[0].file == tmp_path / "moving" / "recipe.py"


def test_recent_data_that_is_not_there_is_named(tmp_path):
    init(tmp_path / "moving")
    with pytest.raises(ConfigError, match="recent: there is no such file"):
        check(load(tmp_path / "moving" / "pipeline.yaml"), tmp_path / "gone", home=Home(tmp_path), listener=silent)


def test_numpys_numbers_are_numbers():
    assert report_of(RECIPE, {"drifted": np.bool_(False), "mean": np.float32(0.5), "rows": 3}) == {
        "drifted": False,
        "scores": {"mean": 0.5, "rows": 3.0},
    }


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"mean": 1.0}, '"drifted": True or False'),
        (True, '"drifted": True or False'),
        ({"drifted": 1}, '"drifted": True or False'),
        ({"drifted": False, "mean": float("nan")}, "as mean; expected a finite number"),
        ({"drifted": False, "mean": "much"}, "as mean; expected a finite number"),
    ],
)
def test_another_answer_is_refused_at_the_methods_line(answer, told):
    with pytest.raises(ProgramFailed, match=told) as refused:
        report_of(RECIPE, answer)
    assert refused.value.kind == "configuration"
