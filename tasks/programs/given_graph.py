"""A graph that a training program left itself, in the place of a model: the same checks ask it the same questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import ModelProto
from torch import Tensor, nn

from .export_eager import refused
from .export_runtime import open_session
from .failures import names
from .recipe import Recipe


class GivenGraph(nn.Module):
    """Answers by ONNX Runtime, as the recipe's model would by PyTorch."""

    def __init__(self, path: Path, *, threads: int) -> None:
        super().__init__()
        self._session: Any = open_session(path, threads=threads)
        self._names = [output.name for output in self._session.get_outputs()]

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        values = self._session.run(self._names, {name: value.numpy() for name, value in inputs.items()})
        return {name: torch.from_numpy(value) for name, value in zip(self._names, values, strict=True)}


def read_graph(path: Path, recipe: Recipe) -> ModelProto:
    """The file as a message, weights beside it included; refused where it gives other outputs than the recipe names."""
    try:
        proto = onnx.load(path)
    except Exception as error:  # protobuf's, and of several kinds
        raise refused(
            f"it cannot be read as an ONNX graph: {error}",
            hint="write it with torch.onnx.export or onnx.save",
            where=path.name,
        ) from error
    given = [value.name for value in proto.graph.output]
    if sorted(given) != sorted(recipe.outputs):
        raise refused(
            f"it gives {names(given)}; the recipe's outputs are {names(recipe.outputs)}",
            hint="name the graph's outputs as the recipe does",
            where=path.name,
        )
    return proto


def opset_of(proto: ModelProto) -> int:
    return next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
