"""The digest of a recipe's code: what counts, for which part, and what does not."""

from __future__ import annotations

import importlib.machinery
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.artifacts.code import RecipeCode, recipe_code
from tasks.artifacts.code.distributions import Installed
from tasks.artifacts.digest import canonical_json
from tasks.errors import ConfigError

RECIPE = '''\
"""A recipe."""
import numpy as np
import torch
from torch import nn
from dataclasses import dataclass

from helpers.net import Net
from helpers.scores import top_k
import shared

CLASSES = 10
K = 5
register = print(CLASSES)


def normalise(x):
    """Both use it."""
    return x / 255


@dataclass
class Accuracy:
    """Counts."""
    k: int = K

    def update(self, outputs, targets):
        self.value = top_k(outputs, targets, self.k) + shared.OFFSET

    def result(self):
        return {"accuracy": _rounded(np.mean(self.value))}


def _rounded(value):
    return round(value, 3)


class Images:
    def __getitem__(self, index):
        from helpers.files import read
        return normalise(read(index)), shared.OFFSET


class Digits:
    outputs = ("logits",)
    smoothing = 0.1

    def model(self):
        return Net(CLASSES)

    def train_data(self):
        return Images()

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=self.smoothing)

    def metric(self):
        return Accuracy()
'''

FILES = {
    "recipe.py": RECIPE,
    "shared.py": "OFFSET = 0\n",
    "helpers/__init__.py": "",
    "helpers/net.py": "from torch import nn\nfrom . import layers\nclass Net(nn.Module):\n    pass\n",
    "helpers/layers.py": "WIDTH = 3\n",
    "helpers/scores.py": "from .sorting import order\ndef top_k(a, b, k):\n    return order(a)\n",
    "helpers/sorting.py": "def order(a):\n    return sorted(a)\n",
    "helpers/files.py": "def read(index):\n    return index\n",
    "unrelated.py": "raise SystemExit('imported')\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "recipe.py"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write(tmp_path, FILES)


def changed(before: RecipeCode, after: RecipeCode) -> str:
    parts = {"train": before.train != after.train, "metric": before.metric != after.metric}
    return "+".join(name for name, differs in parts.items() if differs)


def test_the_closure_is_the_files_that_the_recipe_reaches(recipe: Path) -> None:
    code = recipe_code(recipe, "Digits")
    assert set(code.train) == {
        "recipe.py", "shared.py", "helpers/__init__.py", "helpers/net.py", "helpers/layers.py", "helpers/files.py",
        "distributions",
    }  # fmt: skip
    assert set(code.metric) == {
        "recipe.py", "shared.py", "helpers/__init__.py", "helpers/scores.py", "helpers/sorting.py", "distributions",
    }  # fmt: skip
    assert list(code.train["distributions"]) == ["torch"]
    assert list(code.metric["distributions"]) == ["numpy"]
    assert code.notes == ()
    assert json.loads(canonical_json(code.train)) == code.train


def test_nothing_of_the_users_is_imported(recipe: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tasks.artifacts.code import recipe_code;"
        f"recipe_code(Path({str(recipe)!r}), 'Digits');"
        "bad = {'torch', 'numpy', 'recipe', 'shared', 'helpers', 'unrelated'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        # What does not count
        ("recipe.py", "    return x / 255", "    # a comment\n    return (x /\n            255)", ""),
        ("recipe.py", '"""Both use it."""', '"""Other words."""', ""),
        ("recipe.py", '"""A recipe."""\n', "", ""),
        ("recipe.py", '    """Counts."""\n', "", ""),
        ("recipe.py", '("logits",)', "('logits', )", ""),
        ("recipe.py", "import torch\n", "import torch\n\n\n\n", ""),
        ("recipe.py", "K = 5", 'K = 5\nif __name__ == "__main__":\n    print(Accuracy())', ""),
        ("recipe.py", "K = 5", "K = 5\nif TYPE_CHECKING:\n    import unrelated", ""),
        ("unrelated.py", "imported", "changed", ""),
        ("helpers/layers.py", "WIDTH = 3", "WIDTH = 3  # wide", ""),
        # The metric alone
        ("recipe.py", "return Accuracy()", "return Accuracy(k=3)", "metric"),
        ("recipe.py", "+ shared.OFFSET", "- shared.OFFSET", "metric"),
        ("recipe.py", "round(value, 3)", "round(value, 4)", "metric"),
        ("recipe.py", "K = 5", "K = 6", "metric"),
        ("recipe.py", "np.mean(self.value)", "np.median(self.value)", "metric"),
        ("helpers/scores.py", "order(a)", "order(b)", "metric"),
        ("helpers/sorting.py", "sorted(a)", "list(a)", "metric"),
        # The training alone
        ("recipe.py", "smoothing = 0.1", "smoothing = 0.2", "train"),
        ("recipe.py", "Net(CLASSES)", "Net(CLASSES + 1)", "train"),
        ("recipe.py", '("logits",)', '("scores",)', "train"),
        ("recipe.py", "x / 255", "x / 256", "train"),
        ("recipe.py", "x / 255", "x / 255.0", "train"),
        ("recipe.py", "return Images()", "return Images() if True else None", "train"),
        ("recipe.py", "class Images:", "def unused():\n    pass\n\n\nclass Images:", "train"),
        ("recipe.py", "    def metric", "    def optimizer(self, m): pass\n\n    def metric", "train"),
        ("recipe.py", "import torch\n", "import torch\nimport sklearn\n", "train"),
        ("helpers/net.py", "pass", "x = 1", "train"),
        ("helpers/layers.py", "WIDTH = 3", "WIDTH = 4", "train"),
        ("helpers/files.py", "return index", "return -index", "train"),
        # Both
        ("shared.py", "OFFSET = 0", "OFFSET = 1", "train+metric"),
        ("helpers/__init__.py", "", "VERSION = 2", "train+metric"),
        ("recipe.py", "CLASSES = 10", "CLASSES = 11", "train+metric"),
        ("recipe.py", "register = print(CLASSES)", "register = print(CLASSES, 1)", "train+metric"),
        ("recipe.py", "K = 5", "K = 5\ntorch.manual_seed(1)", "train+metric"),
        ("recipe.py", "class Digits:", "class Digits(Images):", "train+metric"),
    ],
)  # fmt: skip
def test_an_edit_changes_the_part_that_it_belongs_to(
    recipe: Path, file: str, old: str, new: str, expected: str
) -> None:
    before = recipe_code(recipe, "Digits")
    path = recipe.parent / file
    path.write_text(path.read_text().replace(old, new, 1) if old else new)
    assert changed(before, recipe_code(recipe, "Digits")) == expected


