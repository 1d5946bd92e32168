"""The recipe: model, data, loss and metric. Replace each by your own; `test_recipe.py` checks that they fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Recipe:
    """Tells two interleaved spirals apart. A plain class: nothing needs to be imported from Enginehouse."""

    outputs = ("logits",)

    def model(self) -> nn.Module:
        return SpiralNet()

    def train_data(self) -> Dataset[Any]:
        return Spirals(samples=2000, seed=1)

    def validation_data(self) -> Dataset[Any]:
        return Spirals(samples=500, seed=2)

    def test_data(self) -> Dataset[Any]:
        """Seen by the gates only."""
        return Spirals(samples=500, seed=3)

    def loss(self, outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        """One value per sample."""
        return nn.functional.cross_entropy(outputs["logits"], targets, reduction="none")

    def metric(self) -> Accuracy:
        return Accuracy()


class SpiralNet(nn.Module):
    """The argument of `forward` is the input of the pipeline file."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, point: Tensor) -> Any:
        return self.layers(point)


class Spirals(Dataset[Any]):
    """Points on two noisy spiral arms, made up from a seed. Raise the `version` in pipeline.yaml when you change it."""

    def __init__(self, samples: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.arms = torch.arange(samples) % 2
        along = torch.rand(samples, generator=random).sqrt()
        angle = along * 6 + self.arms * torch.pi
        points = torch.stack([angle.cos(), angle.sin()], dim=1) * along[:, None]
        self.points = points + 0.02 * torch.randn(samples, 2, generator=random)

    def __len__(self) -> int:
        return len(self.arms)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        """One sample without the batch axis: the inputs by name, and the target."""
        return {"point": self.points[index]}, self.arms[index]


class Accuracy:
    """The one metric, over plain arrays, batch by batch: on PyTorch, on ONNX, on the engine and on the live server."""

    def __init__(self) -> None:
        self.right = self.seen = 0

    def update(self, outputs: dict[str, np.ndarray], targets: np.ndarray) -> None:
        self.right += int((outputs["logits"].argmax(axis=1) == targets).sum())
        self.seen += len(targets)

    def result(self) -> dict[str, float]:
        return {"accuracy": self.right / self.seen}
