"""What stands ready before the first step: the model in its wrapper, its optimizer and scheduler, a rehearsal."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .batches import Batch, Share, batches, check_inputs, map_tensors, to_array, to_arrays
from .jobs import TrainConfig, TrainJob
from .recipe import Dataset, Recipe, described
from .world import World

DEFAULT_LEARNING_RATE = 1e-3


def parallelise(model: nn.Module, world: World) -> nn.Module:
    """The model as the ranks train it together. Here other strategies find their place."""
    return model if world.size == 1 else DistributedDataParallel(model)


@torch.no_grad()
def rehearse(
    recipe: Recipe, split: str, dataset: Dataset, model: nn.Module, job: TrainJob, device: torch.device
) -> list[str]:
    """Send a few rows through everything of the user's before there are peers to leave waiting; the metric's names.

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
    return list(recipe.result(metric))


def settle(parallel: nn.Module, recipe: Recipe, batch: Batch) -> None:
    """One pass forward and back that leaves no trace, after which DDP has its final buckets.

    DDP sorts gradients into buckets anew after its first backward pass, and with three ranks or more the order of a sum
    depends on the bucket. A run that was resumed would add up its first step otherwise than one that was not.
    """
    kept = {name: value.detach().clone() for name, value in parallel.named_buffers()}
    parallel.train()
    recipe.losses(recipe.forward(parallel, batch.inputs), batch.targets).sum().mul(0.0).backward()  # type: ignore[no-untyped-call]
    parallel.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, value in parallel.named_buffers():
            value.copy_(kept[name])


def make_optimizer(recipe: Recipe, model: nn.Module, config: TrainConfig) -> Optimizer:
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
    if not isinstance(optimizer, Optimizer):
        raise recipe.wrong("optimizer", f"() gave {described(optimizer)}; expected a torch.optim.Optimizer")
    return optimizer


def make_scheduler(recipe: Recipe, optimizer: Optimizer, total_steps: int) -> LRScheduler | None:
    """The recipe's, stepped after each optimizer step; one that waits for a plateau, after each epoch."""
    if not recipe.has("scheduler"):
        return None
    scheduler = recipe.call("scheduler", optimizer, total_steps)
    if not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        raise recipe.wrong("scheduler", f"() gave {described(scheduler)}; expected one of torch.optim.lr_scheduler")
    return scheduler
