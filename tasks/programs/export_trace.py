"""PyTorch to ONNX: `torch.export`, then torch's ONNX exporter; what they raise becomes an axis, a line and a cause.

The program is captured by ourselves before it is handed to the ONNX exporter, because that one, given a module, takes
an axis that turned out to be constant for a constant and says nothing.
"""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .axes import Axes
from .export_eager import refused
from .failures import Place, ProgramFailed, places_in_text, places_within, users_places
from .recipe import Recipe

SPECIALISED = re.compile(
    r"You marked (?P<axis>\w+) as dynamic but your code specialized it to be a constant \((?P<n>\d+)\)"
)
NO_TRANSLATION = re.compile(r"No ONNX function found for <OpOverload\(op='(?P<op>[\w.]+)'")
GUARD = re.compile(r"eval .+ \[guard added\]")
CONSTANT_CAUSES = (
    "usual causes: len(x), int(x.size(0)) or x.shape[0] of a numpy array used as a number (repeat(len(x), 1)), a "
    "reshape to fixed sizes, and an if on a size (squeeze when size(0) is 1); use x.size(0), -1 and expand"
)


def trace(recipe: Recipe, model: nn.Module, inputs: Mapping[str, Tensor], axes: Axes) -> ExportedProgram:
    """Capture the model's graph, every declared axis being symbolic."""
    dims = {name: _dim(name, axes) for name in axes.names}
    dynamic = {
        name: {axis: dims[size] for axis, size in enumerate(spec["shape"]) if isinstance(size, str)}
        for name, spec in axes.inputs.items()
    }
    with _guards(recipe.folder) as places:
        try:
            return torch.export.export(model, (), dict(inputs), dynamic_shapes=dynamic, strict=False)
        except Exception as error:
            raise _traced_badly(error, recipe, axes, places) from error


def _dim(name: str, axes: Axes) -> Any:
    """Of at least two sizes: a range of one would be a constant, and the axis lose its name."""
    declared = axes.shapes[name]
    return Dim(
        name, min=declared["min"] if declared["max"] > 1 else 1, max=max(declared["max"], declared["min"] + 1, 2)
    )


@contextmanager
def _guards(folder: Path) -> Iterator[list[Place]]:
    """The user's lines at which torch draws a conclusion about a size, the last one last.

    Only torch's log tells; a handler runs on the stack of the line that it reports.
    """
    places: list[Place] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if GUARD.search(record.getMessage()):
                places.extend(users_places(traceback.extract_stack(), folder)[-1:])

    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [Handler()], False
    logger.setLevel(logging.INFO)
    try:
        yield places
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


def _traced_badly(error: Exception, recipe: Recipe, axes: Axes, guards: list[Place]) -> ProgramFailed:
    text = str(error)
    place = next(reversed(places_in_text(text, recipe.folder) or places_within(error, recipe.folder)), None)
    if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in text:
        return refused(
            "what the model does depends on the values of its inputs" + (f"\n{place.described()}" if place else ""),
            hint="usual cause: an if, while, int() or .item() on a tensor; use torch.where, or torch.cond for two "
            "branches",
            place=place,
        )
    constant = SPECIALISED.search(text)
    if constant:
        found = guards[-1] if guards else None
        users = next((name for name, spec in axes.inputs.items() if constant["axis"] in spec["shape"]), None)
        return refused(
            f"{constant['axis']} is declared dynamic, but the graph would only work at {constant['n']}"
            + (f"\n{found.described()}" if found else ""),
            hint=CONSTANT_CAUSES,
            where=f"input {users}, axis {constant['axis']}",
            place=found,
        )
    bullets = [line.strip() for line in text.splitlines() if line.strip().startswith("- ")]
    if "Constraints violated" in text and bullets:
        found = guards[-1] if guards else place
        return refused(
            "the model does not work for all declared sizes:\n" + "\n".join(f"  {line}" for line in bullets),
            hint="usual causes: an if on a size, sizes that must be equal or a multiple of something (name equal axes "
            "alike, narrow the range in shapes)",
            where=f"axes {', '.join(axes.names)}",
            place=found,
        )
    return refused(
        f"torch.export cannot capture the model: {type(error).__name__}: {_first_lines(text)}"
        + (f"\n{place.described()}" if place else ""),
        hint="usual causes: numpy or Python objects computed from tensors in forward, and side effects",
        place=place,
    )


def to_onnx(recipe: Recipe, program: ExportedProgram, opset: int) -> onnx.ModelProto:
    """Translate; the result still carries the exporter's notes on where each node comes from."""
    try:
        with warnings.catch_warnings():
            # Of axes that two inputs share, and of torch's own deprecated calls: nothing that a user can act on.
            warnings.simplefilter("ignore")
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                external_data=False,
                verbose=False,
            )
    except Exception as error:
        raise _translated_badly(error, recipe, program, opset) from error
    assert exported is not None
    proto: onnx.ModelProto = exported.model_proto
    return proto


def _translated_badly(error: Exception, recipe: Recipe, program: ExportedProgram, opset: int) -> ProgramFailed:
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = "\n".join(map(str, chain))
    missing = NO_TRANSLATION.search(text)
    if missing:
        places = _origin(program, missing["op"], recipe.folder)
        return refused(
            "it has no ONNX translation" + (f"\n{places[-1].described()}" if places else ""),
            hint="compute it from other operators, or outside the model (before, or in an ensemble)",
            where=f"operator {missing['op']}",
            place=places[-1] if places else None,
        )
    return refused(
        f"torch's exporter fails at opset {opset}: {type(chain[-1]).__name__}: {_first_lines(str(chain[-1]))}",
        hint="try another export.opset_version; 18 to 23 are what exporter and runtimes know best",
        where=f"opset {opset}",
    )


def _origin(program: ExportedProgram, operator: str, folder: Path) -> list[Place]:
    """The user's lines that an operator of the captured graph comes from."""
    name = operator.rpartition(".")[2].strip("_")  # the exporter decomposes linalg_svd into _linalg_svd
    for node in program.graph.nodes:
        if name in str(node.target):
            places = places_in_text(str(node.meta.get("stack_trace", "")), folder)
            if places:
                return places
    return []


def _first_lines(text: str, count: int = 3) -> str:
    return " ".join(line.strip() for line in text.strip().splitlines()[:count])
