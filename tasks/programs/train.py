"""The training loop: one process per rank, started by torchrun; job and products are `jobs.TrainJob`.

`max_epochs` passes over the training data, each sample once per pass, the validation data after each. Ranks hold equal
weights (DDP averages gradients), and the loss of a step is the mean over the rows of all ranks together, so the curve
is that of one process. Everything random comes from `seed`; threads are pinned: the same job gives the same bytes.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .batches import Batch, Share, batches, check_inputs, map_tensors, order_of, shares, to_array, to_arrays
from .failures import ProgramFailed
from .jobs import EpochMetrics, TrainConfig, TrainJob, TrainMetrics
from .notes import Notes, Progress, write_json
from .recipe import Dataset, Recipe, described
from .recipe_loading import load_recipe
from .weights import not_finite, save_weights

DEFAULT_LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this rank writes the products and the progress."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Over all ranks, in double precision."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(total)
        return [float(value) for value in total]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value at the leading rank, in order; nothing elsewhere."""
        if self.size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.leads else None
        dist.gather_object(value, gathered)
        return gathered or []


@contextmanager
def joined(config: TrainConfig) -> Iterator[World]:
    """Join the process group that torchrun's environment describes; without it, this process is all there is."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if config.get("device", "cpu") == "cuda":
        if not torch.cuda.is_available():
            raise ProgramFailed(
                "configuration", "train.device is cuda, but torch sees no CUDA device here", hint='use "cpu"'
            )
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if size == 1:
        yield World(rank=0, size=1, device=device)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=config.get("timeout", 600.0)))
    yield World(rank=rank, size=size, device=device)
    # Nobody leaves before all have what they need. The group is never destroyed: see `bootstrap.run_rank`.
    dist.barrier()


def main(job: TrainJob) -> None:
    notes = Notes()
    config = job["config"]
    if config.get("precision", "fp32") != "fp32":
        raise ProgramFailed("configuration", f'train.precision "{config["precision"]}" is not known', hint="use fp32")
    torch.set_num_threads(config.get("threads", 1))
    torch.use_deterministic_algorithms(True)
    with joined(config) as world:
        train(job, world, notes)
    if world.leads:
        notes.write(Path(job["work"]))


def train(job: TrainJob, world: World, notes: Notes) -> None:
    """The whole run of this rank; the leading one writes the products."""
    config = job["config"]
    with notes.timed("load"):
        seed_everything(config["seed"], rank=0)  # equal initial weights on every rank
        recipe = load_recipe(job["recipe"])
        run = Training.prepare(recipe, job, world)
    with notes.timed("train"):
        seed_everything(config["seed"], rank=world.rank)
        history = run.fit()
    if world.leads:
        with notes.timed("save"):
            run.save(Path(job["output"]), history)
    notes.environment = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "world_size": str(world.size),
        "threads": str(torch.get_num_threads()),
    }


def seed_everything(seed: int, *, rank: int) -> None:
    """Each rank draws numbers of its own (dropout, augmentation)."""
    random.seed(seed * 1009 + rank)
    np.random.seed((seed * 1009 + rank) % 2**32)
    torch.manual_seed(seed * 1009 + rank)


@dataclass(kw_only=True)
class Training:
    """What the loop holds: everything that a checkpoint will have to keep is in here or follows from (epoch, step)."""

    recipe: Recipe
    config: TrainConfig
    world: World
    model: nn.Module
    parallel: nn.Module
    """`model`, or the wrapper around it whose backward averages the gradients."""
    optimizer: torch.optim.Optimizer
    train_data: Dataset
    validation_data: Dataset
    steps: int = 0
    """Optimizer steps done."""

    @classmethod
    def prepare(cls, recipe: Recipe, job: TrainJob, world: World) -> Training:
        config, inputs = job["config"], list(job["inputs"])
        model = recipe.model(inputs).to(world.device)
        data = {split: recipe.data(split, inputs) for split in ("train", "validation")}
        for split, dataset in data.items():
            rehearse(recipe, split, dataset, model, job, world.device)
        parallel = model if world.size == 1 else DistributedDataParallel(model)
        return cls(
            recipe=recipe,
            config=config,
            world=world,
            model=model,
            parallel=parallel,
            optimizer=make_optimizer(recipe, model, config),
            train_data=data["train"],
            validation_data=data["validation"],
        )

    def fit(self) -> list[EpochMetrics]:
        """All epochs; the returned history is complete on the leading rank."""
        history: list[EpochMetrics] = []
        epochs = self.config["max_epochs"]
        per_epoch = -(-len(self.train_data) // self.config["batch_size"])
        progress = Progress(epochs * per_epoch, silent=not self.world.leads)
        known: dict[str, float | None] = {}
        for epoch in range(1, epochs + 1):
            train_loss = self.train_epoch(epoch, progress, known)
            validation_loss, validation = self.validate()
            known = {"loss": train_loss, "validation_loss": validation_loss, **validation}
            history.append(
                {
                    "epoch": epoch,
                    "steps": self.steps,
                    "train_loss": train_loss,
                    "validation_loss": validation_loss,
                    "validation": validation,
                }
            )
            progress(self.steps, f"epoch {epoch}/{epochs}", known)
        return history

    def train_epoch(self, epoch: int, progress: Progress, known: dict[str, float | None]) -> float:
        """One pass; gives the mean loss over all samples."""
        order = order_of(len(self.train_data), seed=self.config["seed"], epoch=epoch)
        plan = self.plan(order)
        self.parallel.train()
        loss_sum = 0.0
        for batch in self.load(self.train_data, plan):
            loss_sum += self.step(batch)
            self.steps += 1
            if self.steps < progress.total:  # the last word is said with the last epoch's metrics
                progress(self.steps, f"epoch {epoch}/{self.config['max_epochs']}", known)
        (loss_sum,) = self.world.sum(loss_sum)
        return loss_sum / len(self.train_data)

    def step(self, batch: Batch) -> float:
        """Forward, backward, update; gives the sum of this rank's losses."""
        self.optimizer.zero_grad(set_to_none=True)
        outputs = self.recipe.forward(self.parallel, batch.inputs, always=False)
        losses = self.recipe.losses(outputs, batch.targets, always=False)
        loss_sum = (losses * batch.weights()).sum()
        # DDP divides the sum of the ranks' gradients by their number; what is wanted is the mean over all rows.
        (loss_sum * (self.world.size / batch.share.total)).backward()  # type: ignore[no-untyped-call]
        value = float(loss_sum.detach())
        if not math.isfinite(value):
            raise self.diverged(f"the loss is {value}")
        self.optimizer.step()
        return value

    def diverged(self, what: str) -> ProgramFailed:
        rates = sorted({group["lr"] for group in self.optimizer.param_groups})
        return ProgramFailed(
            "training failed",
            f"{what} at step {self.steps + 1}, learning rate {', '.join(f'{rate:g}' for rate in rates)}",
            hint="usual causes: too high a learning rate, a logarithm or division of zero in the loss, nan in the data",
        )

    @torch.no_grad()
    def validate(self) -> tuple[float | None, dict[str, float | None]]:
        """Mean loss, and the recipe's metric, on the validation data; the leading rank feeds it in the data's order."""
        self.model.eval()
        metric = self.recipe.metric()
        loss_sum = 0.0
        plan = self.plan(range(len(self.validation_data)))
        for batch in self.load(self.validation_data, plan):
            outputs = self.recipe.forward(self.model, batch.inputs, always=False)
            losses = self.recipe.losses(outputs, batch.targets, always=False)
            loss_sum += float((losses * batch.weights()).sum())
            real = batch.share.real
            part = (
                to_arrays({name: value[:real] for name, value in outputs.items()}),
                map_tensors(lambda value, real=real: to_array(value[:real]), batch.targets),
                real,
            )
            for arrays, targets, rows in self.world.gather(part):
                if rows:
                    self.recipe.update(metric, arrays, targets)
        (loss_sum,) = self.world.sum(loss_sum)
        numbers = self.recipe.result(metric) if self.world.leads else {}
        return finite(loss_sum / len(self.validation_data)), {name: finite(v) for name, v in numbers.items()}

    def plan(self, order: Any) -> list[Share]:
        return shares(order, batch_size=self.config["batch_size"], rank=self.world.rank, world_size=self.world.size)

    def load(self, dataset: Dataset, plan: list[Share]) -> Iterator[Batch]:
        for batch in batches(self.recipe, dataset, plan, num_workers=self.config.get("num_workers", 0)):
            yield batch.to(self.world.device)

    def save(self, output: Path, history: list[EpochMetrics]) -> None:
        broken = not_finite(self.model.state_dict())
        if broken:
            raise self.diverged(f"the weights {', '.join(broken[:3])} hold nan or infinity after the last update,")
        save_weights(self.model, output / "model.safetensors")
        write_json(output / "metrics.json", self.summary(history))

    def summary(self, history: list[EpochMetrics]) -> TrainMetrics:
        last = history[-1]
        flat = {"train_loss": last["train_loss"], "validation_loss": last["validation_loss"]}
        flat |= {f"validation_{name}": value for name, value in last["validation"].items()}
        return {
            "metrics": {name: value for name, value in flat.items() if value is not None},
            "history": history,
            "world_size": self.world.size,
            "samples": {"train": len(self.train_data), "validation": len(self.validation_data)},
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
        }


