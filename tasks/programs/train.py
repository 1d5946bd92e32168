"""Training: one process per rank, started by torchrun; job and products are `jobs.TrainJob`, the loop is in loop.py.

`max_epochs` passes over the training data, each sample once per pass, the validation data after each. Ranks hold equal
weights (DDP averages gradients), and the loss of a step is the mean over the rows of all ranks together, so the curve
is that of one process. Everything random follows from `seed` and the step; threads are pinned: the same job gives the
same bytes, also when it was interrupted and went on from a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import torch

from .arithmetic import Precision
from .batches import seed_step
from .beats import Beats
from .checkpoints import Checkpoints
from .failures import names, nearest
from .jobs import TrainJob, TrainMetrics
from .loop import Training
from .metrics_log import MetricsLog
from .notes import Notes, Progress, write_json
from .pace import Slowness
from .preemption import Notice
from .preparation import make_optimizer, make_scheduler, parallelise, rehearse
from .recipe import Recipe
from .recipe_loading import load_recipe
from .tracing import Tracer
from .weights import load_weights, not_finite, save_state
from .world import World, joined


def main(job: TrainJob) -> None:
    notes = Notes()
    config = job["config"]
    torch.set_num_threads(config.get("threads", 1))
    torch.use_deterministic_algorithms(True)
    with Notice(config.get("preemption_signal")) as notice, joined(config) as world:
        beats = Beats(Path(job["work"]), world.rank)
        with notes.timed("load"):
            seed_step(config["seed"])  # equal initial weights on every rank
            training = prepare(load_recipe(job["recipe"]), job, world, notes, beats, notice)
            training.resume()
        with notes.timed("train"):
            training.fit()
        if world.leads:
            with notes.timed("save"):
                save(training, Path(job["output"]))
        beats.stop()
        usage = world.gather(beats.usage.summary())
    if world.leads:
        notes.facts["usage"] = usage
        notes.environment = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
            "world_size": str(world.size),
            "threads": str(torch.get_num_threads()),
        }
        notes.write(Path(job["work"]))


def prepare(recipe: Recipe, job: TrainJob, world: World, notes: Notes, beats: Beats, notice: Notice) -> Training:
    """Everything that the loop works with."""
    config, inputs, work = job["config"], list(job["inputs"]), Path(job["work"])
    precision = Precision(config.get("precision", "fp32"), world.device)
    model = recipe.model(inputs).to(world.device)
    if weights := job.get("weights"):
        load_weights(model, Path(weights), kind="configuration")
    data = {split: recipe.data(split, inputs) for split in ("train", "validation")}
    known = ["loss"]
    for split, dataset in data.items():
        known += rehearse(recipe, split, dataset, model, job, world.device)
    monitor = config.get("monitor")
    if monitor is not None and monitor["metric"] not in known:
        raise recipe.wrong(
            "metric",
            f"() gives no {monitor['metric']}, which train.monitor names; it gives {names(sorted(set(known)))}",
            hint=nearest(monitor["metric"], known),
        )
    optimizer = make_optimizer(recipe, model, config)
    total = config["max_epochs"] * -(-len(data["train"]) // config["batch_size"])
    scheduler = make_scheduler(recipe, optimizer, total)
    if config.get("compile", False):
        model.compile()
    checkpoint = config.get("checkpoint", {})
    return Training(
        recipe=recipe,
        config=config,
        world=world,
        model=model,
        parallel=parallelise(model, world),
        optimizer=optimizer,
        scheduler=scheduler,
        precision=precision,
        train_data=data["train"],
        validation_data=data["validation"],
        checkpoints=Checkpoints(
            work / "checkpoints",
            world,
            notes,
            keep=checkpoint.get("keep", 2),
            asynchronous=checkpoint.get("asynchronous", True),
        ),
        progress=Progress(total, silent=not world.leads),
        log=MetricsLog(work / "metrics.jsonl", config.get("trackers", []), silent=not world.leads),
        tracer=Tracer(work / "trace.json", config.get("profile") if world.leads else None),
        slowness=Slowness(world.size, notes, silent=not world.leads),
        notes=notes,
        beats=beats,
        notice=notice,
    )


def save(training: Training, output: Path) -> None:
    """The products: the last epoch's weights, or the best one's where there is a monitor."""
    at, file = training.at, output / "model.safetensors"
    state = training.best if at.best else training.model.state_dict()
    if broken := not_finite(state):
        shown = ", ".join(broken[:3])
        raise training.diverged(f"the weights {shown} hold nan or infinity after the last update,", at.step)
    save_state(state, file)
    write_json(output / "metrics.json", summary(training))


def summary(training: Training) -> TrainMetrics:
    at = training.at
    kept = at.history[(at.best or len(at.history)) - 1]
    flat = {"train_loss": kept["train_loss"], "validation_loss": kept["validation_loss"]}
    flat |= {f"validation_{name}": value for name, value in kept["validation"].items()}
    return {
        "metrics": {name: value for name, value in flat.items() if value is not None},
        "history": at.history,
        "epoch": kept["epoch"],
        "world_size": training.world.size,
        "world_sizes": at.world_sizes,
        "samples": {"train": len(training.train_data), "validation": len(training.validation_data)},
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
    }
