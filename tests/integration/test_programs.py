"""The programs as stages start them: real torchrun, real processes, the real examples."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "tasks" / "programs" / "bootstrap.py"
TORCHRUN = [sys.executable, "-I", "-m", "torch.distributed.run", "--standalone", "--no-python"]


@dataclass(frozen=True)
class Pipeline:
    """A folder with a recipe, and the jobs that a stage would write for it."""

    folder: Path
    recipe: str
    inputs: dict[str, Any]
    shapes: dict[str, Any]
    results: Path

    @property
    def reference(self) -> str:
        return f"{self.folder}/{self.recipe}"

    def start(self, program: str, name: str, *, ranks: int = 0, status: int = 0, **job: object) -> Path:
        """Run one program as a stage does, with another current folder; gives its output folder."""
        folder = self.results / name
        folder.mkdir(parents=True)
        output = folder / "output"
        common = {"recipe": self.reference, "inputs": self.inputs, "shapes": self.shapes, "threads": 1}
        job = {**common, "output": str(output), "work": str(folder / "work"), **job}
        (folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, "-I", "-u", str(BOOTSTRAP), program, str(folder / "job.json")]
        if ranks:
            command = [*TORCHRUN, "--nproc-per-node", str(ranks), "--", *command]
        with (folder / "log").open("w") as log:
            done = subprocess.run(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, timeout=300, check=False)
        assert done.returncode == status, (folder / "log").read_text()[-4000:]
        return output

    def train(self, name: str = "train", *, ranks: int = 2, status: int = 0, **config: object) -> Path:
        settings = {"max_epochs": 2, "batch_size": 64, "seed": 0, **config}
        return self.start("train", name, ranks=ranks, status=status, config=settings)

    def export(self, weights: Path, name: str = "export") -> Path:
        return self.start("export", name, weights=str(weights / "model.safetensors"), parity={"atol": 1e-4})


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def example(name: str, root: Path) -> tuple[Pipeline, dict[str, Any]]:
    """A copy of an example somewhere else."""
    shutil.copytree(ROOT / "examples" / name, root / "user" / name, ignore=shutil.ignore_patterns("__pycache__"))
    declared = yaml.safe_load((root / "user" / name / "pipeline.yaml").read_text())
    pipeline = Pipeline(
        root / "user" / name, declared["recipe"], declared["inputs"], declared["shapes"], root / "results"
    )
    return pipeline, declared


def settings(declared: dict[str, Any]) -> dict[str, Any]:
    train = declared["train"]
    return {"max_epochs": train["max_epochs"], "batch_size": train["batch_size"], "seed": train["seed"]}


def same(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


SMALL = """
import numpy as np
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x)


def rows(count, seed):
    made = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return [({"x": row}, np.int64(row[0] > 0)) for row in made]


class Accuracy:
    def __init__(self):
        self.right = self.seen = 0

    def update(self, outputs, targets):
        self.right += int((outputs["y"].argmax(1) == targets).sum())
        self.seen += len(targets)

    def result(self):
        return {"accuracy": self.right / self.seen, "seen": self.seen}


class Small:
    outputs = ("y",)

    def model(self):
        return Model()

    def train_data(self):
        return rows(53, 1)

    def validation_data(self):
        return rows(19, 2)

    def test_data(self):
        return rows(21, 3)

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs["y"], targets, reduction="none")

    def metric(self):
        return Accuracy()
"""


def small(root: Path, source: str = SMALL) -> Pipeline:
    folder = root / "user"
    folder.mkdir(parents=True)
    (folder / "recipe.py").write_text(source)
    return Pipeline(
        folder,
        "recipe.py:Small",
        {"x": {"dtype": "float32", "shape": ["batch", 4]}},
        {"batch": {"min": 1, "opt": 4, "max": 8}},
        root / "results",
    )


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Digits trained by two processes and exported, twice: from two folders."""
    made = []
    for _ in range(2):
        pipeline, declared = example("digits", tmp_path_factory.mktemp("somewhere"))
        trained = pipeline.train(**settings(declared))
        made.append((pipeline, trained, pipeline.export(trained)))
    return made


