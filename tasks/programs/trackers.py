"""Trackers: where a training's metrics go beside our own file. Each needs its library, an optional extra."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from .failures import ProgramFailed, nearest
from .jobs import TrackerConfig


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the folder; `tensorboard --logdir FOLDER` shows them."""

    def __init__(self, config: TrackerConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(config["folder"])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run in the store that `MLFLOW_TRACKING_URI` names, or in a database file in the folder.

    A training that goes on after an interruption goes on in the same run: its name lies beside the folder's store.
    """

    def __init__(self, config: TrackerConfig) -> None:
        import mlflow

        folder = Path(config["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
        mlflow.set_experiment(config["name"])
        known = folder / "run_id"
        self._mlflow: Any = mlflow
        run = mlflow.start_run(run_id=known.read_text() if known.exists() else None)
        known.write_text(run.info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class WandB:
    """A run of Weights & Biases; offline in the folder unless `WANDB_MODE` says otherwise (`wandb sync` sends it)."""

    def __init__(self, config: TrackerConfig) -> None:
        import wandb

        folder = Path(config["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(project=config["name"], dir=str(folder), mode=mode)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


KINDS: dict[str, tuple[Callable[[TrackerConfig], Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "mlflow": (MLflow, "mlflow"),
    "wandb": (WandB, "wandb"),
}


def open_trackers(configs: list[TrackerConfig]) -> list[Tracker]:
    """All of a job's trackers; one whose library is missing is refused before training begins."""
    found: list[Tracker] = []
    for config in configs:
        kind = config["kind"]
        if kind not in KINDS:
            raise ProgramFailed("configuration", f'there is no tracker "{kind}"', hint=nearest(kind, KINDS))
        make, extra = KINDS[kind]
        try:
            found.append(make(config))
        except ModuleNotFoundError as error:
            raise ProgramFailed(
                "tool missing",
                f"the tracker {kind} needs {error.name}, which this Python does not have",
                hint=f"pip install 'enginehouse[{extra}]', or remove it from train.trackers",
            ) from error
    return found