SHORT = """\
class Accuracy:
    value = 1
{top}
class Digits:
{members}
    def model(self):
        return {model}
    def metric(self):
        return {metric}
"""


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        # A member that the metric takes by self is the metric's too; self as a whole may be used for anything.
        ({"metric": "Accuracy(self.scale())", "members": "    def scale(self): return 1"}, "metric"),
        ({"metric": "Accuracy(self)"}, "train+metric"),
        ({"metric": "Accuracy(self.set_elsewhere)"}, "train+metric"),
        ({"metric": "super().metric()"}, "train+metric"),
        # Whoever calls the metric in training trains with it
        ({"model": "self.metric()"}, "train+metric"),
        ({"model": "Digits.metric"}, "train+metric"),
        ({"model": "make(Digits)"}, "train+metric"),
        ({"model": "Accuracy"}, "train+metric"),
        ({"model": "make(Accuracy.value)"}, "train+metric"),
        ({"model": "[Accuracy for _ in '']"}, "train+metric"),
        # A name of the same spelling that is local is another
        ({"model": "(lambda Accuracy: Accuracy)"}, "metric"),
        ({"model": "[Accuracy for Accuracy in '']"}, "metric"),
        # In doubt both
        ({"top": "def look_up(): return globals()"}, "train+metric"),
        ({"top": "eval('1')"}, "train+metric"),
        ({"top": "from math import *"}, "train+metric"),
        ({"top": "ALL = [Accuracy()]"}, "train+metric"),
        ({"top": "try:\n    ALL = Accuracy\nexcept NameError:\n    pass"}, "train+metric"),
        ({"top": "def unused(): return Accuracy"}, "train+metric"),
        ({"top": "ALIAS = Accuracy", "metric": "ALIAS()"}, "metric"),
        ({"top": "model = 3"}, "metric"),
    ],
)
def test_whether_the_metric_can_be_told_apart(tmp_path: Path, variant: dict[str, str], expected: str) -> None:
    text = SHORT.format(**{"top": "", "members": "", "model": "None", "metric": "Accuracy()", **variant})
    recipe = write(tmp_path, {"recipe.py": text})
    before = recipe_code(recipe, "Digits")
    recipe.write_text(text.replace("    value = 1\n", "    value = 2\n"))
    assert changed(before, recipe_code(recipe, "Digits")) == expected