def test_the_same_job_in_another_folder_gives_the_same_bytes(digits):
    (_, trained, exported), (_, trained_again, exported_again) = digits
    for name in ("model.safetensors", "metrics.json"):
        assert same(trained / name, trained_again / name)
    for name in ("model.onnx", "signature.json"):
        assert same(exported / name, exported_again / name)


def test_digits_is_as_accurate_on_onnxruntime_as_on_pytorch_and_golden_answers_agree(digits):
    pipeline, trained, exported = digits[0]
    weights = str(trained / "model.safetensors")
    golden = pipeline.start("evaluate", "pytorch", runtime="pytorch", weights=weights, batch_size=32, write_golden=True)
    onnx = pipeline.start(
        "evaluate",
        "onnxruntime",
        runtime="onnxruntime",
        onnx=str(exported / "model.onnx"),
        batch_size=32,
        compare_golden=str(golden / "golden.safetensors"),
    )
    one, other = read(golden / "report.json"), read(onnx / "report.json")
    assert one["metrics"]["accuracy"] >= 0.95
    assert other["metrics"] == one["metrics"]
    assert one["samples"] == 359
    assert other["golden"]["max_abs_difference"] < 1e-4


def test_products_hold_no_times_and_no_folders(digits):
    pipeline, trained, exported = digits[0]
    for path in (*trained.iterdir(), *exported.iterdir()):
        content = path.read_bytes()
        assert str(pipeline.folder.parents[1]).encode() not in content, path
        assert b"seconds" not in content, path


@pytest.mark.parametrize("name", ["mnist", "code_or_prose"])
def test_the_other_examples_train_export_and_measure_alike_on_both_runtimes(name, tmp_path):
    pipeline, declared = example(name, tmp_path)
    trained = pipeline.train(**{**settings(declared), "max_epochs": 1})
    exported = pipeline.export(trained)
    ask = {"batch_size": 32, "metric": True}
    one = read(
        pipeline.start("evaluate", "torch", runtime="pytorch", weights=str(trained / "model.safetensors"), **ask)
        / "report.json"
    )
    other = read(
        pipeline.start("evaluate", "onnx", runtime="onnxruntime", onnx=str(exported / "model.onnx"), **ask)
        / "report.json"
    )
    assert set(one["metrics"]) == set(declared["gates"]["metrics"])
    for metric, value in one["metrics"].items():
        assert value > 0.7, metric
        assert other["metrics"][metric] == pytest.approx(value, abs=0.001)
    found = read(exported / "signature.json")
    assert {t["name"]: t["shape"] for t in found["inputs"]} == {n: s["shape"] for n, s in declared["inputs"].items()}


def test_the_loss_curve_does_not_depend_on_the_number_of_processes(tmp_path):
    """53 and 19 rows in batches of 10 divide by nothing: padding must not count."""
    histories = []
    for ranks in (1, 2, 3):
        pipeline = small(tmp_path / str(ranks))
        report = read(pipeline.train(ranks=ranks, max_epochs=3, batch_size=10) / "metrics.json")
        assert report["world_size"] == ranks
        histories.append(report["history"])
    for history in histories[1:]:
        for mine, alone in zip(history, histories[0], strict=True):
            assert mine["train_loss"] == pytest.approx(alone["train_loss"], abs=2e-6)
            assert mine["validation_loss"] == pytest.approx(alone["validation_loss"], abs=2e-6)
            assert mine["validation"] == alone["validation"]
            assert mine["validation"]["seen"] == 19


def test_a_users_modules_of_our_names_are_the_users_and_ours_are_ours(tmp_path):
    """A folder with its own tasks.py, flows/, train.py, metrics.py, export.py, notes.py beside recipe.py."""
    pipeline = small(
        tmp_path,
        "import tasks, flows, train, export, metrics, notes, evaluate, jobs, batches\n"
        "import flows.inner\n"
        "for module in (tasks, flows, train, export, metrics, notes, evaluate, jobs, batches, flows.inner):\n"
        '    assert module.MINE == "the user\'s", module\n'
        "Accuracy = None\n" + SMALL.replace("return Accuracy()", "return metrics.Accuracy()"),
    )
    for name in ("tasks", "train", "export", "notes", "evaluate", "jobs", "batches"):
        (pipeline.folder / f"{name}.py").write_text('MINE = "the user\'s"\n')
    accuracy = SMALL[SMALL.index("class Accuracy") : SMALL.index("class Small")]
    (pipeline.folder / "metrics.py").write_text('MINE = "the user\'s"\n' + accuracy)
    (pipeline.folder / "flows").mkdir()
    (pipeline.folder / "flows" / "__init__.py").write_text('MINE = "the user\'s"\n')
    (pipeline.folder / "flows" / "inner.py").write_text('MINE = "the user\'s"\n')
    trained = pipeline.train()
    exported = pipeline.export(trained)
    report = pipeline.start(
        "evaluate", "evaluate", runtime="onnxruntime", onnx=str(exported / "model.onnx"), batch_size=8
    )
    assert read(report / "report.json")["metrics"]["seen"] == 21
    assert not list(pipeline.folder.rglob("__pycache__"))


