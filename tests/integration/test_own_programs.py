"""The examples that bring a training program of their own, and trackers: with the libraries that .ci/run installs."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.training import Trainee

pytestmark = pytest.mark.extras
EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str, root: Path) -> Trainee:
    shutil.copytree(EXAMPLES / name, root / "user", ignore=shutil.ignore_patterns("__pycache__"))
    return Trainee(root / "user")


def workers(folder: Path) -> list[psutil.Process]:
    """The script's processes, not the torchrun above them."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or ()
        if any(str(folder / "train_") in word for word in line) and "torch.distributed.run" not in line:
            found.append(process)
    return found


@pytest.mark.parametrize(
    ("name", "epochs", "resumed"),
    [("digits_lightning", 24, "going on after epoch"), ("digits_transformers", 6, "going on from checkpoint-")],
)
def test_it_goes_on_after_a_kill_and_ends_as_good(name, epochs, resumed, tmp_path):
    whole = example(name, tmp_path / "whole").train(f"train.max_epochs={epochs}")
    assert whole.metrics["validation_accuracy"] > 0.3
    trainee = example(name, tmp_path / "killed")
    struck = []

    class Striking(list):
        """Kills the second process when the first tells that a third is done: most of the time is left, also where
        an epoch takes a tenth of a second."""

        def append(self, event):
            super().append(event)
            if event["type"] == "progress" and not struck and event["done"] >= event["total"] // 3:
                struck.append(event)
                time.sleep(0.3)
                os.kill(max(process.pid for process in workers(trainee.folder)), signal.SIGKILL)

    trainee.events = Striking()
    record = trainee.train(f"train.max_epochs={epochs}")
    assert struck
    assert any(line.startswith(resumed) for line in trainee.lines)
    # What these libraries promise is to go on from the weights and the epoch, not the same bytes.
    assert record.metrics["validation_accuracy"] == pytest.approx(whole.metrics["validation_accuracy"], abs=0.1)
    assert not workers(trainee.folder)


def test_trackers_get_the_metrics_and_go_on_in_the_same_run(tmp_path):
    trackers = "[{kind: tensorboard}, {kind: mlflow}, {kind: wandb}]"
    trainee = Trainee.made(tmp_path / "user")
    folder, settings = trainee.folder / "trackers", [f"train.trackers={trackers}", "train.log_every_steps=10"]
    trainee.train(*settings, "train.max_epochs=1", "train.seed=7")  # another training, whose run is its own
    (other,) = (path.name for path in (folder / "tensorboard").iterdir())
    thread = trainee.at_step(60, lambda beat: os.kill(beat["pid"], signal.SIGKILL))
    trainee.train(*settings, "train.max_epochs=4")
    thread.join()
    (name,) = (path.name for path in (folder / "tensorboard").iterdir() if path.name != other)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / name))
    events.Reload()
    assert {"train_loss", "validation_accuracy"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("validation_accuracy")][-1] == 4 * 21

    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert {run.info.run_name for run in runs} == {name, other}
    (run,) = (run for run in runs if run.info.run_name == name)
    history = client.get_metric_history(run.info.run_id, "validation_accuracy")
    assert sorted({entry.step for entry in history}) == [21, 42, 63, 84]

    kept = [path.name for path in (folder / "wandb").glob("wandb/offline-run-*/run-*.wandb")]
    assert set(kept) == {f"run-{name}.wandb", f"run-{other}.wandb"}
