"""An interrupted training that goes on from its checkpoint gives the bytes of one that was never interrupted."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path

import pytest
import torch

from tasks.programs.checkpoints import damage
from tasks.programs.preemption import Preempted

# Stops itself at the eleventh step, once, as a machine that is taken away would have it.
STOPPING = """
    def loss(self, outputs, targets):
        import os, pathlib, signal
        if torch.is_grad_enabled():
            self.steps = getattr(self, "steps", 0) + 1
            mark = pathlib.Path(__file__).with_name("stopped")
            if self.steps == {parts} * 11 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGTERM)
        return F.cross_entropy(outputs["y"], targets, reduction="none")
"""

# Dropout, a batch norm's statistics, and augmentation: all that a resumed run could get wrong.
RICH_MODEL = """
import random

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        )

    def forward(self, x):
        return self.layers(x)


class Augmented(list):
    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        noise = np.random.normal(size=4) + random.random() + torch.randn(4).numpy()
        return {"x": (inputs["x"] + 0.1 * noise).astype(np.float32)}, target
"""

MOMENTUM = """
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
"""

SCHEDULES = {
    "one cycle": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps)",
    "cosine after a warm-up": "torch.optim.lr_scheduler.SequentialLR(optimizer, ["
    "torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), "
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps - 5)], [5])",
    "milestones": "torch.optim.lr_scheduler.MultiStepLR(optimizer, [9, 14])",
    # numpy's numbers are no Python numbers, and reading them back would run code.
    "numpy's": "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.6 + 0.4 * np.cos(step / total_steps))",
    "a plateau": 'torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", patience=0)',
}

CONFIGS = {
    "as it is": {},
    "micro-batches": {"gradient_accumulation_steps": 2},
    "bf16": {"precision": "bf16-mixed"},
    "fp16 with clipping": {"precision": "fp16-mixed", "max_grad_norm": 0.5},
    "loading processes": {"num_workers": 2},
    "the best epoch": {"monitor": {"metric": "accuracy", "mode": "max", "patience": None, "min_delta": 0.0}},
    "early stopping": {"monitor": {"metric": "loss", "mode": "min", "patience": 1, "min_delta": 0.02}},
    "written at once": {"checkpoint": {"asynchronous": False, "every_steps": 4}},
    "logged often": {"log_every_steps": 3},
}


def recipe(bench, *more, parts=1):
    made = bench(model=RICH_MODEL)
    source = made.file.read_text().replace("return rows(50, 1)", "return Augmented(rows(52, 1))")
    loss = source.index("    def loss")
    metric = source.index("    def metric")
    added = "".join(textwrap.indent(textwrap.dedent(part), "    ") for part in more)
    made.file.write_text(source[:loss] + STOPPING.format(parts=parts).lstrip("\n") + "\n" + source[metric:] + added)
    return made


def both(bench, *more, **config):
    """The output folders of a run that is not interrupted and of one that is."""
    settings = {"max_epochs": 4, "checkpoint": {"every_steps": 4}, "log_every_steps": 5, **config}
    parts = config.get("gradient_accumulation_steps", 1)
    plain = recipe(bench, *more, parts=parts)
    (plain.folder / "stopped").touch()
    stopped = recipe(bench, *more, parts=parts)
    with pytest.raises(Preempted, match=r"a checkpoint of step 1\d is written"):
        stopped.train(**settings)
    return plain.train(**settings), stopped.train(**settings)


def assert_equal(whole: Path, resumed: Path) -> None:
    for name in ("model.safetensors", "metrics.json"):
        assert (whole / name).read_bytes() == (resumed / name).read_bytes(), name

    def lines(output: Path) -> list[dict]:
        read = [json.loads(line) for line in (output.parent / "work" / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if k not in ("time", "samples_per_second")} for line in read]

    assert lines(whole) == lines(resumed)
    assert json.loads((resumed.parent / "work" / "notes.json").read_text())["facts"]["resumed_from_step"] >= 11


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_bytes_are_those_of_an_uninterrupted_run(config, bench):
    assert_equal(*both(bench, **config))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_optimizer_and_schedule_go_on_where_they_were(schedule, bench):
    scheduler = f"\ndef scheduler(self, optimizer, total_steps):\n    return {schedule}\n"
    assert_equal(*both(bench, MOMENTUM, scheduler))


def test_a_notice_by_a_signal_of_the_jobs_own_is_taken_too(bench):
    made = recipe(bench)
    made.file.write_text(made.file.read_text().replace("signal.SIGTERM", "signal.SIGUSR1"))
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Preempted):
        made.train(max_epochs=4, preemption_signal="USR1", log_every_steps=1)
    assert signal.getsignal(signal.SIGUSR1) is before


def interrupted(bench, **config):
    made = recipe(bench)
    with pytest.raises(Preempted):
        made.train(max_epochs=4, checkpoint={"every_steps": 4, "keep": 3}, log_every_steps=1, **config)
    return made, made.folder / "train" / "work" / "checkpoints"


def test_the_last_checkpoints_stay_and_are_whole(bench):
    _, folder = interrupted(bench)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["LATEST", "step-00000004", "step-00000008", "step-00000011"]
    assert (folder / "LATEST").read_text() == "step-00000011\n"
    assert all(damage(path) is None for path in folder.glob("step-*"))


@pytest.mark.parametrize("harm", ["cut", "changed", "gone", "no checksums"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_is_used(harm, bench, capsys):
    made, folder = interrupted(bench)
    whole = recipe(bench)
    (whole.folder / "stopped").touch()
    file = next((folder / "step-00000011").glob("*.distcp"))
    match harm:
        case "cut":
            os.truncate(file, file.stat().st_size // 2)
        case "changed":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        case "gone":
            file.unlink()
        case "no checksums":
            (folder / "step-00000011" / "checksums.json").unlink()
    resumed = made.train(max_epochs=4)
    assert "step-00000011 cannot be used" in capsys.readouterr().out
    notes = json.loads((resumed.parent / "work" / "notes.json").read_text())
    assert notes["facts"]["resumed_from_step"] == 8
    assert (whole.train(max_epochs=4) / "model.safetensors").read_bytes() == (
        resumed / "model.safetensors"
    ).read_bytes()


def test_without_a_usable_checkpoint_training_begins_anew(bench):
    made, folder = interrupted(bench)
    for path in folder.glob("step-*/loop.pt"):
        path.write_bytes(b"")
    resumed = made.train(max_epochs=4)
    whole = recipe(bench)
    (whole.folder / "stopped").touch()
    assert (whole.train(max_epochs=4) / "model.safetensors").read_bytes() == (
        resumed / "model.safetensors"
    ).read_bytes()


def test_what_was_being_written_when_the_run_died_is_not_seen(bench):
    made, folder = interrupted(bench)
    partial = folder / ".step-00000012.partial"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    (folder / "step-00000099").mkdir()  # renamed, but LATEST was not replaced yet
    made.train(max_epochs=4)
    assert not partial.exists()


def test_a_schedule_that_no_checkpoint_can_hold_is_refused_when_the_first_is_written(bench, failure_of):
    made = recipe(
        bench,
        """
        def scheduler(self, optimizer, total_steps):
            schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
            schedule.owner = self
            return schedule
        """,
    )
    failure = failure_of(made.train, checkpoint={"every_steps": 1})
    assert failure.kind == "configuration"
    assert "cannot be kept in a checkpoint: its state['owner'] is of the type User" in failure.message


def test_fp16_scales_the_loss_and_leaves_out_steps_that_overflow(bench):
    made = bench()
    made.file.write_text(made.file.read_text().replace('reduction="none")', 'reduction="none") * 100'))
    report = json.loads((made.train(precision="fp16-mixed", max_epochs=3) / "metrics.json").read_text())
    losses = [entry["train_loss"] for entry in report["history"]]
    assert losses == sorted(losses, reverse=True)


def test_mixed_precision_computes_otherwise_and_ends_nearby(bench):
    losses = {}
    for precision in ("fp32", "bf16-mixed", "fp16-mixed"):
        output = bench().train(precision=precision, max_epochs=3, learning_rate=0.05)
        losses[precision] = json.loads((output / "metrics.json").read_text())["metrics"]["validation_loss"]
    assert len(set(losses.values())) == 3
    assert losses["bf16-mixed"] == pytest.approx(losses["fp32"], abs=0.02)
    assert losses["fp16-mixed"] == pytest.approx(losses["fp32"], abs=0.005)


def test_micro_batches_change_only_the_rounding(bench):
    histories = []
    for parts in (1, 2, 4):
        output = bench().train(gradient_accumulation_steps=parts, batch_size=12, max_epochs=3)
        histories.append(json.loads((output / "metrics.json").read_text())["history"])
    for history in histories[1:]:
        for mine, whole in zip(history, histories[0], strict=True):
            assert mine["steps"] == whole["steps"]
            assert mine["train_loss"] == pytest.approx(whole["train_loss"], abs=1e-6)


def test_gradients_are_clipped_to_the_norm(bench):
    optimizer = "\ndef optimizer(self, model):\n    return torch.optim.SGD(model.parameters(), lr=1.0)\n"
    made = bench()
    made.file.write_text(made.file.read_text() + textwrap.indent(optimizer, "    "))
    before = torch.nn.utils.parameters_to_vector(made.recipe().model(["x"]).parameters())
    assert before.numel() == 15
    made.train(max_epochs=1, batch_size=64, max_grad_norm=1e-3)
    from safetensors.torch import load_file

    torch.manual_seed(0)
    after = load_file(made.folder / "train" / "output" / "model.safetensors")
    from tasks.programs.batches import seed_step

    seed_step(0)
    fresh = made.recipe().model(["x"]).state_dict()
    moved = torch.cat([(after[name] - value).flatten() for name, value in fresh.items()]).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-3)


def test_training_ends_early_and_keeps_the_best_epoch(bench):
    made = bench()
    # Gets worse from the third epoch on.
    made.file.write_text(
        made.file.read_text()
        .replace('return {"accuracy": self.right / self.seen}', 'return {"score": score()}')
        .replace(
            "class Accuracy:",
            "calls = [0]\ndef score():\n    calls[0] += 1\n"
            "    return (0, 9, 9, 1, 2, 3, 2.5, 1, 9)[calls[0]]\n\nclass Accuracy:",
        )
    )
    monitor = {"metric": "score", "mode": "max", "patience": 2, "min_delta": 0.1}
    report = json.loads((made.train(max_epochs=20, monitor=monitor) / "metrics.json").read_text())
    assert [entry["validation"]["score"] for entry in report["history"]] == [1, 2, 3, 2.5, 1]
    assert report["epoch"] == 3
    assert report["metrics"]["validation_score"] == 3
    assert report["metrics"]["train_loss"] == report["history"][2]["train_loss"]


def test_a_monitor_of_a_metric_that_is_not_there_is_refused(bench, failure_of):
    monitor = {"metric": "acuracy", "mode": "max", "patience": None, "min_delta": 0.0}
    failure = failure_of(bench().train, monitor=monitor)
    assert failure.kind == "configuration"
    assert "gives no acuracy" in failure.message
    assert failure.hint == 'did you mean "accuracy"?'


def test_a_scheduler_that_is_none_is_refused(bench, failure_of):
    made = bench()
    made.file.write_text(
        made.file.read_text() + "\n    def scheduler(self, optimizer, total_steps):\n        return 3\n"
    )
    assert "expected one of torch.optim.lr_scheduler" in failure_of(made.train).message


def test_training_may_start_from_given_weights(bench):
    made = bench()
    first = made.train(max_epochs=1)
    job = made.job(
        "more", config={"max_epochs": 1, "batch_size": 8, "seed": 0}, weights=str(first / "model.safetensors")
    )
    from tasks.programs import train

    train.main(job)
    history = [
        json.loads((Path(folder) / "metrics.json").read_text())["history"][0]["train_loss"]
        for folder in (first, job["output"])
    ]
    assert history[1] < history[0]


@pytest.mark.parametrize("steps", [[2, 3], [1, 1]])
def test_a_profile_of_some_steps_is_kept(bench, steps):
    made = bench()
    made.train(profile=steps)
    trace = json.loads((made.folder / "train" / "work" / "trace.json").read_text())
    assert any("linear" in event.get("name", "") for event in trace["traceEvents"])
