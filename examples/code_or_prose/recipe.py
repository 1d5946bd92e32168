"""Is a line of source code or prose? Real lines of scikit-learn's own files, and a small transformer over their bytes.

Two inputs with a dynamic length (the bytes and a mask), two outputs: the classes' logits, and an embedding in which
similar lines are near each other, for searching.
"""

import ast
import functools
import importlib.metadata

import numpy as np
import torch
from torch import nn

LONGEST = 96
"""Bytes of a line that the model sees; shapes.sequence.max in pipeline.yaml."""
CLASSES = ("code", "prose")
PER_SPLIT = {"train": 10_000, "validation": 1_000, "test": 2_000}


def lines_of(text):
    """(line, class) of one file: what lies in docstrings and comments is prose, the rest is code."""
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            prose.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if line.startswith((">>>", "...")):
            continue  # code within prose: neither
        bare = line.strip('#"` ')  # the rest would give the class away
        if len(bare) >= 12:
            yield bare, int(number in prose or line.startswith("#"))


def shuffled(values):
    return [values[index] for index in np.random.default_rng(0).permutation(len(values))]


@functools.cache  # reading and parsing 300 files takes a second
def load(split):
    """Balanced lines of the split's files. No file is in two splits, and no line either."""
    package = importlib.metadata.distribution("scikit-learn")
    names = sorted(str(f) for f in package.files if f.suffix == ".py" and "tests" not in f.parts)
    names = shuffled(names)
    a, b = round(0.7 * len(names)), round(0.8 * len(names))
    files = {"train": names[:a], "validation": names[a:b], "test": names[b:]}
    seen, chosen = set(), {0: [], 1: []}
    for part in ("train", "validation", "test"):
        for name in files[part]:
            for line, kind in lines_of(package.locate_file(name).read_text(encoding="utf-8")):
                if line not in seen and part == split:
                    chosen[kind].append(line)
                seen.add(line)
        if part == split:
            break
    rows = []
    for kind, lines in chosen.items():
        rows += [(line, kind) for line in shuffled(lines)[: PER_SPLIT[split] // 2]]
    return shuffled(rows)


class Lines:
    def __init__(self, split):
        self.rows = load(split)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        line, kind = self.rows[index]
        tokens = np.frombuffer(line.encode()[:LONGEST], np.uint8).astype(np.int64)
        return {"tokens": tokens, "mask": np.ones(len(tokens), np.int64)}, kind


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, hidden, visible):
        parts = self.project(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        hidden = hidden + self.merge(mixed.transpose(1, 2).flatten(2))
        return hidden + self.think(self.norm2(hidden))


class Reader(nn.Module):
    def __init__(self, width=48, heads=4, blocks=2, embedding=32):
        super().__init__()
        self.letters, self.places = nn.Embedding(256, width), nn.Embedding(LONGEST, width)
        self.neighbours = nn.Conv1d(width, width, 5, padding=2)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.embed, self.classify = nn.Linear(width, embedding), nn.Linear(embedding, len(CLASSES))

    def forward(self, tokens, mask):
        weights = mask.to(self.letters.weight.dtype).unsqueeze(-1)
        places = torch.arange(tokens.size(1), device=tokens.device)
        hidden = (self.letters(tokens) + self.places(places)) * weights  # so that padding is nobody's neighbour
        hidden = hidden + self.neighbours(hidden.transpose(1, 2)).transpose(1, 2)
        visible = (mask > 0)[:, None, None, :]
        for block in self.blocks:
            hidden = block(hidden, visible)
        mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1.0)
        embedding = self.embed(mean)
        return {"logits": self.classify(embedding), "embedding": nn.functional.normalize(embedding, dim=-1)}


class Quality:
    """The share of lines whose class is right, and of lines whose nearest other line is of their class."""

    def __init__(self):
        self.right, self.embeddings, self.kinds = [], [], []

    def update(self, outputs, targets):
        self.right.append(outputs["logits"].argmax(1) == targets)
        self.embeddings.append(outputs["embedding"])
        self.kinds.append(targets)

    def result(self):
        embeddings, kinds = np.concatenate(self.embeddings), np.concatenate(self.kinds)
        similar = embeddings @ embeddings.T
        np.fill_diagonal(similar, -np.inf)
        return {
            "accuracy": np.concatenate(self.right).mean(),
            "neighbour_accuracy": (kinds[similar.argmax(1)] == kinds).mean(),
        }


class CodeOrProse:
    outputs = ("logits", "embedding")

    def model(self):
        return Reader()

    def train_data(self):
        return Lines("train")

    def validation_data(self):
        return Lines("validation")

    def test_data(self):
        return Lines("test")

    def collate(self, items):
        """Pads to the longest line of the batch."""
        longest = max(len(inputs["tokens"]) for inputs, _ in items)
        inputs = {
            name: torch.from_numpy(np.stack([np.pad(i[name], (0, longest - len(i[name]))) for i, _ in items]))
            for name in ("tokens", "mask")
        }
        return inputs, torch.tensor([kind for _, kind in items])

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs["logits"], targets, reduction="none")

    def metric(self):
        return Quality()

    def example(self, sizes):
        """A line cut or continued to the asked length; the rows differ in how much of it is masked."""
        rows, length = sizes["batch"], sizes["sequence"]
        lines = load("validation")
        tokens, mask = np.zeros((rows, length), np.int64), np.zeros((rows, length), np.int64)
        for row in range(rows):
            text = " ".join(line for line, _ in lines[row : row + 10]).encode()[: max(1, length - row % 7)]
            tokens[row, : len(text)] = np.frombuffer(text, np.uint8)
            mask[row, : len(text)] = 1
        return {"tokens": tokens, "mask": mask}
