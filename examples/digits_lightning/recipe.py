"""The digits of examples/digits; its training is in train_fabric.py, which takes model, data and loss from here."""

import numpy as np
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

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
        return {"image": self.images[index]}, self.labels[index]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )  # fmt: skip
        self.classify = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))

    def forward(self, image):
        return self.classify(self.features(image))


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
