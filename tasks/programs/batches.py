"""Which rows each rank sees at each step, and how they become tensors of the declared form.

The order of an epoch depends on seed, epoch and length alone, never on the number of ranks: a step's rows are the next
`batch_size` of it, cut into equal shares. Where that does not divide, shares are filled up with rows that weigh
nothing, so each sample counts exactly once per epoch. A position in training is (epoch, step) and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    """One rank's part of one step."""

    indices: tuple[int, ...]
    """Equally many on every rank; those that fill up come last."""
    real: int
    """How many of `indices` count; the others weigh nothing."""
    total: int
    """Rows that count in this step over all ranks."""


def order_of(length: int, *, seed: int, epoch: int) -> list[int]:
    """The epoch's permutation, of a generator of its own."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(length, generator=generator).tolist()


def shares(order: Sequence[int], *, batch_size: int, rank: int, world_size: int) -> list[Share]:
    """This rank's share of each step over `order`.

    >>> [s.indices for s in shares([4, 2, 0, 1, 3], batch_size=3, rank=1, world_size=2)]
    [(0, 4), (3,)]
    >>> [s.real for s in shares([4, 2, 0, 1, 3], batch_size=3, rank=1, world_size=2)]
    [1, 1]
    """
    found = []
    for start in range(0, len(order), batch_size):
        step = order[start : start + batch_size]
        per_rank = -(-len(step) // world_size)
        mine = step[rank * per_rank : (rank + 1) * per_rank]
        filling = [step[0]] * (per_rank - len(mine))
        found.append(Share(indices=(*mine, *filling), real=len(mine), total=len(step)))
    return found


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


def batches(recipe: Recipe, dataset: Dataset, plan: Sequence[Share], *, num_workers: int = 0) -> Iterator[Batch]:
    """Load a plan's rows, in this process or in `num_workers` loading processes that are ahead of it."""
    loader: DataLoader[Any] = DataLoader(
        dataset,  # type: ignore[arg-type] # any map-style dataset will do, such as a list
        batch_sampler=_Given([list(share.indices) for share in plan]),
        collate_fn=partial(_collate, recipe),
        num_workers=num_workers,
        # Otherwise every epoch takes a number from torch's global generator, which dropout draws from too.
        generator=torch.Generator().manual_seed(0),
    )
    with users_code(f"loading {recipe.name}'s data", recipe.folder, always=False):
        for share, (inputs, targets) in zip(plan, loader, strict=True):
            yield Batch(inputs, targets, share)


def _collate(recipe: Recipe, items: Sequence[Any]) -> tuple[dict[str, Tensor], Targets]:
    return recipe.batch(items)


class _Given:
    """A batch sampler of batches that are known."""

    def __init__(self, steps: list[list[int]]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


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
