"""The digits of examples/digits for a tiny vision transformer; its training is in train_hf.py."""

import numpy as np
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset
from transformers import ViTConfig, ViTForImageClassification

SHARES = {"train": (0.0, 0.6), "validation": (0.6, 0.8), "test": (0.8, 1.0)}


class Images(Dataset):
    """One split. The shuffle is fixed, so that a test image is one in every run."""

    def __init__(self, split):
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        first, last = (round(share * len(order)) for share in SHARES[split])
        chosen = order[first:last]
        self.images = (digits.images[chosen, None] / 16).astype(np.float32)
        self.labels = digits.target[chosen].astype(np.int64)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index]}, self.labels[index]


class Network(nn.Module):
    """Logits alone, without the dict that Transformers' models return."""

    def __init__(self):
        super().__init__()
        self.vit = ViTForImageClassification(
            ViTConfig(
                image_size=8, patch_size=2, num_channels=1, num_labels=10,
                hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
            )
        )  # fmt: skip

    def forward(self, pixel_values):
        return self.vit(pixel_values=pixel_values).logits


class Accuracy:
    def __init__(self):
        self.right = self.seen = 0

    def update(self, outputs, targets):
        self.right += int((outputs["logits"].argmax(1) == targets).sum())
        self.seen += len(targets)

    def result(self):
        return {"accuracy": self.right / self.seen}


class Digits:
    outputs = ("logits",)

    def model(self):
        return Network()

    def train_data(self):
        return Images("train")

    def validation_data(self):
        return Images("validation")

    def test_data(self):
        return Images("test")

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs["logits"], targets, reduction="none")

    def metric(self):
        return Accuracy()
