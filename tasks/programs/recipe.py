"""The recipe: the only Python that a user must write; its contract, how it is loaded, and how it is called.

    class Digits:                                  # a plain class: no base class, no import of ours
        outputs = ("logits",)                      # the names of what the model gives, in order

        def model(self) -> nn.Module: ...          # forward's parameters are named as the pipeline file's inputs
        def train_data(self): ...                  # map-style datasets of (inputs, target), inputs being a dict of
        def validation_data(self): ...             #   tensors or arrays without the batch axis
        def test_data(self): ...                   # read by the gates only
        def loss(self, outputs, targets): ...      # dict of tensors, targets -> tensor of shape [rows]
        def metric(self): ...                      # an object with update(outputs, targets) and result()

        def optimizer(self, model): ...            # optional: a torch optimizer; AdamW otherwise
        def scheduler(self, optimizer, total_steps): ...   # optional: a schedule of the learning rate, by steps
        def collate(self, items): ...              # optional: list of items -> (inputs, targets), as torch's default
        def example(self, sizes): ...              # optional: {"batch": 3, "sequence": 17} -> inputs as arrays
        def drift(self, reference, recent): ...    # optional: training data, path -> {"drifted": bool, numbers by name}

`forward` may return a tensor, a tuple or a dict. `loss` gives one value per row, so that rows which only fill up a
rank's share can weigh nothing. `metric` sees plain arrays, batch by batch, and is the same object on every runtime:
`update(outputs: dict[str, ndarray], targets: ndarray)`, `result() -> dict[str, float]`. It may have a method
`slices(targets) -> dict[str, ndarray]`: masks over the rows, by a slice's name, on each of which a metric of its own is
measured.

Whatever the user's code raises becomes a failure of the kind `configuration` with the user's file, line and frames.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from .failures import Place, ProgramFailed, names, nearest, users_code

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
Targets = Any
"""A tensor, or a dict of tensors; arrays in their place when the metric is fed."""


class Dataset(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[Mapping[str, Any], Any]: ...


class Metric(Protocol):
    def update(self, outputs: Arrays, targets: Any, /) -> None: ...
    def result(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A loaded recipe. Its methods call the user's, check what comes back, and name the user's line if it fails."""

    name: str
    folder: Path
    user: Any
    outputs: tuple[str, ...]

    def has(self, method: str) -> bool:
        return callable(getattr(self.user, method, None))

    def call(self, method: str, *arguments: Any) -> Any:
        with users_code(f"{self.name}.{method}()", self.folder):
            return getattr(self.user, method)(*arguments)

    def wrong(self, what: str, message: str, *, hint: str | None = None) -> ProgramFailed:
        """A failure at the line where a method, or a class that it returned, is defined."""
        place = definition(getattr(self.user, what, None)) or definition(type(self.user))
        return ProgramFailed("configuration", f"{self.name}.{what}{message}", hint=hint, place=place)

    def model(self, inputs: Sequence[str]) -> nn.Module:
        """A new model whose forward takes exactly these inputs by name."""
        model = self.call("model")
        if not isinstance(model, nn.Module):
            raise self.wrong("model", f"() gave {described(model)}; expected a torch.nn.Module")
        parameters = inspect.signature(model.forward).parameters
        kinds = {p.kind for p in parameters.values()}
        place = definition(model.forward)
        what = f"{type(model).__name__}.forward"
        unknown = [name for name in inputs if name not in parameters]
        if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ProgramFailed(
                "configuration",
                f"{what} has no parameter {names(unknown)}, which the pipeline file names as input; it takes "
                f"{names(parameters)}",
                hint=nearest(unknown[0], parameters) or "call both by the same name",
                place=place,
            )
        needed = [
            name
            for name, p in parameters.items()
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in inputs
        ]
        if needed:
            raise ProgramFailed(
                "configuration",
                f"{what} needs {names(needed)}, which the pipeline file's inputs do not hold",
                hint="name it under inputs, or give it a default",
                place=place,
            )
        return model

    def data(self, split: str, inputs: Sequence[str]) -> Dataset:
        """A split's dataset, whose first item has been looked at."""
        method = f"{split}_data"
        dataset: Any = self.call(method)
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise self.wrong(
                method,
                f"() gave {described(dataset)}; expected a map-style dataset, with __len__ and __getitem__",
                hint="torch.utils.data.Dataset is one, and so is a list of (inputs, target)",
            )
        with users_code(f"{self.name}.{method}()[0]", self.folder):
            length = len(dataset)
            item = dataset[0] if length else None
        if not length:
            raise self.wrong(method, "() holds no item")
        self._check_item(method, item, inputs)
        found: Dataset = dataset
        return found

    def _check_item(self, method: str, item: Any, inputs: Sequence[str]) -> None:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise self.wrong(method, f"()[0] is {described(item)}; expected a pair of (inputs, target)")
        given = item[0]
        if not isinstance(given, Mapping):
            raise self.wrong(
                method,
                f"()[0] has {described(given)} as its inputs; expected a dict by input name",
                hint=f'such as {{"{inputs[0]}": …}}',
            )
        missing = [name for name in inputs if name not in given]
        extra = [name for name in given if name not in inputs]
        if missing or extra:
            raise self.wrong(
                method,
                f"()[0] has the inputs {names(given)}; the pipeline file names {names(inputs)}",
                hint=nearest(str(extra[0]), missing) if extra and missing else None,
            )

    def batch(self, items: Sequence[Any]) -> tuple[dict[str, Tensor], Targets]:
        """Rows put together: by the recipe's `collate`, or as torch's DataLoader does."""
        if not self.has("collate"):
            with users_code(f"putting items of {self.name}'s data together", self.folder, hint=_RAGGED):
                inputs, targets = default_collate([(dict(item[0]), item[1]) for item in items])
            return dict(inputs), targets
        made = self.call("collate", list(items))
        if not isinstance(made, tuple | list) or len(made) != 2 or not isinstance(made[0], Mapping):
            raise self.wrong("collate", f"() gave {described(made)}; expected (dict of tensors by input name, targets)")
        with users_code(f"{self.name}.collate()", self.folder):
            inputs = {str(name): torch.as_tensor(value) for name, value in made[0].items()}
        return inputs, made[1]

    def forward(self, model: nn.Module, inputs: Mapping[str, Tensor], *, always: bool = True) -> dict[str, Tensor]:
        """The model's outputs by name. `always=False`: see `users_code`."""
        with users_code(f"{self.name}'s model", self.folder, always=always):
            raw = model(**inputs)
        return self.named(raw)

    @torch.no_grad()
    def output_names(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
        """The outputs' names in the order in which forward returns them, which for a dict is the dict's."""
        with users_code(f"{self.name}'s model", self.folder):
            raw = model(**inputs)
        self.named(raw)
        return tuple(map(str, raw)) if isinstance(raw, Mapping) else self.outputs

    def named(self, raw: Any) -> dict[str, Tensor]:
        """What forward returned, by the names that the recipe declares, in their order."""
        if isinstance(raw, Mapping):
            if set(raw) != set(self.outputs):
                strange = [str(name) for name in raw if name not in self.outputs]
                raise self.wrong(
                    "outputs",
                    f" are {names(self.outputs)}, but forward returns a dict of {names(map(str, raw))}",
                    hint=nearest(strange[0], self.outputs) if strange else None,
                )
            values = [raw[name] for name in self.outputs]
        else:
            values = list(raw) if isinstance(raw, tuple | list) else [raw]
        if len(values) != len(self.outputs):
            raise self.wrong(
                "outputs", f" are {names(self.outputs)}, but forward returns {_count(len(values), 'value')}"
            )
        for name, value in zip(self.outputs, values, strict=True):
            if not isinstance(value, Tensor):
                raise self.wrong("outputs", f': forward returns {described(value)} as "{name}"; expected a tensor')
        return dict(zip(self.outputs, values, strict=True))

    def losses(self, outputs: dict[str, Tensor], targets: Targets, *, always: bool = True) -> Tensor:
        """One loss per row."""
        with users_code(f"{self.name}.loss()", self.folder, always=always):
            losses = self.user.loss(outputs, targets)
        rows = next(iter(outputs.values())).shape[0]
        if not isinstance(losses, Tensor) or losses.shape != (rows,):
            raise self.wrong(
                "loss",
                f"() gave {described(losses)} for {_count(rows, 'row')}; expected a tensor of shape [{rows}], one "
                "value per row",
                hint='reduction="none", and the mean over all axes but the first',
            )
        return losses

    def metric(self) -> Metric:
        metric: Any = self.call("metric")
        missing = [name for name in ("update", "result") if not callable(getattr(metric, name, None))]
        if missing:
            raise self.wrong(
                "metric",
                f"() gave {described(metric)} without {names(missing)}",
                hint="it needs update(outputs, targets) and result() -> dict of numbers",
            )
        found: Metric = metric
        return found

    def update(self, metric: Metric, outputs: Arrays, targets: Any) -> None:
        with users_code(f"{type(metric).__name__}.update()", self.folder):
            metric.update(outputs, targets)

    def result(self, metric: Metric) -> dict[str, float]:
        """The metric's numbers, as Python floats; they may be nan."""
        with users_code(f"{type(metric).__name__}.result()", self.folder):
            result: Any = metric.result()
        what = f"{type(metric).__name__}.result()"
        place = definition(getattr(metric, "result", None))
        if not isinstance(result, Mapping) or not result:
            raise ProgramFailed(
                "configuration",
                f"{what} gave {described(result)}; expected a dict of numbers by name",
                hint='such as {"accuracy": 0.97}',
                place=place,
            )
        numbers: dict[str, float] = {}
        for name, value in result.items():
            if not isinstance(name, str) or not isinstance(value, int | float | np.number | np.ndarray | Tensor):
                raise ProgramFailed(
                    "configuration", f"{what}: {name!r} is {described(value)}; expected a number", place=place
                )
            numbers[name] = float(value)
        return numbers

    def slices(self, metric: Metric, targets: Any, rows: int) -> dict[str, Array]:
        """The slices of a batch that the metric names, as masks over its rows; none where it has no `slices`."""
        give = getattr(metric, "slices", None)
        if not callable(give):
            return {}
        what = f"{type(metric).__name__}.slices()"
        with users_code(what, self.folder):
            given = give(targets)
        place = definition(give)
        if not isinstance(given, Mapping):
            raise ProgramFailed(
                "configuration", f"{what} gave {described(given)}; expected a dict of masks by name", place=place
            )
        masks = {str(name): np.asarray(mask) for name, mask in given.items()}
        for name, mask in masks.items():
            if mask.dtype != np.bool_ or mask.shape != (rows,):
                raise ProgramFailed(
                    "configuration",
                    f"{what}: {name!r} is {mask.dtype}{list(mask.shape)}; expected bool[{rows}], a value for each row",
                    place=place,
                )
        return masks

    def finite_result(self, metric: Metric) -> dict[str, float]:
        """The metric's numbers; one that no gate can be compared with is refused."""
        numbers = self.result(metric)
        bad = [name for name, value in numbers.items() if not math.isfinite(value)]
        if bad:
            raise ProgramFailed(
                "configuration",
                f"{type(metric).__name__}.result() gave {bad[0]} = {numbers[bad[0]]}; expected a finite number",
                hint="usually a division by a count that is zero",
                place=definition(getattr(metric, "result", None)),
            )
        return numbers


_RAGGED = "items of different shapes need collate(self, items) in the recipe, which pads them to one shape"


def definition(value: Any) -> Place | None:
    """Where a class or function of the user's is defined."""
    try:
        target = inspect.unwrap(value) if callable(value) else value
        file = inspect.getsourcefile(target)
        line = inspect.getsourcelines(target)[1]
    except (TypeError, OSError, AttributeError):
        return None
    return Place(Path(file), max(line, 1)) if file else None


def described(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {_count(len(value), 'item')}"
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
