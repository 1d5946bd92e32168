"""Batches of named arrays in one `.npz` file, the way they travel between environments; numpy alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def write_batches(path: Path, batches: Iterable[Mapping[str, Array]]) -> int:
    """Write them in order; returns how many. Law: `read_batches` gives equal arrays back."""
    flat = {f"{index:05}/{name}": value for index, batch in enumerate(batches) for name, value in batch.items()}
    np.savez(path, **flat)  # type: ignore[arg-type] # numpy's stub takes the first keyword for a flag
    return len({key.partition("/")[0] for key in flat})


def read_batches(path: Path) -> list[dict[str, Array]]:
    """The batches of a file, in order."""
    batches: dict[str, dict[str, Array]] = {}
    with np.load(path) as file:
        for key in file.files:
            index, _, name = key.partition("/")
            batches.setdefault(index, {})[name] = file[key]
    return [batches[index] for index in sorted(batches)]