def test_what_the_metric_takes_from_the_class_by_its_name_is_the_metrics_too(tmp_path: Path) -> None:
    text = SHORT.format(top="", members="    k = 1", model="None", metric="Accuracy(Digits.k)")
    recipe = write(tmp_path, {"recipe.py": text})
    before = recipe_code(recipe, "Digits")
    recipe.write_text(text.replace("k = 1", "k = 2"))
    assert changed(before, recipe_code(recipe, "Digits")) == "train+metric"


def test_a_decorator_that_may_register_the_metrics_class_makes_it_part_of_both(tmp_path: Path) -> None:
    text = SHORT.format(top="", members="", model="None", metric="Accuracy()")
    recipe = write(tmp_path, {"recipe.py": "from registry import register\n@register\n" + text, "registry.py": ""})
    before = recipe_code(recipe, "Digits")
    recipe.write_text(recipe.read_text().replace("value = 1", "value = 2"))
    assert changed(before, recipe_code(recipe, "Digits")) == "train+metric"


@pytest.mark.parametrize("body", ["class Digits(Base):\n    pass\n", "Digits = Base\n", "Digits = type('D', (), {})\n"])
def test_an_inherited_or_made_metric_belongs_to_both(tmp_path: Path, body: str) -> None:
    files = {"recipe.py": f"from base import Base\n{body}", "base.py": "class Base:\n    def metric(self): return 1\n"}
    recipe = write(tmp_path, files)
    code = recipe_code(recipe, "Digits")
    assert code.train == code.metric
    (tmp_path / "base.py").write_text("class Base:\n    def metric(self): return 2\n")
    assert changed(code, recipe_code(recipe, "Digits")) == "train+metric"


def test_a_metric_given_as_an_attribute_is_the_metric(tmp_path: Path) -> None:
    text = "from scores import Accuracy\nclass Digits:\n    width = 3\n    metric = Accuracy\n"
    recipe = write(tmp_path, {"recipe.py": text, "scores.py": "class Accuracy: pass\n"})
    code = recipe_code(recipe, "Digits")
    assert "scores.py" in code.metric
    assert "scores.py" not in code.train


# Imports


@dataclass(frozen=True)
class Import:
    statement: str
    files: dict[str, str]
    reached: set[str]


IMPORTS = {
    "a module": Import("import a", {"a.py": ""}, {"a.py"}),
    "a submodule brings its packages": Import(
        "import a.b.c", {"a/__init__.py": "", "a/b/__init__.py": "", "a/b/c.py": ""},
        {"a/__init__.py", "a/b/__init__.py", "a/b/c.py"},
    ),
    "from a package a module": Import(
        "from a import b", {"a/__init__.py": "", "a/b.py": "", "a/c.py": ""}, {"a/__init__.py", "a/b.py"}
    ),
    "from a package a name": Import("from a import b", {"a/__init__.py": "b = 1", "a/c.py": ""}, {"a/__init__.py"}),
    "everything of a package": Import(
        "from a import *", {"a/__init__.py": "__all__ = ['b']", "a/b.py": "", "a/c.py": ""}, {"a/__init__.py", "a/b.py"}
    ),
    "a namespace package": Import("import n.m", {"n/m.py": ""}, {"n/m.py"}),
    "relative imports": Import(
        "import a.b",
        {"a/__init__.py": "", "a/b.py": "from .c import x\nfrom . import d", "a/c.py": "", "a/d.py": ""},
        {"a/__init__.py", "a/b.py", "a/c.py", "a/d.py"},
    ),
    "relative imports from an __init__": Import(
        "import a",
        {"a/__init__.py": "from .b import c\nfrom .d.e import f", "a/b.py": "", "a/d/__init__.py": "", "a/d/e.py": ""},
        {"a/__init__.py", "a/b.py", "a/d/__init__.py", "a/d/e.py"},
    ),
    "a cycle": Import("import a", {"a.py": "import b", "b.py": "import a"}, {"a.py", "b.py"}),
    "inside a function": Import("def f():\n    import a", {"a.py": ""}, {"a.py"}),
    "under try": Import("try:\n    import a\nexcept ImportError:\n    a = None", {"a.py": ""}, {"a.py"}),
    "import_module": Import("import importlib\nimportlib.import_module('a.b')", {"a/b.py": ""}, {"a/b.py"}),
    "relative import_module": Import(
        "import a",
        {"a/__init__.py": "from importlib import import_module\nimport_module('.b', __name__)", "a/b.py": ""},
        {"a/__init__.py", "a/b.py"},
    ),
    "__import__": Import("__import__('a')", {"a.py": ""}, {"a.py"}),
    "a package wins over a module": Import("import a", {"a.py": "", "a/__init__.py": ""}, {"a/__init__.py"}),
    "a module wins over a namespace package": Import("import a", {"a.py": "", "a/b.py": ""}, {"a.py"}),
    "a module that hides Python's own": Import("import queue", {"queue.py": ""}, {"queue.py"}),
    "a module that hides an installed one": Import("import torch", {"torch.py": ""}, {"torch.py"}),
    "a folder hides no installed package": Import("import torch", {"torch/weights.bin": ""}, set()),
    "a folder hides nothing of Python's own": Import("import json", {"json/data.json": ""}, set()),
    "for type checkers only": Import("import typing\nif typing.TYPE_CHECKING:\n    import a", {"a.py": ""}, set()),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPORTS.values(), ids=IMPORTS.keys())
