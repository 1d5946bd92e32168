"""The loop as one process; torchrun and several ranks are in tests/integration/test_programs.py."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file

OPTIMIZER = "    def optimizer(self, model):\n        return torch.optim.SGD(model.parameters(), lr={lr})\n"


def with_optimizer(made, lr):
    made.file.write_text(made.file.read_text() + OPTIMIZER.format(lr=lr))
    return made


def test_it_leaves_plain_weights_and_metrics_without_times(bench):
    made = bench()
    output = made.train(max_epochs=3, learning_rate=0.05)
    assert sorted(path.name for path in output.iterdir()) == ["metrics.json", "model.safetensors"]
    assert set(load_file(output / "model.safetensors")) == {"linear.weight", "linear.bias"}
    report = json.loads((output / "metrics.json").read_text())
    assert [entry["epoch"] for entry in report["history"]] == [1, 2, 3]
    assert report["history"][-1]["steps"] == 3 * 7
    assert report["history"][-1]["train_loss"] < report["history"][0]["train_loss"]
    assert report["metrics"]["validation_accuracy"] == report["history"][-1]["validation"]["accuracy"] > 0.5
    assert report["samples"] == {"train": 50, "validation": 23}
    assert (report["parameters"], report["world_size"]) == (15, 1)
    notes = json.loads((made.folder / "train" / "work" / "notes.json").read_text())
    assert {"load", "train", "save", "total"} <= set(notes["seconds"])


def test_the_same_job_gives_the_same_bytes_and_another_seed_others(bench):
    outputs = [bench().train() for _ in range(2)]
    for name in ("model.safetensors", "metrics.json"):
        assert (outputs[0] / name).read_bytes() == (outputs[1] / name).read_bytes()
    other = bench().train(seed=1)
    assert (other / "model.safetensors").read_bytes() != (outputs[0] / "model.safetensors").read_bytes()


def test_loading_processes_do_not_change_the_result(bench):
    outputs = [bench().train(num_workers=workers) for workers in (0, 1)]
    assert (outputs[0] / "model.safetensors").read_bytes() == (outputs[1] / "model.safetensors").read_bytes()


def test_the_loss_of_an_epoch_is_the_mean_over_all_samples(bench):
    made = with_optimizer(bench(), lr=0.0)
    output = made.train(max_epochs=1, batch_size=7)
    report = json.loads((output / "metrics.json").read_text())["history"][0]
    recipe = made.recipe()
    model = recipe.model(["x"])
    model.load_state_dict(load_file(output / "model.safetensors"))
    for split, name in (("train", "train_loss"), ("validation", "validation_loss")):
        inputs, targets = recipe.batch(list(recipe.data(split, ["x"])))
        with torch.no_grad():
            expected = recipe.losses(recipe.forward(model, inputs), targets).mean()
        assert report[name] == pytest.approx(float(expected), rel=1e-5)


def test_a_loss_that_is_not_finite_ends_training_with_step_and_rate(bench, failure_of):
    made = with_optimizer(bench(), lr=3e38)
    failure = failure_of(made.train)
    assert failure.kind == "training failed"
    assert failure.message.startswith("the loss is ")
    assert failure.message.endswith("at step 2, learning rate 3e+38")
    assert "too high a learning rate" in failure.hint


def test_weights_that_are_not_finite_after_the_last_step_are_not_kept(bench, failure_of):
    made = with_optimizer(bench(), lr=3e38)
    made.file.write_text(made.file.read_text().replace('outputs["y"], targets', 'outputs["y"] * 1e6, targets'))
    failure = failure_of(made.train, max_epochs=1, batch_size=64)
    assert failure.kind == "training failed"
    assert "hold nan or infinity after the last update" in failure.message
    assert not list((made.folder / "train" / "output").iterdir())


def test_a_metric_that_is_undefined_early_does_not_end_training(bench):
    made = bench()
    made.file.write_text(made.file.read_text().replace("self.right / self.seen", 'float("nan")'))
    report = json.loads((made.train() / "metrics.json").read_text())
    assert report["history"][0]["validation"] == {"accuracy": None}
    assert "validation_accuracy" not in report["metrics"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"learning_rate": 0.1}, "so train.learning_rate (0.1) would have no effect"),
        ({"precision": "fp8"}, 'train.precision "fp8" is not known'),
        ({"device": "cuda"}, "torch sees no CUDA device"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(config, says, bench, failure_of):
    if config.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    failure = failure_of(with_optimizer(bench(), lr=0.1).train, **config)
    assert failure.kind == "configuration"
    assert says in failure.message


def test_the_test_split_is_left_alone(bench):
    made = bench()
    made.file.write_text(made.file.read_text().replace("return rows(21, 3)", 'raise AssertionError("peeked")'))
    made.export(made.train() / "model.safetensors")


def test_progress_is_told_as_json_lines(bench, capsys):
    bench().train(max_epochs=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::progress ")]
    told = [json.loads(line.removeprefix("::progress ")) for line in lines]
    assert told[-1]["done"] == told[-1]["total"] == 14
    assert re.fullmatch(r"epoch 2/2, [\d,]+ samples/s", told[-1]["text"])
    assert all(re.fullmatch(r"epoch \d/2(, [\d,]+ samples/s, \d+:\d\d left)?", line["text"]) for line in told[:-1])
    assert {"loss", "validation_loss", "accuracy"} == set(told[-1]["metrics"])
    assert set(told[0]["metrics"]) == {"loss"}  # of the first epoch so far
    assert told[0]["metrics"]["loss"] == pytest.approx(told[-1]["metrics"]["loss"], rel=0.5)
    assert all(line["samples_per_second"] > 0 and line["seconds_left"] >= 0 for line in told)
    assert told[-1]["seconds_left"] == 0
