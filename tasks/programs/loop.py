"""The training loop itself; `train.py` puts together what it works with.

Between some steps, several times a second, the ranks meet: they compare losses and times, and agree on whether to write
a checkpoint or to stop. All other communication is DDP's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .arithmetic import Precision
from .batches import Batch, Share, batches, map_tensors, order_of, seed_step, shares, to_array, to_arrays
from .beats import Beats
from .checkpoints import Checkpoints, plain
from .failures import ProgramFailed
from .jobs import EpochMetrics, TrainConfig
from .metrics_log import MetricsLog
from .notes import Notes, Progress
from .pace import Pace, Slowness
from .preemption import Notice, Preempted
from .preparation import settle
from .recipe import Dataset, Recipe
from .tracing import Tracer
from .world import World

LOADING, TRAINING, VALIDATION = 1, 2, 3
"""What a stream of random numbers is for."""
MEET_EVERY = 0.25
"""Seconds between two meetings of the ranks, about: how late a notice to stop is noticed."""


class Row(NamedTuple):
    """What one rank tells the others at a meeting."""

    stop: float
    """Whether it got the notice to stop."""
    save: float
    """Whether a checkpoint is due by its clock."""
    bad_step: float
    """The first step whose loss was not finite on this rank, or 0."""
    loss_sum: float
    window_loss: float
    own_seconds: float
    """Since the last meeting: loading and forward, which wait for nobody."""
    seconds: float
    """Wall time of a step."""


@dataclass(kw_only=True)
class Position:
    """Where training is: with the tensors, all that a checkpoint keeps."""

    epoch: int = 1
    """The one that is being trained, counted from 1."""
    step: int = 0
    """Optimizer steps done."""
    done: int = 0
    """Of them, those of this epoch."""
    loss_sum: float = 0.0
    """Over this rank's rows of this epoch."""
    window_loss: float = 0.0
    """The same since the last line of metrics."""
    window_rows: int = 0
    """Rows of all ranks since the last line of metrics."""
    history: list[EpochMetrics] = field(default_factory=list)
    best: int = 0
    """The best epoch so far; 0 where there is none, or no monitor."""
    stopped: bool = False
    """Whether training has ended before `max_epochs`."""
    world_sizes: list[list[int]] = field(default_factory=list)
    """`[step, ranks]` from which on there were so many."""


