"""This process among the others: joining the process group, and the few ways in which the ranks talk outside DDP."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .failures import ProgramFailed
from .jobs import TrainConfig

COLLECTIVE_TIMEOUT = 600.0
"""Seconds that ranks wait for a missing one, unless the job says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    background: dist.ProcessGroup | None = None
    """A group of its own for what checkpoints say to each other while training goes on; None for a lone process."""

    @property
    def leads(self) -> bool:
        """Whether this rank writes the products and the progress."""
        return self.rank == 0

    def exchange(self, values: list[float]) -> list[list[float]]:
        """Every rank's numbers, by rank, on every rank; in double precision."""
        if self.size == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyones = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyones, mine)
        return [row.tolist() for row in everyones]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value at the leading rank, in order; nothing elsewhere."""
        if self.size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.leads else None
        dist.gather_object(value, gathered)
        return gathered or []

    def leaders(self, value: Any) -> Any:
        """The leading rank's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give the leading rank's tensors to every rank, in place."""
        if self.size > 1:
            for tensor in tensors:
                whole = tensor.contiguous()
                dist.broadcast(whole, 0)
                if whole is not tensor:
                    tensor.copy_(whole)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


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
    timeout = timedelta(seconds=config.get("timeout", COLLECTIVE_TIMEOUT))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    background = dist.new_group(backend="gloo", timeout=timeout)
    yield World(rank=rank, size=size, device=device, background=background)
    # Nobody leaves before all have what they need. The group is never destroyed: see `bootstrap.run_rank`.
    dist.barrier()
