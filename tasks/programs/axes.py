"""Named axes: which there are, which sizes to trace and to probe, and real inputs of just those sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .batches import check_inputs
from .failures import ProgramFailed
from .jobs import InputSpec, Range
from .recipe import Dataset, Recipe

Sizes = dict[str, int]
"""One size per named axis."""

PROBED_BELOW = (1, 2, 3)
"""Sizes at which graphs break that were traced with others: 1 is broadcast or squeezed, 2 and 3 are no multiple of
each other. Those within the declared range are tried, beside both of its ends and `opt`."""

CORNERS_UP_TO = 4
"""Named axes up to which every corner of the ranges is probed: 16 runs for four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The declared inputs and the ranges of their named axes."""

    inputs: Mapping[str, InputSpec]
    shapes: Mapping[str, Range]

    @property
    def names(self) -> list[str]:
        """Named axes in the order in which the inputs name them."""
        found = (axis for spec in self.inputs.values() for axis in spec["shape"] if isinstance(axis, str))
        return list(dict.fromkeys(found))

    @property
    def batch(self) -> str | None:
        """The named axis that rows lie along: the first one of every input. None if that is a fixed size."""
        firsts = {spec["shape"][0] for spec in self.inputs.values() if spec["shape"]}
        if len(firsts) != 1 or any(not spec["shape"] for spec in self.inputs.values()):
            shown = ", ".join(f"{name} {spec['shape']}" for name, spec in self.inputs.items())
            raise ProgramFailed(
                "configuration",
                f"the inputs do not share their first axis, which is the batch's: {shown}",
                hint="begin every input's shape with the same axis, such as batch",
                where="inputs",
            )
        (first,) = firsts
        return first if isinstance(first, str) else None

    @property
    def fixed_rows(self) -> int | None:
        """Rows of every request where the first axis is a fixed size."""
        first = next(iter(self.inputs.values()))["shape"][0]
        return first if isinstance(first, int) else None

    def opt(self) -> Sizes:
        return {name: self.shapes[name]["opt"] for name in self.names}

    def traced(self) -> Sizes:
        """Sizes to trace with: at least 2 (1 would be taken for a constant), and as different as the ranges allow."""
        taken: list[int] = []
        sizes: Sizes = {}
        for name in self.names:
            low, high = self.shapes[name]["min"], self.shapes[name]["max"]
            wanted = [size for size in (3, 5, 7, 11, 13, 17, 2) if low <= size <= high and size not in taken]
            sizes[name] = wanted[0] if wanted else max(2, low)
            taken.append(sizes[name])
        return sizes

    def probes(self) -> list[Sizes]:
        """Sizes to try: each axis through all of its probed sizes while the others stay at `opt`, then all corners."""
        probed = {
            name: sorted(
                {size for size in PROBED_BELOW if r["min"] <= size <= r["max"]} | {r["min"], r["opt"], r["max"]}
            )
            for name, r in ((name, self.shapes[name]) for name in self.names)
        }
        found = [{**self.opt(), name: size} for name, sizes in probed.items() for size in sizes]
        if 1 < len(probed) <= CORNERS_UP_TO:
            ends = [sorted({sizes[0], sizes[-1]}) for sizes in probed.values()]
            found += [dict(zip(probed, corner, strict=True)) for corner in itertools.product(*ends)]
        unique = {tuple(sizes.items()): sizes for sizes in [self.opt(), *found]}
        return list(unique.values())


def shown(sizes: Mapping[str, int]) -> str:
    """Such as `batch 3, sequence 17`."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items()) or "the fixed sizes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Real inputs of asked sizes: the recipe's `example`, or rows of the validation data.

    Rows are different ones in an order that is not the data's, so that a graph which mixes up rows or axes answers
    differently from the model. Where data has another size than asked along a named axis other than the batch's, it is
    cut, or continued from its beginning: real values, and inputs that belong together stay so. A recipe whose inputs
    cannot be cut like that writes `example`.
    """

    recipe: Recipe
    axes: Axes
    dataset: Dataset
    split: str

    def make(self, sizes: Sizes, *, shift: int = 0) -> dict[str, Tensor]:
        given = self._asked(sizes) if self.recipe.has("example") else self._cut(sizes, shift)
        check_inputs(self.recipe, self.split, given, self.axes.inputs)
        # The declared order, whatever the recipe's is.
        return {name: given[name].contiguous() for name in self.axes.inputs}

    def _asked(self, sizes: Sizes) -> dict[str, Tensor]:
        torch.manual_seed(0)
        made = self.recipe.call("example", dict(sizes))
        if not isinstance(made, Mapping) or set(made) != set(self.axes.inputs):
            raise self.recipe.wrong("example", f"() does not give a dict of the inputs {list(self.axes.inputs)}")
        given = {name: torch.as_tensor(value) for name, value in made.items()}
        for name, spec in self.axes.inputs.items():
            expected = resolved(spec["shape"], sizes)
            if list(given[name].shape) != expected:
                raise self.recipe.wrong(
                    "example",
                    f'() gave input "{name}" in the shape {list(given[name].shape)} for {shown(sizes)}; expected '
                    f"{expected}",
                )
        return given

    def _cut(self, sizes: Sizes, shift: int) -> dict[str, Tensor]:
        batch = self.axes.batch
        rows = sizes[batch] if batch is not None else self.axes.fixed_rows or 1
        length = len(self.dataset)
        stride = _stride(length)
        indices = [(shift + 1 + row * stride) % length for row in range(rows)]
        inputs, _ = self.recipe.batch([self.dataset[index] for index in indices])
        check_inputs(self.recipe, self.split, inputs, self.axes.inputs)
        return {name: _fitted(inputs[name], resolved(spec["shape"], sizes)) for name, spec in self.axes.inputs.items()}


def resolved(shape: Sequence[int | str], sizes: Mapping[str, int]) -> list[int]:
    return [sizes[axis] if isinstance(axis, str) else axis for axis in shape]


def _stride(length: int) -> int:
    """A step through `length` rows that comes back to the first only after all, and leaves neighbours apart."""
    return next((step for step in (101, 97, 89, 7, 3) if step < length and np.gcd(step, length) == 1), 1)


def _fitted(value: Tensor, shape: Sequence[int]) -> Tensor:
    for axis, size in enumerate(shape):
        if value.shape[axis] != size:
            value = value.index_select(axis, torch.arange(size) % value.shape[axis])
    return value
