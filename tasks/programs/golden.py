"""The golden answers of a released model, asked of a running server: no recipe, no torch, a second's work.

That is what going back to a proven release needs: neither the recipe, which may have changed since, nor the data.
Job and product are `jobs.GoldenJob`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from .failures import ProgramFailed
from .jobs import GoldenDifference, GoldenJob, GoldenReport
from .notes import Notes, write_json
from .triton_requests import Arrays, Infer, triton

DEFAULT_RTOL = 1e-4


def main(job: GoldenJob) -> None:
    notes = Notes()
    golden = load_golden(Path(job["golden"]))
    names = [key.removeprefix("outputs.") for key in golden if key.startswith("outputs.")]
    with notes.timed("golden"):
        found = compare_golden(
            triton(job["triton"], names),
            names,
            Path(job["golden"]),
            rtol=job.get("rtol", DEFAULT_RTOL),
            rows=max(1, job["max_batch_size"]),
            batched=job["max_batch_size"] > 0,
        )
    report: GoldenReport = {"golden": found}
    write_json(Path(job["output"]) / "report.json", report)
    notes.write(Path(job["work"]))


def load_golden(path: Path) -> Arrays:
    """The tensors `inputs.<name>` and `outputs.<name>`."""
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        raise ProgramFailed("configuration", f"golden examples cannot be read: {error}", where=str(path)) from error


def in_requests(infer: Infer, inputs: Arrays, rows: int, *, batched: bool) -> Arrays:
    """Ask in requests of at most `rows` rows, where the rows are a batch."""
    total = len(next(iter(inputs.values())))
    if not batched or total <= rows:
        return infer(inputs)
    parts = [infer({n: v[start : start + rows] for n, v in inputs.items()}) for start in range(0, total, rows)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def compare_golden(
    infer: Infer, names: Sequence[str], path: Path, *, rtol: float, rows: int, batched: bool
) -> GoldenDifference:
    """Ask the golden inputs; how far the answers are from the golden outputs."""
    golden = load_golden(path)
    inputs = {key.removeprefix("inputs."): value for key, value in golden.items() if key.startswith("inputs.")}
    outputs = in_requests(infer, inputs, rows, batched=batched)
    again = in_requests(infer, inputs, rows, batched=batched)
    found: GoldenDifference = {
        "max_abs_difference": 0.0,
        "beyond_rtol": 0.0,
        "outputs": {},
        "rows": 0,
        "repeated": 0.0,
    }
    for name in names:
        expected = golden[f"outputs.{name}"]
        got = outputs[name]
        if got.shape != expected.shape or not np.isfinite(got.astype(np.float64)).all():
            state = f"has the shape {list(got.shape)}" if got.shape != expected.shape else "holds nan or infinity"
            raise ProgramFailed(
                "not ready",
                f"the answer to the golden inputs {state}; expected {list(expected.shape)}, finite",
                where=f"output {name}",
            )
        exact = expected.astype(np.float64)
        difference = np.abs(got.astype(np.float64) - exact)
        found["outputs"][name] = float(difference.max(initial=0.0))
        found["beyond_rtol"] = max(found["beyond_rtol"], float((difference - rtol * np.abs(exact)).max(initial=0.0)))
        found["rows"] = int(expected.shape[0])
        repeated = np.abs(again[name].astype(np.float64) - got.astype(np.float64))
        found["repeated"] = max(found["repeated"], float(repeated.max(initial=0.0)))
    found["max_abs_difference"] = max(found["outputs"].values())
    return found
