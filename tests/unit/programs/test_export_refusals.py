"""Small recipes that export badly in one way each; every one is refused, and the refusal names the right cause."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

WITH_LINEAR = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
{more}
    def forward(self, x):
{body}
"""


def model(body: str, more: str = "") -> str:
    return WITH_LINEAR.format(
        body=textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8),
        more=textwrap.indent(textwrap.dedent(more).strip("\n"), " " * 8),
    )


@dataclass(frozen=True)
class Bad:
    """A recipe, and what the refusal must say."""

    model: str
    where: str
    says: str
    hint: str
    line: str | None = None
    """A line of the recipe that must be named as the place."""
    job: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)


SEQUENCES: dict[str, Any] = {
    "inputs": {"x": {"dtype": "float32", "shape": ["batch", "sequence", 4]}},
    "shapes": {"batch": {"min": 1, "opt": 4, "max": 8}, "sequence": {"min": 1, "opt": 5, "max": 12}},
    "data": """
def rows(count, seed):
    made = np.random.default_rng(seed).normal(size=(count, 6, 4)).astype(np.float32)
    return [({"x": row}, np.int64(row[0, 0] > 0)) for row in made]
""",
}

BAD = {
    "a squeeze without an axis takes the batch away at one row": Bad(
        model("return self.linear(x).unsqueeze(-1).squeeze()"),
        where="output y, axis 0 (batch)",
        says="in the shape [3] at batch 1",
        hint="squeeze() without an axis",
    ),
    "an if on the number of rows": Bad(
        model(
            """
            h = self.linear(x)
            if x.size(0) == 3:
                h = h + 0
            return h
            """
        ),
        where="input x, axis batch",
        says="batch is declared dynamic, but the graph would only work at 3",
        hint="an if on a size",
        line="if x.size(0) == 3:",
    ),
    "a squeeze that looks at size(0)": Bad(
        model(
            """
            h = self.linear(x).unsqueeze(1)
            if h.size(0) > 4:
                h = h * 1.0
            return h.squeeze(1)
            """
        ),
        where="axes batch",
        says="does not work for all declared sizes",
        hint="an if on a size",
        line="if h.size(0) > 4:",
    ),
    "a number of rows baked in by repeat(len(x), 1)": Bad(
        model("return self.linear(x) + torch.ones(1, 3).repeat(len(x), 1)"),
        where="input x, axis batch",
        says="would only work at 3",
        hint="repeat(len(x), 1)",
        line="return self.linear(x) + torch.ones(1, 3).repeat(len(x), 1)",
    ),
    "a reshape to a fixed number of rows": Bad(
        model("return self.linear(x).reshape(4, 3)"),
        where="{line}",
        says="raises RuntimeError at batch 1",
        hint="reshape to fixed sizes",
        line="return self.linear(x).reshape(4, 3)",
    ),
    "dropout that stays on under eval()": Bad(
        model("return self.head(x)", "self.head = Head()")
        + """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return F.dropout(self.linear(x), 0.5)
""",
        where="module head",
        says="the same request twice gives different answers",
        hint="F.dropout(x, p) without training=self.training",
    ),
    "noise in forward": Bad(
        model("return self.linear(x) + torch.rand(1)"),
        where="Model.forward",
        says="the same request twice gives different answers",
        hint="torch.rand",
    ),
    "a module that does not follow eval()": Bad(
        model("return self.norm(self.linear(x))", "self.norm = Stubborn(3)")
        + """
class Stubborn(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(True)
""",
        where="module norm",
        says="still in training mode: norm",
        hint="a train() or eval() of the model's own",
    ),
    "forward that calls self.train()": Bad(
        model(
            """
            self.train()
            return self.linear(x)
            """
        ),
        where="module Model",
        says="still in training mode",
        hint="forward calling self.train()",
    ),
    "a branch on the values": Bad(
        model(
            """
            if x.sum() > 0:
                return self.linear(x)
            return -self.linear(x)
            """
        ),
        where="{line}",
        says="depends on the values of its inputs",
        hint="torch.where",
        line="if x.sum() > 0:",
    ),
    "an if on the length being 1, which the capture does not see": Bad(
        model(
            """
            h = self.linear(x)
            return h.sum(1) if x.size(1) > 1 else h.squeeze(1) + 1
            """
        ),
        where="output y",
        says="the graph answers otherwise than PyTorch at batch 4, sequence 1: largest difference 1 at",
        hint="an if on a size that took the traced size's branch",
        bench=SEQUENCES,
    ),
    "an if on the batch being 1": Bad(
        model("return self.linear(x) if len(x.shape) == 2 and x.size(0) > 1 else self.linear(x) + 1"),
        where="output y, axis 0 (batch)",
        says="a row's answer depends on the other rows",
        hint="an if on size(0)",
    ),
    "rows that know of each other": Bad(
        model("return torch.softmax(self.linear(x), 0)"),
        where="output y, axis 0 (batch)",
        says="a row's answer depends on the other rows",
        hint="softmax over axis 0",
    ),
    "an output without the batch axis": Bad(
        model("return self.linear(x).mean()"),
        where="output y, axis 0 (batch)",
        says="its first axis must be the batch's",
        hint="a mean or sum over all axes",
    ),
    "a number of rows that depends on the data": Bad(
        model("return self.linear(x)[x[:, 0] > 0]"),
        where="output y, axis 0 (batch)",
        says="its first axis must be the batch's",
        hint="a number of rows that depends on the data",
    ),
    "a table of positions shorter than the range": Bad(
        model(
            "return self.linear(x + self.places(torch.arange(x.size(1)))).mean(1)", "self.places = nn.Embedding(10, 4)"
        ),
        where="{line}",
        says="raises IndexError at batch 4, sequence 12",
        hint="a table of positions shorter than the range",
        line="return self.linear(x + self.places(torch.arange(x.size(1)))).mean(1)",
        bench=SEQUENCES,
    ),
    "a sequence length baked in": Bad(
        model("return self.linear(x + torch.ones(int(x.shape[1]), 4) * len(x[0])).mean(1)"),
        where="input x, axis sequence",
        says="sequence is declared dynamic, but the graph would only work at 5",
        hint="len(x)",
        line="return self.linear(x + torch.ones(int(x.shape[1]), 4) * len(x[0])).mean(1)",
        bench=SEQUENCES,
    ),
    "axes that must be equal": Bad(
        model("return self.linear(x + x.transpose(1, 0)).mean(1)"),
        where="{line}",
        says="raises RuntimeError",
        hint="narrow the range in shapes",
        line="return self.linear(x + x.transpose(1, 0)).mean(1)",
        bench=SEQUENCES,
    ),
    "an operator without a translation": Bad(
        model("return torch.linalg.svd(self.linear(x)[:, None, :])[2][:, 0]"),
        where="operator aten._linalg_svd",
        says="has no ONNX translation",
        hint="compute it from other operators",
        line="return torch.linalg.svd(self.linear(x)[:, None, :])[2][:, 0]",
    ),
    "an opset that the exporter does not write": Bad(
        model("return self.linear(x) + x.mean(1, keepdim=True)"),
        where="export.opset_version",
        says="opset 17 was asked for, and 18 was written",
        hint="set export.opset_version: 18",
        job={"opset_version": 17},
    ),
    "nan for some inputs": Bad(
        model("return torch.log(self.linear(x) * 0 - 1)"),
        where="output y (float32)",
        says="the model gives nan or infinity at batch",
        hint="log(0)",
    ),
    "fp16 that overflows": Bad(
        model("return (self.linear(x).half() * 300).square() * 100"),
        where="output y (float16)",
        says="the model gives nan or infinity",
        hint="fp16 ends at 65504",
    ),
    "a weight that is missing": Bad(
        model("return self.linear(x)"),
        where="{weights}",
        says="the file lacks linear.weight",
        hint='did you mean "linear.wieght"?',
        job={"weights": {"linear.wieght": (3, 4), "linear.bias": (3,)}},
    ),
    "a weight of another shape": Bad(
        model("return self.linear(x)"),
        where="{weights}",
        says="linear.weight is [3, 5] in the file and [3, 4] in the model",
        hint="train again",
        job={"weights": {"linear.weight": (3, 5), "linear.bias": (3,)}},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_with_its_cause(name, bench, failure_of):
    import torch
    from safetensors.torch import save_file

    bad = BAD[name]
    made = bench(model=bad.model, **bad.bench)
    job = dict(bad.job)
    weights = made.folder / "weights.safetensors"
    if "weights" in job:
        save_file({key: torch.zeros(shape) for key, shape in job.pop("weights").items()}, weights)
    else:
        weights = made.weights()

    failure = failure_of(made.export, weights, **job)

    assert failure.kind == "export refused", str(failure)
    text = made.file.read_text().splitlines()
    line = next((n for n, t in enumerate(text, 1) if t.strip() == bad.line), None)
    assert bad.says in failure.message, str(failure)
    assert bad.hint in (failure.hint or ""), str(failure)
    assert failure.where == bad.where.format(line=f"{made.file}:{line}", weights=weights), str(failure)
    if bad.line:
        assert failure.place is not None
        assert (failure.place.file, failure.place.line) == (made.file, line)
    assert not list((made.folder / "export" / "output").iterdir())
    assert str(Path(__file__).parents[3] / "tasks") not in str(failure)
