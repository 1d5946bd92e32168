"""The same requests to a champion and a candidate: how far their answers and their latencies lie apart.

Job and product are `jobs.ShadowJob`. Requests are those of a file, in the JSON of Triton's HTTP protocol, one a line,
or as arrays in `.npz`, one a row; or the golden inputs, row by row.
"""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .failures import ProgramFailed
from .golden import load_golden
from .jobs import OutputDifference, ShadowJob, ShadowReport
from .load import latency
from .notes import Notes, Progress, write_json
from .triton_requests import TRITON_TYPES, Arrays, shapes, triton

DTYPES = {triton_name: numpy_name for numpy_name, triton_name in TRITON_TYPES.items()}
WORST = 5
"""How many of the requests that differ most are told by their number."""


def main(job: ShadowJob) -> None:
    notes = Notes()
    golden = load_golden(Path(job["golden"]))
    names = [key.removeprefix("outputs.") for key in golden if key.startswith("outputs.")]
    requests = list(recorded(Path(job["requests"])) if job["requests"] else rows(golden))
    if not requests:
        raise ProgramFailed("configuration", "there is no request to replay", where=str(job["requests"]))
    asks = {"champion": triton(job["champion"], names), "candidate": triton(job["candidate"], names)}
    for ask in asks.values():  # the first request of each pays for the connection
        ask(requests[0])
    times: dict[str, list[float]] = {who: [] for who in asks}
    differences: dict[str, list[float]] = {name: [] for name in names}
    changed: dict[str, list[bool]] = {name: [] for name in names}
    progress = Progress(len(requests))
    for done, request in enumerate(requests):
        answers: list[Arrays] = []
        for who, ask in asks.items():
            began = time.monotonic()
            answers.append(ask(request))
            times[who].append(time.monotonic() - began)
        for name in names:
            theirs, ours = (answer[name] for answer in answers)
            difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
            differences[name].append(float(difference.max(initial=0.0)))
            if ours.ndim > 1 and ours.shape[-1] > 1:
                changed[name] += (ours.argmax(-1) != theirs.argmax(-1)).ravel().tolist()
        progress(done + 1, f"shadow: {done + 1}/{len(requests)} requests")
    report: ShadowReport = {
        "requests": len(requests),
        "outputs": {name: summed(differences[name], changed[name]) for name in names},
        "latency": {who: latency(spent, sum(spent)) for who, spent in times.items()},
    }
    write_json(Path(job["output"]) / "report.json", report)
    notes.write(Path(job["work"]))


def summed(differences: list[float], changed: list[bool]) -> OutputDifference:
    order = np.argsort(differences)[::-1][:WORST]
    return {
        "max": max(differences),
        "mean": sum(differences) / len(differences),
        "choices": len(changed),
        "other_choice": sum(changed),
        "worst": [int(index) for index in order],
    }


def rows(golden: Arrays) -> Iterator[Arrays]:
    """The golden inputs, a request for each row."""
    return by_row({key.removeprefix("inputs."): value for key, value in golden.items() if key.startswith("inputs.")})


def by_row(inputs: Arrays) -> Iterator[Arrays]:
    """A request for each row of the inputs."""
    for row in range(len(next(iter(inputs.values())))):
        yield {name: np.ascontiguousarray(value[row : row + 1]) for name, value in inputs.items()}


def recorded(path: Path) -> Iterator[Arrays]:
    """The requests of a file. Data only: nothing in it is run."""
    if path.suffix == ".npz":
        yield from by_row(arrays(path))
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                yield {tensor["name"]: array(tensor) for tensor in json.loads(line)["inputs"]}
            except (ValueError, KeyError, TypeError) as error:
                raise ProgramFailed(
                    "configuration",
                    f"is no request in the JSON of Triton's HTTP protocol: {type(error).__name__}: {error}",
                    where=f"{path}:{number}",
                ) from error


def arrays(path: Path) -> Arrays:
    """The inputs that an `.npz` holds: by name, all with the same number of rows."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        why = f"is no .npz of plain arrays: {error}"
        raise ProgramFailed("configuration", why, where=str(path)) from error
    if len({len(value) if value.ndim else -1 for value in found.values()} - {-1}) != 1 or not found:
        why = f"holds arrays of different numbers of rows: {shapes(found)}"
        raise ProgramFailed("configuration", why, where=str(path))
    return found


def array(tensor: dict[str, Any]) -> Any:
    """One input of a recorded request."""
    return np.array(tensor["data"], dtype=DTYPES[tensor["datatype"]]).reshape(tensor["shape"])
