"""Which rows each rank sees at each step, and how they become tensors of the declared form.

The order of an epoch depends on seed, epoch and length alone, never on the number of ranks: a step's rows are the next
`batch_size` of it, cut into equal shares, and each share into the micro-batches of gradient accumulation. Where that
does not divide, shares are filled up with rows that weigh nothing, so each sample counts exactly once per epoch.

What is drawn at random while rows are loaded and trained on (augmentation, dropout) comes from generators that are
seeded anew for each step and rank. So a position in training is (epoch, step) and nothing more: no state of a
generator has to be kept, and the number of loading processes changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .failures import ProgramFailed, names, users_code
from .jobs import InputSpec
from .recipe import Arrays, Dataset, Recipe, Targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of one micro-batch."""

    indices: tuple[int, ...]
    """Equally many on every rank; those that fill up come last."""
    real: int
    """How many of `indices` count; the others weigh nothing."""
    total: int
    """Rows that count in the whole step, over all ranks and micro-batches."""
    step: int = 1
    """Which step of the epoch, counted from 1."""
    part: int = 0
    """Which micro-batch of the step."""
    ends_step: bool = True
    """Whether it is the last micro-batch of its step: the one after which the ranks' gradients are averaged."""


def order_of(length: int, *, seed: int, epoch: int) -> list[int]:
    """The epoch's permutation, of a generator of its own."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(length, generator=generator).tolist()


def shares(order: Sequence[int], *, batch_size: int, rank: int, world_size: int, accumulation: int = 1) -> list[Share]:
    """This rank's share of each step over `order`, cut into `accumulation` micro-batches.

    >>> [s.indices for s in shares([4, 2, 0, 1, 3], batch_size=3, rank=1, world_size=2)]
    [(0, 4), (3,)]
    >>> [s.real for s in shares([4, 2, 0, 1, 3], batch_size=3, rank=1, world_size=2)]
    [1, 1]
    >>> [(s.indices, s.ends_step) for s in shares([4, 2, 0, 1], batch_size=4, rank=0, world_size=1, accumulation=2)]
    [((4, 2), False), ((0, 1), True)]
    """
    found = []
    for number, start in enumerate(range(0, len(order), batch_size), start=1):
        step = order[start : start + batch_size]
        per_rank = -(-len(step) // world_size)
        mine = step[rank * per_rank : (rank + 1) * per_rank]
        filled = (*mine, *[step[0]] * (per_rank - len(mine)))
        size = -(-per_rank // accumulation)
        for first in range(0, per_rank, size):
            part = filled[first : first + size]
            found.append(
                Share(
                    indices=part,
                    real=min(len(part), max(0, len(mine) - first)),
                    total=len(step),
                    step=number,
                    part=first // size,
                    ends_step=first + size >= per_rank,
                )
            )
    return found


def seed_step(seed: int, *positions: int) -> None:
    """Seed every generator that user's code or a layer may draw from, for one place in training.

    Python's, numpy's and torch's own; a generator that a data set keeps for itself is its own affair.
    """
    mixed = _mixed(seed, *positions)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(mixed)


def _mixed(seed: int, *positions: int) -> int:
    """A 63-bit number in which every bit of the arguments tells (the finaliser of SplitMix64): neighbouring steps must
    not get related streams."""
    value = seed
    for position in (*positions, 0):
        value = (value + 0x9E3779B97F4A7C15 * (position + 1)) % 2**64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        value ^= value >> 31
    return value >> 1


@dataclass(frozen=True, slots=True)
class Batch:
    inputs: dict[str, Tensor]
    targets: Targets
    share: Share

    def to(self, device: torch.device) -> Batch:
        inputs = {name: value.to(device, non_blocking=True) for name, value in self.inputs.items()}
        return Batch(inputs, map_tensors(lambda value: value.to(device, non_blocking=True), self.targets), self.share)

    def weights(self) -> Tensor:
        """1 for a row that counts, 0 for one that fills up."""
        device = next(iter(self.inputs.values())).device
        return (torch.arange(len(self.share.indices), device=device) < self.share.real).float()


def batches(
    recipe: Recipe,
    dataset: Dataset,
    plan: Sequence[Share],
    *,
    num_workers: int = 0,
    seed: tuple[int, ...] | None = None,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """Load a plan's rows, in this process or in `num_workers` loading processes that are ahead of it.

    With `seed`, what loading draws at random depends on it and on the step alone.
    """
    loader: DataLoader[Any] = DataLoader(
        _Planned(recipe, dataset, plan, seed),  # type: ignore[arg-type] # a list of batches is a data set, too
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # Otherwise every epoch takes a number from torch's global generator, which dropout draws from too.
        generator=torch.Generator().manual_seed(0),
    )
    with users_code(f"loading {recipe.name}'s data", recipe.folder, always=False):
        for share, (inputs, targets) in zip(plan, loader, strict=True):
            yield Batch(inputs, targets, share)


def _as_it_is(batch: Any) -> Any:
    return batch


class _Planned:
    """A data set whose items are the batches of a plan, put together where they are loaded."""

    def __init__(self, recipe: Recipe, dataset: Dataset, plan: Sequence[Share], seed: tuple[int, ...] | None) -> None:
        self.recipe, self.dataset, self.plan, self.seed = recipe, dataset, plan, seed
        self.many = getattr(dataset, "__getitems__", None)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, number: int) -> tuple[dict[str, Tensor], Targets]:
        share = self.plan[number]
        if self.seed is not None:
            seed_step(*self.seed, share.step, share.part)
        if self.many is not None:  # a data set that fetches a batch at once, from a table or over a network
            return self.recipe.batch(self.many(list(share.indices)))
        return self.recipe.batch([self.dataset[index] for index in share.indices])


def check_inputs(recipe: Recipe, split: str, given: Mapping[str, Tensor], specs: Mapping[str, InputSpec]) -> None:
    """A batch has the names, dtypes and fixed sizes that the pipeline file declares; nothing is converted silently."""
    what = "collate" if recipe.has("collate") else f"{split}_data"
    if set(given) != set(specs):
        raise recipe.wrong(what, f"() gives the inputs {names(given)}; the pipeline file names {names(specs)}")
    for name, spec in specs.items():
        value = given[name]
        dtype = dtype_name(value)
        if dtype != spec["dtype"]:
            numpy_name = spec["dtype"] if spec["dtype"] != "bool" else "bool_"
            raise recipe.wrong(
                what,
                f'() gives input "{name}" as {dtype}; the pipeline file declares {spec["dtype"]}',
                hint=f"give it as np.{numpy_name}, or change inputs.{name}.dtype",
            )
        shape = spec["shape"]
        fits = len(shape) == value.dim() and all(
            isinstance(declared, str) or axis == 0 or declared == size
            for axis, (declared, size) in enumerate(zip(shape, value.shape, strict=True))
        )
        if not fits:
            raise recipe.wrong(
                what,
                f'() gives input "{name}" in the shape {list(value.shape)}; the pipeline file declares {_shown(shape)}',
                hint="the first axis is the batch's; items come without it",
            )


def _shown(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def dtype_name(value: Tensor) -> str:
    """The numpy name of a tensor's dtype, such as `float32` or `bool`."""
    return str(value.dtype).removeprefix("torch.")


def map_tensors(function: Any, targets: Targets) -> Any:
    """Apply `function` to the tensor, or to each tensor of the dict, that targets are."""
    if isinstance(targets, Tensor):
        return function(targets)
    if isinstance(targets, Mapping):
        return {name: map_tensors(function, value) for name, value in targets.items()}
    raise ProgramFailed(
        "configuration",
        f"targets are a {type(targets).__name__} after rows were put together; expected a tensor or a dict of tensors",
        hint="give numbers, arrays or tensors as targets, or make tensors of them in collate(self, items)",
    )


def to_arrays(values: Mapping[str, Tensor]) -> Arrays:
    return {name: to_array(value) for name, value in values.items()}


def to_array(value: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """A numpy array of its own, which is float32 for bfloat16: numpy has no such type."""
    value = value.detach().cpu()
    array: np.ndarray[Any, np.dtype[Any]] = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return array
