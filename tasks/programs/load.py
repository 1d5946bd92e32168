"""Latency and throughput of two versions of a model on one server, asked in turns so that both see the same machine.

Only ratios of what one run measured are worth comparing. Job and product are `jobs.LoadJob`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import perf_analyzer
from .golden import load_golden
from .jobs import Latency, LoadJob, LoadReport
from .notes import Notes, Progress, write_json
from .triton_requests import Arrays, triton

WARM_UP = 5
"""Requests of each version that are not counted."""


def main(job: LoadJob) -> None:
    notes = Notes()
    golden = load_golden(Path(job["golden"]))
    names = [key.removeprefix("outputs.") for key in golden if key.startswith("outputs.")]
    inputs = {key.removeprefix("inputs."): value for key, value in golden.items() if key.startswith("inputs.")}
    inputs = {name: np.ascontiguousarray(value[: job["rows"]]) for name, value in inputs.items()}
    found: dict[int, list[float]] = {version: [] for version in job["versions"]}
    progress = Progress(job["rounds"])
    for version in job["versions"]:
        turn(job, version, names, inputs, requests=WARM_UP)

    spent = dict.fromkeys(job["versions"], 0.0)
    for done in range(job["rounds"]):
        # Whoever goes first finds a machine that the other has just kept busy: they take turns in that too.
        for version in job["versions"] if done % 2 == 0 else reversed(job["versions"]):
            if job["perf_analyzer"] is None:
                times, seconds = turn(job, version, names, inputs), job["seconds"]
            else:
                times, seconds = perf_analyzer.turn(job, version, inputs)
            found[version] += times
            spent[version] += seconds
        progress(done + 1, f"load: {done + 1}/{job['rounds']} rounds")
    report: LoadReport = {"versions": {str(v): latency(times, spent[v]) for v, times in found.items()}}
    write_json(Path(job["output"]) / "report.json", report)
    notes.write(Path(job["work"]))


def turn(
    job: LoadJob, version: int, names: Sequence[str], inputs: Arrays, *, requests: int | None = None
) -> list[float]:
    """Seconds of each request of one version's turn, or of that many requests of each client."""
    times: list[float] = []
    failed: list[BaseException] = []
    deadline = time.monotonic() + job["seconds"]

    def drive() -> None:
        try:
            infer = triton({"url": job["url"], "model": job["model"], "version": version}, names)
            left = requests
            while time.monotonic() < deadline if left is None else left > 0:
                began = time.monotonic()
                infer(inputs)
                times.append(time.monotonic() - began)
                left = None if left is None else left - 1
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that can report it
            failed.append(error)

    threads = [threading.Thread(target=drive) for _ in range(job["concurrency"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return times


def latency(times: Sequence[float], seconds: float) -> Latency:
    """Percentiles by nearest rank."""
    ordered = sorted(times)

    def at(share: float) -> float:
        return 1000 * ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return {
        "p50": at(0.5),
        "p95": at(0.95),
        "p99": at(0.99),
        "throughput": len(ordered) / seconds,
        "requests": len(ordered),
    }