@torch.no_grad()
def rehearse(
    recipe: Recipe, split: str, dataset: Dataset, model: nn.Module, job: TrainJob, device: torch.device
) -> None:
    """Send a few rows through everything of the user's, before there are peers to leave waiting.

    Whatever fails here is the recipe's, also where no line of it is involved (a shape that a layer refuses).
    """
    share = Share(indices=tuple(range(min(3, len(dataset)))), real=min(3, len(dataset)), total=min(3, len(dataset)))
    (batch,) = batches(recipe, dataset, [share])
    check_inputs(recipe, split, batch.inputs, job["inputs"])
    batch = batch.to(device)
    outputs = recipe.forward(model.eval(), batch.inputs)
    recipe.losses(outputs, batch.targets)
    metric = recipe.metric()
    recipe.update(metric, to_arrays(outputs), map_tensors(to_array, batch.targets))
    recipe.result(metric)


def finite(value: float) -> float | None:
    """JSON has no nan; early in training a metric may well be one."""
    return value if math.isfinite(value) else None


def make_optimizer(recipe: Recipe, model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The recipe's, or AdamW."""
    learning_rate = config.get("learning_rate")
    trained: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise recipe.wrong("model", "() gave a model without parameters to train")
    if not recipe.has("optimizer"):
        return torch.optim.AdamW(trained, lr=DEFAULT_LEARNING_RATE if learning_rate is None else learning_rate)
    if learning_rate is not None:
        raise recipe.wrong(
            "optimizer",
            f"() decides the learning rate, so train.learning_rate ({learning_rate:g}) would have no effect",
            hint="remove one of the two",
        )
    optimizer = recipe.call("optimizer", model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise recipe.wrong("optimizer", f"() gave {described(optimizer)}; expected a torch.optim.Optimizer")
    return optimizer