def test_imports_are_followed_as_python_finds_them(tmp_path: Path, case: Import) -> None:
    recipe = write(tmp_path, {"recipe.py": f"{case.statement}\nclass Digits: pass\n", **case.files})
    code = recipe_code(recipe, "Digits")
    assert set(code.train) == {"recipe.py", "distributions", *case.reached}


def test_a_module_that_imports_the_recipe_reaches_all_of_it(tmp_path: Path) -> None:
    text = "import a\nclass Digits:\n    x = 1\n    def metric(self): return a\n"
    recipe = write(tmp_path, {"recipe.py": text, "a.py": "import recipe"})
    before = recipe_code(recipe, "Digits")
    recipe.write_text(text.replace("x = 1", "x = 2"))
    assert changed(before, recipe_code(recipe, "Digits")) == "train+metric"


def test_a_compiled_module_counts_by_its_bytes(tmp_path: Path) -> None:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    recipe = write(tmp_path, {"recipe.py": "import fast\nclass Digits: pass\n", f"fast{suffix}": "1"})
    before = recipe_code(recipe, "Digits")
    assert f"fast{suffix}" in before.train
    (tmp_path / f"fast{suffix}").write_text("2")
    assert changed(before, recipe_code(recipe, "Digits")) == "train+metric"


def test_a_library_in_editable_mode_counts_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(write(tmp_path / "lib", {"ours/__init__.py": "", "ours/nets.py": "W = 1\n"}).parent)
    recipe = write(tmp_path / "p", {"recipe.py": "from ours.nets import W\nclass Digits: pass\n"})
    before = recipe_code(recipe, "Digits")
    assert {"ours/__init__.py", "ours/nets.py"} < set(before.train)
    (tmp_path / "lib" / "ours" / "nets.py").write_text("W = 2\n")
    assert changed(before, recipe_code(recipe, "Digits")) == "train+metric"


def test_an_import_whose_name_is_computed_is_noted(tmp_path: Path) -> None:
    files = {
        "recipe.py": "import a\nclass Digits: pass\n",
        "a.py": "import importlib\nimportlib.import_module('x' + y)\n",
    }
    (note,) = recipe_code(write(tmp_path, files), "Digits").notes
    assert note.startswith("a.py:2: an import whose name is computed is not followed")


def test_the_folder_is_no_part_of_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = write(tmp_path / "here", FILES), write(tmp_path / "there", FILES)
    monkeypatch.chdir(tmp_path / "here")
    assert recipe_code(Path("recipe.py"), "Digits") == recipe_code(there, "Digits") == recipe_code(here, "Digits")


def test_a_long_chain_of_operators_is_read(tmp_path: Path) -> None:
    chain = f"X = {'1 + ' * 2500}1\n"
    text = f"import big\n{chain}class Digits:\n    def metric(self): return big\n"
    code = recipe_code(write(tmp_path, {"recipe.py": text, "big.py": chain}), "Digits")
    assert "big.py" in code.train
    assert "big.py" in code.metric


