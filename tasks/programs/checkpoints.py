"""Checkpoints in the working folder: whole or not there, checked when they are read, written while training goes on.

    checkpoints/
        LATEST                     the name of the newest whole checkpoint, replaced by one rename
        step-00000120/
            .metadata  __0_0.distcp …   tensors, by torch.distributed.checkpoint: any number of ranks can read them
            loop.pt                     the rest: position, history, scheduler, scaler, losses so far
            checksums.json              SHA-256 of each file above
        .step-00000180.partial/    being written, or left by a crash

A checkpoint gets its own folder, is synced, renamed, and only then named in LATEST; the last `keep` stay. One that is
cut or changed is noticed by its checksums, and the one before it is taken.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .failures import ProgramFailed
from .notes import Notes
from .rank_failures import is_lost_peer
from .world import World

LATEST, CHECKSUMS, LOOP = "LATEST", "checksums.json", "loop.pt"
State = dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, seen from one rank. All ranks call `save` and `load` together."""

    def __init__(self, folder: Path, world: World, notes: Notes, *, keep: int = 2, asynchronous: bool = True) -> None:
        self._folder, self._world, self._notes = folder, world, notes
        self._keep, self._asynchronous = keep, asynchronous
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._staged: State = {}
        self.saved = 0
        self.stall_seconds = 0.0
        """How long training stood still for checkpoints, all together."""
        self.write_seconds = 0.0
        if world.leads:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".*"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def save(self, step: int, tensors: State, loop: State, *, wait: bool = False) -> None:
        """Write a checkpoint: `tensors` are copied before this returns, so training may go on and change them.

        `loop` is of interest on the leading rank only. With `wait`, returns when LATEST names it.
        """
        began = time.monotonic()
        self.finish()
        self._staged = _copy(tensors, self._staged)
        self._pending = self._writer.submit(self._write, step, self._staged, loop if self._world.leads else None)
        if wait or not self._asynchronous:
            self.finish()
            self._world.barrier()
        self.saved += 1
        self.stall_seconds += time.monotonic() - began

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; raises what went wrong with it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except OSError as error:
            raise self._unwritten(self._world.rank, error) from error
        except CheckpointException as error:
            # Every rank gets it, with what befell each. That a peer is missing is no fault of the disk.
            for rank, (cause, _) in sorted(error.failures.items()):
                if not is_lost_peer(cause):
                    raise self._unwritten(rank, cause) from error
            raise

    def _unwritten(self, rank: int, cause: BaseException) -> ProgramFailed:
        why = cause.strerror if isinstance(cause, OSError) else None
        return ProgramFailed(
            "training failed",
            f"a checkpoint cannot be written: {why or f'{type(cause).__name__}: {cause}'} (rank {rank})",
            hint="is there room on the disk? The next run goes on from the last whole checkpoint",
            where=str(self._folder),
        )

    def _write(self, step: int, tensors: State, loop: State | None) -> None:
        began = time.monotonic()
        partial = self._folder / f".step-{step:08d}.partial"
        writer = FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that a lone process is not distributed
            # Returns at the leading rank when every rank's part is written and synced.
            save(tensors, storage_writer=writer, process_group=self._world.background, no_dist=self._world.size == 1)
        if loop is not None:
            self._complete(partial, step, loop)
        self.write_seconds += time.monotonic() - began

    def _complete(self, partial: Path, step: int, loop: State) -> None:
        torch.save(loop, partial / LOOP)
        sums = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
        (partial / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n")
        for name in (".metadata", LOOP, CHECKSUMS):
            _sync(partial / name)
        _sync(partial)
        whole = self._folder / f"step-{step:08d}"
        if whole.exists():  # written by a run that was set back to an older one, which was whole when this one was not
            shutil.rmtree(whole)
        partial.rename(whole)
        _sync(self._folder)
        temporary = self._folder / f".{LATEST}"
        temporary.write_text(whole.name + "\n")
        _sync(temporary)
        temporary.replace(self._folder / LATEST)
        _sync(self._folder)
        for old in self._whole()[self._keep :]:
            shutil.rmtree(old)

    def newest(self) -> str | None:
        """The name of the newest whole checkpoint, the same on every rank."""
        chosen: str | None = self._world.leaders(self._choose() if self._world.leads else None)
        return chosen

    def load(self, chosen: str, tensors: State) -> State:
        """Fill `tensors` from a checkpoint and return its loop."""
        folder = self._folder / chosen
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(tensors, checkpoint_id=folder, no_dist=self._world.size == 1)
        loop: State = torch.load(folder / LOOP, weights_only=True, map_location="cpu")
        return loop

    def _choose(self) -> str | None:
        """LATEST's, or the newest before it that is whole; what is newer was never finished."""
        try:
            latest = (self._folder / LATEST).read_text().strip()
        except FileNotFoundError:
            return None
        for folder in self._whole():
            if folder.name > latest:
                continue
            problem = damage(folder)
            if problem is None:
                return folder.name
            self._notes.warn(f"the checkpoint {folder.name} cannot be used ({problem}): going on from one before it")
        return None

    def _whole(self) -> list[Path]:
        """Newest first."""
        return sorted(self._folder.glob("step-*"), reverse=True)

    def summary(self) -> dict[str, float]:
        """For the record."""
        return {
            "saved": self.saved,
            "stall_seconds": round(self.stall_seconds, 4),
            "write_seconds": round(self.write_seconds, 4),
        }


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        sums: Mapping[str, str] = json.loads((folder / CHECKSUMS).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return f"it has no {CHECKSUMS}"
    for name, expected in sums.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _sha256(path) != expected:
            return f"{name} is not what was written"
    return None


def plain(value: Any, what: str) -> Any:
    """The same in types that are read back without running any code: numpy's numbers become Python's.

    Raises `ProgramFailed` for what cannot be; `what` says where it was.
    """
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | Tensor):
        return value
    if isinstance(value, Mapping):
        return {plain(key, what): plain(part, f"{what}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(plain(part, what) for part in value)
    raise ProgramFailed(
        "configuration",
        f"the recipe's scheduler cannot be kept in a checkpoint: {what} is of the type {type(value).__qualname__}",
        hint="its state_dict() may hold numbers, text, tensors, and lists and dicts of them",
    )


def _copy(value: Any, into: Any) -> Any:
    """A deep copy on the CPU; tensors of a former copy are used again, since new memory costs more than the copying."""
    if isinstance(value, Tensor):
        fits = isinstance(into, Tensor) and into.shape == value.shape and into.dtype == value.dtype
        target = into if fits else torch.empty_like(value, device="cpu")
        return target.copy_(value.detach())
    if isinstance(value, Mapping):
        former = into if isinstance(into, Mapping) else {}
        return {key: _copy(part, former.get(key)) for key, part in value.items()}
    if isinstance(value, list | tuple):
        former_parts = into if isinstance(into, list | tuple) and len(into) == len(value) else [None] * len(value)
        return type(value)(_copy(part, old) for part, old in zip(value, former_parts, strict=True))
    return value


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