def test_the_rank_that_failed_is_named_and_not_its_victim(tmp_path):
    source = SMALL.replace(
        "    def loss(self, outputs, targets):\n",
        "    def loss(self, outputs, targets):\n"
        "        import os\n"
        '        if os.environ["RANK"] == "1" and torch.is_grad_enabled():\n'
        '            raise ValueError("only here")\n',
    )
    pipeline = small(tmp_path, source)
    began = time.monotonic()
    output = pipeline.train(status=1)
    assert time.monotonic() - began < 60
    failure = read(output / "error.json")
    assert failure["kind"] == "configuration"
    assert failure["rank"] == 1
    assert "Small.loss() raised ValueError: only here" in failure["message"]
    assert (
        'raise ValueError("only here")' in (pipeline.folder / "recipe.py").read_text().splitlines()[failure["line"] - 1]
    )
    assert sorted(path.name for path in output.iterdir()) == ["error.json", "failures"]
    marks = [str(pipeline.results)]
    left = [p for p in psutil.process_iter(["cmdline"]) if any(m in " ".join(p.info["cmdline"] or ()) for m in marks)]
    assert not left


def test_a_loss_that_is_not_finite_reaches_the_user_from_any_rank(tmp_path):
    pipeline = small(tmp_path, SMALL.replace('outputs["y"], targets', 'outputs["y"] * float("inf"), targets'))
    failure = read(pipeline.train(status=1) / "error.json")
    assert failure["kind"] == "training failed"
    assert "at step 1, learning rate 0.001" in failure["message"]


def test_a_failure_is_printed_last_and_written_without_our_frames(tmp_path):
    pipeline = small(tmp_path, "import nothing_of_that_name\n" + SMALL)
    output = pipeline.train(ranks=0, status=1)
    log = (pipeline.results / "train" / "log").read_text()
    assert log.splitlines()[-1].startswith("install it into this environment")
    assert "Traceback" not in log
    failure = read(output / "error.json")
    assert (failure["file"], failure["line"]) == (str(pipeline.folder / "recipe.py"), 1)


def test_what_an_earlier_attempt_left_does_not_outlive_a_success(tmp_path):
    pipeline = small(tmp_path, "import nothing_of_that_name\n" + SMALL)
    output = pipeline.train(ranks=0, status=1)
    (pipeline.folder / "recipe.py").write_text(SMALL)
    config = {"max_epochs": 1, "batch_size": 8, "seed": 0}
    pipeline.start("train", "again", config=config, output=str(output))
    assert sorted(path.name for path in output.iterdir()) == ["metrics.json", "model.safetensors"]


def test_a_library_that_is_missing_is_named_with_the_way_to_get_it(tmp_path):
    pipeline = small(tmp_path)
    job = {
        "recipe": pipeline.reference,
        "inputs": pipeline.inputs,
        "shapes": pipeline.shapes,
        "output": str(tmp_path / "output"),
        "work": str(tmp_path / "work"),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    code = (
        "import runpy, sys; sys.modules['onnxruntime'] = None; "
        f"sys.argv = ['bootstrap.py', 'export', {str(tmp_path / 'job.json')!r}]; "
        f"runpy.run_path({str(BOOTSTRAP)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    failure = read(tmp_path / "output" / "error.json")
    assert failure["kind"] == "tool missing"
    assert failure["message"] == "export needs onnxruntime, which this Python does not have"
    assert "enginehouse[cpu]" in failure["hint"]
