"""Weights to and from a safetensors file: written without wrappers' prefixes, loaded strictly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .failures import ProgramFailed, nearest
from .jobs import FailureKind

SHOWN = 5
"""Names listed per kind of mismatch; a model that does not fit at all has thousands."""


def plain_name(name: str) -> str:
    """Without what DDP (`module.` in front) and torch.compile (`_orig_mod.` anywhere) put in.

    >>> plain_name("module._orig_mod.encoder._orig_mod.weight")
    'encoder.weight'
    """
    name = ".".join(part for part in name.split(".") if part != "_orig_mod")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def save_weights(model: nn.Module, path: Path) -> None:
    """Equal weights give equal bytes. Tied tensors are written under each of their names: any reader has all."""
    save_state(model.state_dict(), path)


def save_state(state: Mapping[str, Tensor], path: Path) -> None:
    """The same of a state dict."""
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in state.items()}, path)


def load_weights(model: nn.Module, path: Path, *, kind: FailureKind) -> None:
    """Load strictly: every tensor of the model is in the file, in its shape, and the file holds nothing else."""
    given = read_weights(path, kind=kind)
    expected = model.state_dict()
    if not given.keys() <= expected.keys():
        given = _without_prefixes(given, expected)
    given |= _from_tied(given, expected)
    missing = [n for n in expected if n not in given]
    extra = [n for n in given if n not in expected]
    shapes = [
        f"{n} is {list(given[n].shape)} in the file and {list(expected[n].shape)} in the model"
        for n in expected
        if n in given and given[n].shape != expected[n].shape
    ]
    if missing or extra or shapes:
        lines = [f"{path.name} does not fit the recipe's model"]
        lines += _listed("the file lacks ", missing)
        lines += _listed("the model has no ", extra)
        lines += _listed("", shapes)
        near = nearest(missing[0], extra) if missing and extra else None
        cause = "the weights were made by another version of the model's code; train again"
        raise ProgramFailed(kind, "\n".join(lines), hint=near or cause, where=str(path))
    model.load_state_dict(given, strict=True)


def read_weights(path: Path, *, kind: FailureKind) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise ProgramFailed(kind, "the weights' file does not exist", where=str(path)) from error
    except SafetensorError as error:
        raise ProgramFailed(
            kind,
            f"not a readable safetensors file: {error}",
            hint="a file of torch.save is written anew with safetensors.torch.save_model(model, path)",
            where=str(path),
        ) from error


def not_finite(state: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that hold nan or an infinity."""
    return [name for name, value in state.items() if value.is_floating_point() and not torch.isfinite(value).all()]


def _without_prefixes(given: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prefixes go only where the model itself has no such name: a module may really be called `module`."""
    return {name if name in expected else plain_name(name): value for name, value in given.items()}


def _from_tied(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is missing but is one tensor with something given: safetensors' `save_model` writes one of several names."""
    by_place: dict[tuple[int, ...], Tensor] = {}
    for name, value in expected.items():
        if name in given and value.numel():
            by_place[_place(value)] = given[name]
    return {
        name: by_place[_place(value)]
        for name, value in expected.items()
        if name not in given and value.numel() and _place(value) in by_place
    }


def _place(value: Tensor) -> tuple[int, ...]:
    return (value.data_ptr(), *value.shape, *value.stride())


def _listed(what: str, found: list[str]) -> list[str]:
    more = [f"  … and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return [f"  {what}{name}" for name in found[:SHOWN]] + more
