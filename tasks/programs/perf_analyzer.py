"""The same load by NVIDIA's perf_analyzer: one turn of one version, as the seconds that each request took.

What it measured is read from its profile export, which holds every request's times, so that turns can be put together
and percentiles mean the same as for our own load.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .failures import ProgramFailed
from .jobs import LoadJob
from .triton_requests import Arrays

WINDOWS = 3
"""It wants that many measurements before it calls a result stable."""
NANOSECONDS = 1e-9
MARGIN_SECONDS = 60.0
"""Beyond the turn itself, until it counts as hanging."""


def turn(job: LoadJob, version: int, inputs: Arrays) -> tuple[list[float], float]:
    """Seconds of each request, and of all of them together. Raises `ProgramFailed` with its own words."""
    assert job["perf_analyzer"] is not None
    work = Path(job["work"])
    data, export = work / "input.json", work / "profile.json"
    batched = job["max_batch_size"] > 0
    data.write_text(json.dumps({"data": entries(inputs, batched=batched)}))
    export.unlink(missing_ok=True)
    argv = [
        job["perf_analyzer"],
        *("-m", job["model"], "-x", str(version), "-i", "grpc", "-u", job["url"]),
        *("-b", str(job["rows"] if batched else 1), "--input-data", str(data)),
        *("--concurrency-range", str(job["concurrency"])),
        *("--measurement-interval", str(max(1, round(1000 * job["seconds"] / WINDOWS)))),
        # Whether it is stable is not asked: the turns of both see the same unrest, and are put together.
        *("--max-trials", str(WINDOWS), "--stability-percentage", "999"),
        *("--profile-export-file", str(export)),
    ]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=job["seconds"] + MARGIN_SECONDS, cwd=work
    )
    if done.returncode != 0 or not export.is_file():
        said = " ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-3:])
        raise ProgramFailed(
            "not ready",
            f"perf_analyzer ended with status {done.returncode}: {said}",
            hint="measure with `gates.load.tool: own`",
            where=f"{job['model']}/{version} at {job['url']}",
        )
    return measured(json.loads(export.read_text()))


def entries(inputs: Arrays, *, batched: bool) -> list[dict[str, Any]]:
    """The inputs as perf_analyzer takes them: a row each, without the batch axis, where the server batches."""
    if not batched:
        return [{name: tensor(value) for name, value in inputs.items()}]
    rows = len(next(iter(inputs.values())))
    return [{name: tensor(value[row]) for name, value in inputs.items()} for row in range(rows)]


def tensor(value: np.ndarray[Any, np.dtype[Any]]) -> dict[str, Any]:
    return {"content": value.ravel().tolist(), "shape": list(value.shape)}


def measured(export: Mapping[str, Any]) -> tuple[list[float], float]:
    """Of each request that the export tells of, from being sent to its answer; and from the first to the last."""
    requests = [request for experiment in export["experiments"] for request in experiment["requests"]]
    spans = [(r["timestamp"], r["response_timestamps"][-1]) for r in requests if r["response_timestamps"]]
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return [(end - start) * NANOSECONDS for start, end in spans], whole * NANOSECONDS
