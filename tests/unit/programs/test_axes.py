"""Sizes that are tried, and real inputs of just those sizes."""

from __future__ import annotations

import torch

from tasks.programs.axes import Axes, Examples

ONE = Axes(inputs={"x": {"dtype": "float32", "shape": ["batch", 4]}}, shapes={"batch": {"min": 1, "opt": 8, "max": 32}})
TWO = Axes(
    inputs={
        "tokens": {"dtype": "int64", "shape": ["batch", "sequence"]},
        "mask": {"dtype": "int64", "shape": ["batch", "sequence"]},
    },
    shapes={"batch": {"min": 1, "opt": 4, "max": 8}, "sequence": {"min": 2, "opt": 16, "max": 64}},
)


def test_one_two_three_and_both_ends_are_probed():
    assert sorted(sizes["batch"] for sizes in ONE.probes()) == [1, 2, 3, 8, 32]


def test_each_axis_goes_through_its_sizes_and_the_corners_are_there():
    probes = TWO.probes()
    assert {s["batch"] for s in probes if s["sequence"] == 16} == {1, 2, 3, 4, 8}
    assert {s["sequence"] for s in probes if s["batch"] == 4} == {2, 3, 16, 64}
    assert {(s["batch"], s["sequence"]) for s in probes} >= {(1, 2), (1, 64), (8, 2), (8, 64)}
    assert len(probes) == len({tuple(s.items()) for s in probes})


def test_sizes_to_trace_with_are_at_least_two_and_differ():
    sizes = TWO.traced()
    assert len(set(sizes.values())) == 2
    assert min(sizes.values()) >= 2
    fixed = Axes(inputs=ONE.inputs, shapes={"batch": {"min": 1, "opt": 1, "max": 1}})
    assert fixed.traced() == {"batch": 2}


def test_the_batch_axis_is_the_first_of_every_input():
    assert TWO.batch == "batch"
    assert Axes(inputs={"x": {"dtype": "float32", "shape": [8, 4]}}, shapes={}).batch is None
    assert Axes(inputs={"x": {"dtype": "float32", "shape": [8, 4]}}, shapes={}).fixed_rows == 8


def test_inputs_that_do_not_share_their_first_axis_are_refused(failure_of):
    axes = Axes(
        inputs={"a": {"dtype": "float32", "shape": ["batch", 4]}, "b": {"dtype": "float32", "shape": ["rows", 4]}},
        shapes={},
    )
    failure = failure_of(lambda: axes.batch)
    assert failure.kind == "configuration"
    assert "a ['batch', 4], b ['rows', 4]" in failure.message


def test_examples_are_different_real_rows_in_another_order(bench):
    made = bench()
    recipe = made.recipe()
    axes = Axes(inputs=made.inputs, shapes=made.shapes)
    data = recipe.data("validation", ["x"])
    examples = Examples(recipe=recipe, axes=axes, dataset=data, split="validation")
    rows = examples.make({"batch": 8})["x"]
    real = torch.stack([torch.as_tensor(data[i][0]["x"]) for i in range(len(data))])
    found = [int((real == row).all(1).nonzero().item()) for row in rows]
    assert len(set(found)) == 8
    assert found != sorted(found)
    assert examples.make({"batch": 30})["x"].shape == (30, 4)  # more rows than there are


def test_a_named_axis_is_cut_or_continued_alike_in_inputs_that_belong_together(bench):
    data = """
    def rows(count, seed):
        return [({"tokens": np.arange(1, 6) + i, "mask": np.arange(1, 6) + i}, i) for i in range(count)]
    """
    made = bench(data=data)
    recipe = made.recipe()
    examples = Examples(
        recipe=recipe, axes=TWO, dataset=recipe.data("validation", ["tokens", "mask"]), split="validation"
    )
    for length in (2, 5, 13):
        made_inputs = examples.make({"batch": 3, "sequence": length})
        assert made_inputs["tokens"].shape == (3, length)
        assert torch.equal(made_inputs["tokens"], made_inputs["mask"])
        assert torch.equal(made_inputs["tokens"], made_inputs["tokens"][:, torch.arange(length) % 5])


def test_an_example_of_the_recipe_has_to_have_the_asked_shape(bench, failure_of):
    user = """
    class User:
        outputs = ("y",)
        def model(self): return Model()
        def train_data(self): return rows(50, 1)
        def validation_data(self): return rows(23, 2)
        def test_data(self): return rows(21, 3)
        def loss(self, outputs, targets): ...
        def metric(self): return Accuracy()
        def example(self, sizes):
            return {"x": np.zeros((1, 4), np.float32)}
    """
    failure = failure_of(bench(user=user).export)
    assert failure.kind == "configuration"
    assert 'example() gave input "x" in the shape [1, 4] for batch 4; expected [4, 4]' in failure.message