@dataclass(kw_only=True)
class Training:
    """What the loop works with."""

    recipe: Recipe
    config: TrainConfig
    world: World
    model: nn.Module
    parallel: nn.Module
    """`model`, or the wrapper around it whose backward averages the gradients."""
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    precision: Precision
    train_data: Dataset
    validation_data: Dataset
    checkpoints: Checkpoints
    progress: Progress
    log: MetricsLog
    tracer: Tracer
    slowness: Slowness
    notes: Notes
    beats: Beats
    notice: Notice
    at: Position = field(default_factory=Position)
    pace: Pace = field(default_factory=Pace)
    best: dict[str, Tensor] = field(default_factory=dict)
    """Where there is a monitor: the weights of the best epoch so far, on the CPU."""
    losses: list[tuple[int, Tensor]] = field(default_factory=list)
    """By step, since the ranks met; read together, so that a GPU need not be waited for in each step."""
    meet_at: int = 1
    """The step after which the ranks meet next."""

    def fit(self) -> None:
        """All epochs that are left."""
        if isinstance(self.parallel, DistributedDataParallel):
            first = self.plan(order_of(len(self.train_data), seed=self.config["seed"], epoch=1))[:1]
            (batch,) = batches(self.recipe, self.train_data, first, seed=(self.config["seed"],))
            settle(self.parallel, self.recipe, batch.to(self.world.device))
        self.pace.start()
        self.tracer.step(self.at.step)
        while self.at.epoch <= self.config["max_epochs"] and not self.at.stopped:
            self.train_epoch()
            self.end_epoch()
        self.beats.at("finished", self.at.step)
        self.checkpoints.finish()
        self.tracer.close()
        self.log.close()
        self.notes.facts |= {
            "checkpoints": self.checkpoints.summary(),
            "ranks": self.slowness.summary(),
            "samples_per_second": round(self.pace.overall(), 1),
        }

    def train_epoch(self) -> None:
        """What is left of one pass over the training data."""
        at, seed = self.at, self.config["seed"]
        plan = [s for s in self.plan(order_of(len(self.train_data), seed=seed, epoch=at.epoch)) if s.step > at.done]
        self.parallel.train()
        loaded = self.load(self.train_data, plan, LOADING, at.epoch)
        while True:
            self.beats.at("loading data", at.step + 1)
            began = time.perf_counter()
            batch = next(loaded, None)
            if batch is None:
                return
            self.pace.work(time.perf_counter() - began)
            self.accumulate(batch)
            if batch.share.ends_step:
                self.update(batch.share.total)
                self.between_steps()

    def accumulate(self, batch: Batch) -> None:
        """Forward and backward of one micro-batch."""
        share, step = batch.share, self.at.step + 1
        self.beats.at("forward", step)
        began = time.perf_counter()
        seed_step(self.config["seed"], TRAINING, self.at.epoch, share.step, share.part, self.world.rank)
        with self._gradients_apart(share):
            with self.precision.autocast():
                outputs = self.recipe.forward(self.parallel, batch.inputs, always=False)
                losses = self.recipe.losses(outputs, batch.targets, always=False)
            loss_sum = (losses * batch.weights()).sum()
            self.losses.append((step, loss_sum.detach()))
            self.pace.work(time.perf_counter() - began)
            self.beats.at("backward", step)
            # DDP divides the sum of the ranks' gradients by their number; what is wanted is the mean over all rows.
            scaled: Tensor = self.precision.scaler.scale(loss_sum * (self.world.size / share.total))
            scaled.backward()  # type: ignore[no-untyped-call]

    def _gradients_apart(self, share: Share) -> AbstractContextManager[object]:
        """The ranks' gradients are averaged once per step, by the backward pass that ends it."""
        if isinstance(self.parallel, DistributedDataParallel) and not share.ends_step:
            return self.parallel.no_sync()
        return nullcontext()

    def update(self, rows: int) -> None:
        """The optimizer's step, after the gradients of all micro-batches and ranks are there."""
        self.beats.at("optimizer", self.at.step + 1)
        scaler, limit = self.precision.scaler, self.config.get("max_grad_norm")
        if limit is not None:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        self.at.step += 1
        self.at.done += 1
        self.at.window_rows += rows
        self.pace.step(rows)
        self.tracer.step(self.at.step)

    def between_steps(self) -> None:
        """Meet the others if it is time; then log, checkpoint or stop, all ranks alike."""
        step = self.at.step
        self.beats.at("between steps", step)
        every = self.config.get("checkpoint", {}).get("every_steps")
        due = every is not None and step % every == 0
        logged = step % self.config.get("log_every_steps", 50) == 0
        if not (due or logged or step >= self.meet_at):
            return
        rows = self.meet()
        if logged:
            self.log_window(rows)
        if any(row.stop for row in rows):
            self.save_checkpoint(rows, wait=True)
            self.log.close()
            raise Preempted(step)
        if due or rows[0].save:  # minutes are counted by the leading rank's clock
            self.save_checkpoint(rows)
        if step < self.progress.total:  # the last word is said with the last epoch's metrics
            seen = min(self.at.done * self.config["batch_size"], len(self.train_data))
            self.tell(sum(row.loss_sum for row in rows) / seen)

    def meet(self) -> list[Row]:
        """Exchange what each rank knows; raises what concerns all."""
        at, pace = self.at, self.pace
        bad = 0
        values = torch.stack([value for _, value in self.losses]).tolist() if self.losses else []
        for (step, _), value in zip(self.losses, values, strict=True):
            bad = bad or (0 if math.isfinite(value) else step)
            at.loss_sum += value
            at.window_loss += value
        self.losses.clear()
        pace.look()
        minutes = self.config.get("checkpoint", {}).get("every_minutes", 10.0)
        mine = Row(
            stop=float(self.notice.given is not None),
            save=float(minutes is not None and pace.since_save() > 60 * minutes),
            bad_step=float(bad),
            loss_sum=at.loss_sum,
            window_loss=at.window_loss,
            own_seconds=pace.own_seconds,
            seconds=pace.seconds_per_step,
        )
        rows = [Row(*row) for row in self.world.exchange(list(mine))]
        if steps := [int(row.bad_step) for row in rows if row.bad_step]:
            raise self.diverged("the loss is not finite", min(steps))
        if pace.stepped:  # at the end of an epoch there may be nothing to compare
            self.slowness.look([row.own_seconds for row in rows], pace.window_seconds)
        slowest = max(row.seconds for row in rows)
        self.meet_at = at.step + max(1, min(1000, int(MEET_EVERY / max(slowest, 1e-6))))
        pace.met()
        return rows

    def end_epoch(self) -> None:
        """The epoch's loss over all ranks, the validation data, and what follows from them."""
        at = self.at
        train_loss = sum(row.loss_sum for row in self.meet()) / len(self.train_data)
        validation_loss, numbers = self.validate()
        self.pace.met()  # what validation took is no step's time
        at.history.append(
            {
                "epoch": at.epoch,
                "steps": at.step,
                "train_loss": train_loss,
                "validation_loss": validation_loss,
                "validation": numbers,
            }
        )
        self.watch({"loss": validation_loss, **numbers})
        shown = {f"validation_{name}": value for name, value in numbers.items()}
        self.log.write(
            at.step,
            at.epoch,
            {"train_loss": train_loss, "validation_loss": validation_loss, **shown},
            ends_epoch=True,
        )
        self.tell(train_loss, last=at.stopped or at.epoch == self.config["max_epochs"])
        at.epoch, at.done, at.loss_sum = at.epoch + 1, 0, 0.0

    def watch(self, numbers: Mapping[str, float | None]) -> None:
        """Keep the best epoch's weights, and end when there was none for long."""
        at, monitor = self.at, self.config.get("monitor")
        if isinstance(self.scheduler, ReduceLROnPlateau):
            watched = numbers[monitor["metric"]] if monitor is not None else numbers["loss"]
            self.scheduler.step(math.nan if watched is None else watched)
        if monitor is None:
            return
        value, sign = numbers[monitor["metric"]], 1 if monitor["mode"] == "max" else -1
        if value is not None:
            before = self._watched(at.best) if at.best else None
            if before is None or sign * (value - before) > monitor["min_delta"]:
                at.best = at.epoch
                for name, tensor in self.model.state_dict().items():
                    self.best[name].copy_(tensor)
        if monitor["patience"] is not None and at.epoch - at.best >= monitor["patience"]:
            at.stopped = True

    def _watched(self, epoch: int) -> float | None:
        monitor, entry = self.config.get("monitor"), self.at.history[epoch - 1]
        assert monitor is not None
        return {"loss": entry["validation_loss"], **entry["validation"]}[monitor["metric"]]

    @torch.no_grad()
    def validate(self) -> tuple[float | None, dict[str, float | None]]:
        """Mean loss, and the recipe's metric, on the validation data; the leading rank feeds it in the data's order.

        In fp32 whatever the training's precision: that is what is exported and served.
        """
        self.agree_on_buffers()
        self.model.eval()
        metric = self.recipe.metric()
        loss_sum = 0.0
        seed_step(self.config["seed"], VALIDATION, self.world.rank)
        plan = self.plan(range(len(self.validation_data)))
        for batch in self.load(self.validation_data, plan, VALIDATION, 0):
            self.beats.at("validation", self.at.step)
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
        loss_sum = sum(value for (value,) in self.world.exchange([loss_sum]))
        numbers = self.recipe.result(metric) if self.world.leads else {}
        mean = finite(loss_sum / len(self.validation_data))
        found: dict[str, float | None] = self.world.leaders({name: finite(value) for name, value in numbers.items()})
        return mean, found

    def agree_on_buffers(self) -> None:
        """Give the leading rank's batch statistics, and what else is no parameter, to all.

        DDP does so before the first forward pass of the next step, and goes on from these. Until then each rank has its
        own, and what is validated or kept now must be what goes on.
        """
        if isinstance(self.parallel, DistributedDataParallel):
            self.world.share(self.model.buffers())

    def save_checkpoint(self, rows: Sequence[Row], *, wait: bool = False) -> None:
        self.agree_on_buffers()
        fresh = self.at.window_rows == 0  # it was written out since the ranks met
        loop = {
            "position": asdict(self.at),
            "loss_sums": [[row.loss_sum, 0.0 if fresh else row.window_loss] for row in rows],
            "scaler": self.precision.scaler.state_dict(),
            "scheduler": None if self.scheduler is None else plain(self.scheduler.state_dict(), "its state"),
        }
        self.checkpoints.save(self.at.step, self._tensors(), loop, wait=wait)
        self.pace.saved()

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one; also if it was written by more or fewer ranks."""
        at, monitor, size = self.at, self.config.get("monitor"), self.world.size
        if monitor is not None:
            self.best = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        chosen = self.checkpoints.newest()
        if chosen is not None:
            tensors = self._tensors()
            loop = self.checkpoints.load(chosen, tensors)
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=tensors["model"],
                optim_state_dict=tensors["optimizer"],
            )
            self.best = tensors.get("best", {})
            self.precision.scaler.load_state_dict(loop["scaler"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(loop["scheduler"])
            at = self.at = Position(**loop["position"])
            sums: list[list[float]] = loop["loss_sums"]
            if len(sums) == size:
                at.loss_sum, at.window_loss = sums[self.world.rank]
            else:  # the sum over all ranks is what counts
                at.loss_sum, at.window_loss = map(sum, zip(*sums, strict=True)) if self.world.leads else (0.0, 0.0)
            if self.world.leads:
                self.notes.resumed(at.step, size)
        self.log.set_back(at.step)
        if not at.world_sizes or at.world_sizes[-1][1] != size:
            at.world_sizes.append([at.step + 1, size])
        self.meet_at = at.step + 1

    def _tensors(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer} | ({"best": self.best} if self.best else {})

    def diverged(self, what: str, step: int) -> ProgramFailed:
        return ProgramFailed(
            "training failed",
            f"{what} at step {step}, learning rate {self.learning_rates()}",
            hint="usual causes: too high a learning rate, a logarithm or division of zero in the loss, nan in the data",
        )

    def learning_rates(self) -> str:
        rates = sorted({float(group["lr"]) for group in self.optimizer.param_groups})
        return ", ".join(f"{rate:g}" for rate in rates)

    def log_window(self, rows: Sequence[Row]) -> None:
        """One line of metrics, on the steps since the one before."""
        at = self.at
        self.log.write(
            at.step,
            at.epoch,
            {
                "train_loss": sum(row.window_loss for row in rows) / at.window_rows,
                "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
                "samples_per_second": round(self.pace.rows_per_second, 1),
            },
        )
        at.window_loss, at.window_rows = 0.0, 0

    def tell(self, loss: float, *, last: bool = False) -> None:
        """A line of progress: where, how fast, until when, the loss of this epoch so far, and how good the last was."""
        at, pace = self.at, self.pace
        known: dict[str, float | None] = {"loss": finite(loss)}
        if at.history:
            entry = at.history[-1]
            known |= {"validation_loss": entry["validation_loss"], **entry["validation"]}
        left = 0.0 if last else (self.progress.total - at.step) * pace.seconds_per_step
        speed = f", {pace.rows_per_second:,.0f} samples/s" if pace.rows_per_second else ""
        until = f", {clock(left)} left" if speed and not last else ""
        self.progress(
            self.progress.total if last else at.step,
            f"epoch {at.epoch}/{self.config['max_epochs']}{speed}{until}",
            known,
            samples_per_second=round(pace.rows_per_second, 1),
            seconds_left=round(left, 1),
        )

    def plan(self, order: Sequence[int]) -> list[Share]:
        return shares(
            order,
            batch_size=self.config["batch_size"],
            rank=self.world.rank,
            world_size=self.world.size,
            accumulation=self.config.get("gradient_accumulation_steps", 1),
        )

    def load(self, dataset: Dataset, plan: list[Share], *purpose: int) -> Iterator[Batch]:
        for batch in batches(
            self.recipe,
            dataset,
            plan,
            num_workers=self.config.get("num_workers", 0),
            seed=(self.config["seed"], *purpose, self.world.rank),
            pin_memory=self.world.device.type == "cuda",
        ):
            yield batch.to(self.world.device)


def finite(value: float) -> float | None:
    """JSON has no nan; early in training a metric may well be one."""
    return value if math.isfinite(value) else None


def clock(seconds: float) -> str:
    """`0:41`, `12:05` or `3:02:11`.

    >>> clock(41.2), clock(10931)
    ('0:41', '3:02:11')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
