"""Trackers: where a training's metrics go beside our own file. Each needs its library, an optional extra.

Every training is a run of its own in each of them, and goes on in the same run after an interruption: its name lies in
the training's working folder, which lasts as long as the training does.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from .failures import ProgramFailed, nearest
from .jobs import TrackerConfig


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the folder, below it one of each run; `tensorboard --logdir FOLDER` shows them."""

    def __init__(self, config: TrackerConfig, run: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(Path(config["folder"]) / run))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a worker that is killed writes nothing more

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run in the store that `MLFLOW_TRACKING_URI` names, or in a database file in the folder."""

    def __init__(self, config: TrackerConfig, run: str) -> None:
        import mlflow

        folder = Path(config["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
        experiment = mlflow.set_experiment(config["name"]).experiment_id
        self._mlflow: Any = mlflow
        begun = mlflow.MlflowClient().search_runs([experiment], f"attributes.run_name = '{run}'", max_results=1)
        mlflow.start_run(run_id=begun[0].info.run_id if begun else None, run_name=run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class WandB:
    """A run of Weights & Biases; offline in the folder unless `WANDB_MODE` says otherwise (`wandb sync` sends it)."""

    def __init__(self, config: TrackerConfig, run: str) -> None:
        import wandb

        folder = Path(config["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(
            project=config["name"], id=run, name=run, resume="allow", dir=str(folder), mode=mode
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


KINDS: dict[str, tuple[Callable[[TrackerConfig, str], Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "mlflow": (MLflow, "mlflow"),
    "wandb": (WandB, "wandb"),
}


def open_trackers(configs: list[TrackerConfig], work: Path) -> list[Tracker]:
    """All of a job's trackers; one whose library is missing is refused before training begins.

    `work` is the training's working folder, in which the name of its run is kept.
    """
    found: list[Tracker] = []
    run = _run_name(work / "tracked-run") if configs else ""
    for config in configs:
        kind = config["kind"]
        if kind not in KINDS:
            raise ProgramFailed("configuration", f'there is no tracker "{kind}"', hint=nearest(kind, KINDS))
        make, extra = KINDS[kind]
        try:
            found.append(make(config, run))
        except ModuleNotFoundError as error:
            raise ProgramFailed(
                "tool missing",
                f"the tracker {kind} needs {error.name}, which this Python does not have",
                hint=f"pip install 'enginehouse[{extra}]', or remove it from train.trackers",
            ) from error
    return found


def _run_name(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        file.write_text(name)
        return name
