"""A recipe with something wrong in it is answered with the user's file and line, the mend, and no frame of ours."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.programs import failures
from tasks.programs.recipe_loading import load_recipe

CLASS = """
class User:
    outputs = ("y",)
    def model(self): return Model()
    def train_data(self): return rows(50, 1)
    def validation_data(self): return rows(23, 2)
    def test_data(self): return rows(21, 3)
    def loss(self, outputs, targets): ...
    def metric(self): return Accuracy()
"""
PROGRAMS = Path(failures.__file__).parent


@dataclass(frozen=True)
class Wrong:
    """A change of the good recipe, and what must be said about it."""

    old: str
    new: str
    says: str
    line: str | None
    """The line that is named as the place."""
    hint: str = ""


WRONG = {
    "a syntax error": Wrong(
        "def rows(count, seed):", "def rows(count, seed)", "SyntaxError: expected ':'", "def rows(count, seed)"
    ),
    "a module that is not there": Wrong(
        "import numpy as np",
        "import numpy as np\nimport nowhere_to_be_found",
        "raised ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        "import nowhere_to_be_found",
        "install it into this environment, or put nowhere_to_be_found.py beside",
    ),
    "code that fails at import": Wrong(
        "import numpy as np", "import numpy as np\nnp.zeros(1 // 0)", "raised ZeroDivisionError", "np.zeros(1 // 0)"
    ),
    "code that exits at import": Wrong(
        "import numpy as np", "import numpy as np\nraise SystemExit(3)", "raised SystemExit: 3", "raise SystemExit(3)"
    ),
    "another name of the class": Wrong(
        "class User:", "class Usr:", 'has no class "User"; it has', None, 'did you mean "Usr"?'
    ),
    "a constructor that raises": Wrong(
        '    outputs = ("y",)',
        '    outputs = ("y",)\n\n    def __init__(self):\n        self.path = {}["data"]',
        "User() raised KeyError: 'data'",
        'self.path = {}["data"]',
    ),
    "a constructor with arguments": Wrong(
        '    outputs = ("y",)',
        '    outputs = ("y",)\n\n    def __init__(self, size):\n        self.size = size',
        "User() raised TypeError",
        None,
        "made without arguments",
    ),
    "a method under another name": Wrong(
        "def train_data(self)",
        "def training_data(self)",
        'has no method train_data() (did you mean "training_data"?)',
        "class User:",
    ),
    "a method with too few arguments": Wrong(
        "def loss(self, outputs, targets)",
        "def loss(self, outputs)",
        "has loss(outputs); expected loss(outputs, targets)",
        "class User:",
    ),
    "outputs as one string": Wrong(
        'outputs = ("y",)', 'outputs = "y"', "has 'y' as outputs; expected a tuple", "class User:"
    ),
    "a model that is none": Wrong("return Model()", "return Model", "model() gave a type", "def model(self):"),
    "a model whose constructor fails": Wrong(
        "self.linear = nn.Linear(4, 3)",
        "self.linear = nn.Linear(4, -3)",
        "User.model() raised RuntimeError",
        "self.linear = nn.Linear(4, -3)",
    ),
    "another name in forward": Wrong(
        "def forward(self, x):\n    ",
        "def forward(self, xs):\n        x = xs\n    ",
        'Model.forward has no parameter "x", which the pipeline file names as input; it takes "xs"',
        "def forward(self, xs):",
    ),
    "a parameter that no input fills": Wrong(
        "def forward(self, x):",
        "def forward(self, x, mask):",
        'Model.forward needs "mask"',
        "def forward(self, x, mask):",
    ),
    "data that raises": Wrong(
        "return rows(50, 1)",
        "return rows(50, seed=[1, -1])",
        "User.train_data() raised ValueError",
        "made = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)",
    ),
    "data that is an iterator": Wrong(
        "return rows(50, 1)",
        "return iter(rows(50, 1))",
        "gave a list_iterator; expected a map-style dataset",
        "def train_data(self):",
    ),
    "data without an item": Wrong(
        "return rows(50, 1)", "return []", "train_data() holds no item", "def train_data(self):"
    ),
    "items without a target": Wrong(
        "return rows(50, 1)",
        "return [r[0] for r in rows(50, 1)]",
        "()[0] is a dict; expected a pair of (inputs, target)",
        "def train_data(self):",
    ),
    "inputs as an array": Wrong(
        "return rows(50, 1)",
        'return [(r[0]["x"], r[1]) for r in rows(50, 1)]',
        "an array of shape [4] as its inputs; expected a dict by input name",
        "def train_data(self):",
        'such as {"x": …}',
    ),
    "inputs of another name": Wrong(
        '({"x": row}',
        '({"xs": row}',
        'has the inputs "xs"; the pipeline file names "x"',
        "def train_data(self):",
        'did you mean "x"?',
    ),
    "inputs of another dtype": Wrong(
        ".astype(np.float32)",
        "",
        'input "x" as float64; the pipeline file declares float32',
        "def train_data(self):",
        "give it as np.float32",
    ),
    "inputs of another size": Wrong(
        "size=(count, 4)",
        "size=(count, 5)",
        "in the shape [3, 5]; the pipeline file declares [batch, 4]",
        "def train_data(self):",
    ),
    "items of different shapes": Wrong(
        "for row in made",
        "for row in [made[0][:1], *made]",
        "raised RuntimeError: stack expects each tensor to be equal size",
        None,
        "collate(self, items)",
    ),
    "a layer that does not fit the data": Wrong(
        "nn.Linear(4, 3)", "nn.Linear(5, 3)", "User's model raised RuntimeError", "return self.linear(x)"
    ),
    "forward that gives two values": Wrong(
        "return self.linear(x)",
        "return self.linear(x), x",
        'outputs are "y", but forward returns 2 values',
        "class User:",
    ),
    "forward that gives a dict of other names": Wrong(
        "return self.linear(x)",
        'return {"yy": self.linear(x)}',
        'forward returns a dict of "yy"',
        "class User:",
        'did you mean "y"?',
    ),
    "a loss that is a mean": Wrong(
        ', reduction="none")',
        ")",
        "loss() gave a tensor of shape [] for 3 rows; expected a tensor of shape [3]",
        "def loss(self, outputs, targets):",
        'reduction="none"',
    ),
    "a loss that raises": Wrong(
        'outputs["y"], targets, red',
        'outputs["z"], targets, red',
        "User.loss() raised KeyError: 'z'",
        'return F.cross_entropy(outputs["z"], targets, reduction="none")',
    ),
    "targets that are text": Wrong(
        "np.int64(row[0] > 0)",
        '"yes"',
        "targets are a tuple after rows were put together",
        None,
        "numbers, arrays or tensors",
    ),
    "a metric without result": Wrong(
        "def result(self):", "def results(self):", 'metric() gave an Accuracy without "result"', "def metric(self):"
    ),
    "a metric that raises": Wrong(
        "self.seen += len(targets)",
        "self.sen += len(targets)",
        "Accuracy.update() raised AttributeError",
        "self.sen += len(targets)",
    ),
    "a metric that gives a number": Wrong(
        'return {"accuracy": self.right / self.seen}',
        "return self.right / self.seen",
        "result() gave a float; expected a dict",
        "def result(self):",
    ),
    "a metric of text": Wrong(
        '{"accuracy": self.right / self.seen}',
        '{"accuracy": "high"}',
        "'accuracy' is a str; expected a number",
        "def result(self):",
    ),
    "an optimizer that is none": Wrong(
        "    def metric(self):",
        "    def optimizer(self, model):\n        return model\n\n    def metric(self):",
        "optimizer() gave a Model; expected a torch.optim.Optimizer",
        "def optimizer(self, model):",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_training_names_the_place_and_the_mend(name, bench, failure_of):
    wrong = WRONG[name]
    made = bench()
    text = made.file.read_text()
    assert wrong.old in text
    made.file.write_text(text.replace(wrong.old, wrong.new))

    failure = failure_of(made.train)

    assert failure.kind == "configuration"
    assert wrong.says in failure.message, str(failure)
    assert wrong.hint in (failure.hint or ""), str(failure)
    lines = [line.strip() for line in made.file.read_text().splitlines()]
    if wrong.line is not None:
        assert failure.place is not None, str(failure)
        assert failure.place.file == made.file
        assert lines[failure.place.line - 1] == wrong.line
    assert str(PROGRAMS) not in str(failure)


def test_the_frames_shown_are_the_users_from_the_outermost_to_the_library_that_failed(bench, failure_of):
    made = bench()
    (made.folder / "reading.py").write_text("def read(path):\n    return open(path)\n")
    made.file.write_text(
        made.file.read_text().replace("return rows(50, 1)", 'import reading\n        return reading.read("/none")')
    )
    failure = failure_of(made.train)
    shown = [line.strip() for line in failure.message.splitlines()]
    assert shown[0] == "User.train_data() raised FileNotFoundError: [Errno 2] No such file or directory: '/none'"
    assert shown[1].startswith(f"{made.file}:")
    assert shown[1].endswith('in train_data: return reading.read("/none")')
    assert shown[2] == f"{made.folder}/reading.py:2 in read: return open(path)"
    assert failure.where == f"{made.folder}/reading.py:2"


def test_an_error_in_a_loading_process_is_named_like_one_in_this_process(bench, failure_of):
    data = """
    class rows:
        def __init__(self, count, seed):
            self.count = count

        def __len__(self):
            return self.count

        def __getitem__(self, index):
            if index == 20:
                raise ValueError("row 20 is broken")
            return {"x": np.full(4, index, np.float32)}, index % 2
    """
    made = bench(data=data)
    failure = failure_of(made.train, num_workers=1)
    assert failure.kind == "configuration"
    assert "ValueError: row 20 is broken" in failure.message
    assert failure.place is not None
    assert "row 20 is broken" in made.file.read_text().splitlines()[failure.place.line - 1]


@pytest.mark.parametrize(
    ("reference", "says", "hint"),
    [
        ("{folder}/recipe.py", "names no class", 'write "recipe.py:Class"'),
        ("{folder}/recip.py:User", "recip.py does not exist", None),
        ("{folder}/torch.py:User", "would hide the module torch", "rename it"),
    ],
)
def test_a_reference_that_leads_nowhere_is_explained(reference, says, hint, tmp_path, failure_of):
    (tmp_path / "torch.py").write_text("class User: ...\n")
    failure = failure_of(load_recipe, reference.format(folder=tmp_path))
    assert says in failure.message
    assert hint is None or hint in failure.hint


def test_the_nearest_file_is_offered(bench, failure_of):
    made = bench()
    failure = failure_of(load_recipe, f"{made.folder}/{made.file.stem}s.py:User")
    assert failure.hint == f'did you mean "{made.file.name}"?'


def test_an_edit_within_the_same_second_is_seen_and_no_bytecode_is_left(bench):
    made = bench()
    helper = made.folder / "helper_of_edit.py"
    made.file.write_text(
        made.file.read_text() + textwrap.dedent("\nimport helper_of_edit\nUser.value = helper_of_edit.VALUE\n")
    )
    helper.write_text("VALUE = 1\n")
    os.utime(helper, (1_000_000_000, 1_000_000_000))
    import py_compile

    py_compile.compile(str(helper))  # as any other run of Python in that folder leaves it
    helper.write_text("VALUE = 2\n")
    os.utime(helper, (1_000_000_000, 1_000_000_000))
    assert made.recipe().user.value == 2
    assert not list(made.folder.glob("__pycache__/recipe*"))


def test_forward_may_give_a_tensor_a_tuple_or_a_dict(bench):
    import torch

    one, two = torch.zeros(2), torch.ones(2)
    recipe = bench(user=CLASS.replace('outputs = ("y",)', 'outputs = ("a", "b")')).recipe()
    for raw in ((one, two), [one, two], {"b": two, "a": one}):
        named = recipe.named(raw)
        assert list(named) == ["a", "b"]
        assert named["a"] is one
        assert named["b"] is two
