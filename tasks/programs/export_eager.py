"""What is checked on the PyTorch model before it is exported: its own answers have to make sense at every probed size.

Cheap, compared with the export; and a failure here is named in the terms of the user's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .axes import Axes, Examples, Sizes, shown
from .batches import dtype_name
from .failures import Place, ProgramFailed, places_within
from .jobs import Parity
from .recipe import Recipe

DEFAULT_RTOL = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """|a - b| <= atol + rtol * |b|."""

    atol: float
    rtol: float

    @classmethod
    def of(cls, parity: Parity) -> Tolerance:
        return cls(atol=parity["atol"], rtol=parity.get("rtol", DEFAULT_RTOL))

    def __str__(self) -> str:
        return f"atol {self.atol:g}, rtol {self.rtol:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What PyTorch gives for one probe; what the graph has to give too."""

    sizes: Sizes
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def refused(message: str, *, hint: str, where: str | None = None, place: Place | None = None) -> ProgramFailed:
    return ProgramFailed("export refused", message, hint=hint, where=where, place=place)


@torch.no_grad()
def eager_answers(
    recipe: Recipe, model: nn.Module, axes: Axes, examples: Examples, tolerance: Tolerance
) -> list[Answer]:
    """PyTorch's answers at every probed size: deterministic, finite, and each row's its own."""
    check_eval(model)
    check_deterministic(recipe, model, examples.make(axes.opt()), axes.opt())
    answers = []
    for number, sizes in enumerate(axes.probes()):
        inputs = examples.make(sizes, shift=number)
        outputs = answer(recipe, model, inputs, sizes)
        check_rows(axes, sizes, outputs)
        check_finite(sizes, inputs, outputs)
        answers.append(Answer(sizes=sizes, inputs=inputs, outputs=outputs))
    check_eval(model)  # a forward that calls self.train() has shown itself by now
    if axes.batch is not None:
        check_independent(recipe, model, answers, tolerance, axes.batch)
    return answers


def answer(recipe: Recipe, model: nn.Module, inputs: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """The model's outputs; a size within the declared ranges at which it raises is refused."""
    try:
        raw = model(**inputs)
    except Exception as error:
        places = places_within(error, recipe.folder)
        raise refused(
            f"the model raises {type(error).__name__} at {shown(sizes)}: {error}",
            hint="narrow the range in shapes, or mend the model: usual causes are a view or reshape to fixed sizes, a "
            "table of positions shorter than the range, and a convolution or pooling wider than its input",
            place=places[-1] if places else None,
        ) from error
    return {name: value.detach().clone() for name, value in recipe.named(raw).items()}


def check_eval(model: nn.Module) -> None:
    """`eval()` has reached every module."""
    training = [name or type(model).__name__ for name, module in model.named_modules() if module.training]
    if training:
        raise refused(
            f"after model.eval() these modules are still in training mode: {', '.join(training[:5])}",
            hint="usual causes: a train() or eval() of the model's own that leaves children out, or forward calling "
            "self.train(); dropout and batch statistics would stay on in the served model",
            where=f"module {training[0]}",
        )


def check_deterministic(recipe: Recipe, model: nn.Module, inputs: Mapping[str, Tensor], sizes: Sizes) -> None:
    """The same request twice gives the same answer, to the bit."""
    answers, inner = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with _recorded(model) as calls:
            answers.append(answer(recipe, model, inputs, sizes))
        inner.append(calls)
    if _equal(*answers):
        return
    culprit = next((name for name in inner[0] if not _equal(inner[0][name], inner[1].get(name))), "")
    module = f"module {culprit}" if culprit else f"{type(model).__name__}.forward"
    raise refused(
        "the same request twice gives different answers, in eval mode; the first output that differs is that of "
        f"{module}",
        hint="usual cause: F.dropout(x, p) without training=self.training, which stays on under eval(); otherwise "
        "torch.rand, bernoulli or multinomial in forward",
        where=module,
    )


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Every submodule's first output, in the order in which they finish."""
    calls: dict[str, Any] = {}

    def recorder(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            calls.setdefault(name, output)

        return record

    handles = [module.register_forward_hook(recorder(name)) for name, module in model.named_modules() if name]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=0, atol=0, equal_nan=True)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return True


def check_rows(axes: Axes, sizes: Sizes, outputs: Mapping[str, Tensor]) -> None:
    """Every output has one row per row of the inputs, on its first axis."""
    rows = sizes[axes.batch] if axes.batch is not None else axes.fixed_rows
    for name, value in outputs.items():
        if value.dim() == 0 or value.shape[0] != rows:
            raise refused(
                f"the model gives it in the shape {list(value.shape)} at {shown(sizes)}; its first axis must be the "
                f"batch's, {rows} here",
                hint="usual causes: squeeze() without an axis (at batch 1 it takes the batch away), a mean or sum over "
                "all axes, a number of rows that depends on the data",
                where=f"output {name}, axis 0" + (f" ({axes.batch})" if axes.batch else ""),
            )


def check_finite(sizes: Sizes, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    for name, value in outputs.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            half = value.dtype == torch.float16 or any(v.dtype == torch.float16 for v in inputs.values())
            raise refused(
                f"the model gives nan or infinity at {shown(sizes)}",
                hint="fp16 ends at 65504: squares and sums in a norm or softmax overflow; keep those layers in fp32"
                if half
                else "usual causes: a division by a length or norm that is 0, log(0), and a softmax over nothing but "
                "masked positions",
                where=f"output {name} ({dtype_name(value)})",
            )


def check_independent(
    recipe: Recipe, model: nn.Module, answers: list[Answer], tolerance: Tolerance, batch: str
) -> None:
    """A row's answer is the same alone and among others.

    Refused rather than warned about: once the batch axis is declared as such, Triton's dynamic batching puts requests
    of different clients into one batch, and a client's answer would depend on what strangers ask at that moment. No
    gate downstream can see this, since they all ask in batches of their own.
    """
    least = min(found.sizes[batch] for found in answers)
    among = next((a for a in answers if a.sizes[batch] > least), None)
    if among is None:
        return
    rows = slice(among.sizes[batch] - least, among.sizes[batch])
    alone = answer(
        recipe, model, {name: value[rows] for name, value in among.inputs.items()}, {**among.sizes, batch: least}
    )
    for name, value in alone.items():
        expected = among.outputs[name][rows]
        if not close(value, expected, tolerance):
            raise refused(
                f"a row's answer depends on the other rows of its batch: it changes by "
                f"{float((value.double() - expected.double()).abs().max()):.3g} (allowed: {tolerance})",
                hint="usual causes: a mean, norm or softmax over axis 0, an if on size(0), a batch norm on the batch's "
                "statistics; requests of different clients share a batch. If rows belong together, declare "
                f'"{batch}" as a fixed size instead of a named axis',
                where=f"output {name}, axis 0 ({batch})",
            )


def close(value: Tensor, expected: Tensor, tolerance: Tolerance) -> bool:
    if value.shape != expected.shape:
        return False
    if not value.is_floating_point():
        return torch.equal(value, expected)
    return torch.allclose(value.double(), expected.double(), rtol=tolerance.rtol, atol=tolerance.atol)
