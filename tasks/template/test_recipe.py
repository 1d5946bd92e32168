"""Quick checks that the parts of the recipe fit each other. Run with: pytest"""

from __future__ import annotations

import numpy as np
import torch
from recipe import Recipe
from torch.utils.data import DataLoader


def test_the_model_takes_a_batch_and_the_loss_gives_one_value_per_sample() -> None:
    recipe = Recipe()
    inputs, targets = next(iter(DataLoader(recipe.train_data(), batch_size=3)))
    outputs = recipe.model()(**inputs)
    loss = recipe.loss({"logits": outputs}, targets)
    assert loss.shape == (3,)
    assert torch.isfinite(loss).all()


def test_the_metric_of_right_answers_is_one() -> None:
    metric = Recipe().metric()
    targets = np.array([0, 1, 1])
    metric.update({"logits": np.eye(2)[targets]}, targets)
    assert metric.result() == {"accuracy": 1.0}


def test_no_test_sample_is_a_training_sample() -> None:
    recipe = Recipe()
    train = {tuple(inputs["point"].tolist()) for inputs, _ in recipe.train_data()}
    test = {tuple(inputs["point"].tolist()) for inputs, _ in recipe.test_data()}
    assert not train & test