# Distributions


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("import sklearn.datasets", {"scikit-learn"}),
        ("import yaml, numpy as np", {"pyyaml", "numpy"}),
        ("from google.protobuf import text_format", {"protobuf"}),
        ("import typing_extensions", {"typing-extensions"}),
        ("import os, sys, json.decoder, unittest.mock", set()),
    ],
)
def test_imported_names_give_the_distributions_that_carry_them(tmp_path: Path, statement: str, names: set[str]) -> None:
    recipe = write(tmp_path, {"recipe.py": f"{statement}\nclass Digits: pass\n"})
    found = recipe_code(recipe, "Digits").train["distributions"]
    assert set(found) == names
    assert all(found.values())


def fake_distribution(folder: Path, name: str, version: str, *files: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text("".join(f"{file},sha256=x,1\n" for file in files))
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


def test_versions_count_and_so_does_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "site-packages"
    fake_distribution(packages, "Fake_Lib.core", "1.0", "fakelib/__init__.py")
    monkeypatch.syspath_prepend(packages)
    recipe = write(tmp_path / "p", {"recipe.py": "import fakelib\nimport not_there\nclass Digits: pass\n"})
    before = recipe_code(recipe, "Digits")
    assert before.train["distributions"] == {"fake-lib-core": "1.0", "not_there": None}
    (packages / "Fake_Lib.core-1.0.dist-info").rename(packages / "Fake_Lib.core-1.1.dist-info")
    assert changed(before, recipe_code(recipe, "Digits")) == "train+metric"


def test_two_distributions_that_carry_one_module_are_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_distribution(tmp_path, "fakeruntime", "1.0", "fakeruntime/__init__.py")
    fake_distribution(tmp_path, "fakeruntime_gpu", "2.0", "fakeruntime/__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert Installed().owners("fakeruntime.capi") == {"fakeruntime": "1.0", "fakeruntime-gpu": "2.0"}


def test_the_name_below_decides_in_a_namespace_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_distribution(tmp_path, "fakespace_one", "1", "fakespace/one/__init__.py")
    fake_distribution(tmp_path, "fakespace_two", "2", "fakespace/two.py", "single.cpython-311-x86_64-linux-gnu.so")
    monkeypatch.syspath_prepend(tmp_path)
    assert Installed().owners("fakespace.one.deep") == {"fakespace-one": "1"}
    assert Installed().owners("fakespace.two") == {"fakespace-two": "2"}
    assert set(Installed().owners("fakespace")) == {"fakespace-one", "fakespace-two"}
    assert Installed().owners("single") == {"fakespace-two": "2"}
    assert Installed().owners("fake") == {}


# What is wrong with a recipe


@pytest.mark.parametrize(
    ("files", "attribute", "message"),
    [
        ({}, "Digits", r"recipe.py: the recipe's file is not there"),
        ({"recipes.py": ""}, "Digits", r"is not there \(did you mean recipes.py\?\)"),
        ({"recipe.py/x": ""}, "Digits", "is a folder, expected the recipe's Python file"),
        (
            {"recipe.py": "class Digit: pass"},
            "Digits",
            r"no class Digits in the recipe's file \(did you mean Digit\?\)",
        ),
        ({"recipe.py": "class Other: pass"}, "Digits", r"\(it defines Other\)"),
        ({"recipe.py": ""}, "Digits", r"\(it defines no class\)"),
        ({"recipe.py": "\ndef Digits(): pass"}, "Digits", "recipe.py:2: Digits is a function, expected"),
        ({"recipe.py": "x = (\n"}, "Digits", r"recipe.py:1: not valid Python: '\(' was never closed"),
        ({"recipe.py": "x = 1\n  y = 2\n"}, "Digits", "recipe.py:2: not valid Python: unexpected indent"),
        ({"recipe.py": "x = '\0'"}, "Digits", "recipe.py.*not valid Python: .*null byte"),
        ({"recipe.py": "x = " + "(" * 5000}, "Digits", "not valid Python|nested too deeply"),
        ({"recipe.py": "import a\nclass Digits: pass", "a.py": "\nif\n"}, "Digits", "a.py:2: not valid Python"),
    ],
)
def test_a_bad_recipe_is_told_with_file_line_and_mend(
    tmp_path: Path, files: dict[str, str], attribute: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_code(write(tmp_path, files), attribute)
