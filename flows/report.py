"""The report of a run as one JSON value, and the same for people who read Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from flows.chain import Job
from flows.release import Served
from tasks import validate
from tasks.artifacts.record import ArtifactRef
from tasks.errors import GateResult
from tasks.stage import Outcome


def report_of(
    job: Job,
    outcomes: Sequence[Outcome],
    products: Mapping[str, ArtifactRef],
    gates: Sequence[GateResult] = (),
    *,
    served: Served | None = None,
    seconds: float = 0,
) -> dict[str, Any]:
    """Return what `--json` prints and what the summary shows.

    `pipeline`, `state` (`released`, `unchanged`, or `built` where nothing was to be served), `seconds`, `stages`,
    `metrics` (per metric, per runtime), `gates`, `release` and `served`.
    """
    metrics: dict[str, dict[str, float]] = {}
    if "validate" in products:
        measured = validate.measured(job.store.path(products["validate"]))["metrics"]
        metrics = {name: dict(values) for name, values in measured.items()}
    if served is not None:
        for name, values in served.metrics.items():
            metrics.setdefault(name, {}).update(values)
    changed = any(outcome.state != "reused" for outcome in outcomes)
    state = "built" if served is None else "released" if changed else "unchanged"
    report = {
        "pipeline": job.pipeline.name,
        "state": state,
        "seconds": round(seconds, 3),
        "stages": [outcome.to_json() for outcome in outcomes],
        "metrics": metrics,
        "gates": [
            {"gate": g.gate, "runtime": g.runtime, "measured": g.measured, "allowed": g.allowed, "passed": g.passed}
            for g in gates
        ],
        "release": None,
        "served": None,
    }
    return report | ({} if served is None else served.to_json())


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a page."""
    lines = [f"# {report['pipeline']}: {report['state']}", ""]
    lines += _table(
        ["stage", "result", "artifact", "seconds"],
        [[row["stage"], row["state"], row["artifact"] or "", f"{row['seconds']:.1f}"] for row in report["stages"]],
    )
    if report["metrics"]:
        runtimes = sorted({runtime for values in report["metrics"].values() for runtime in values})
        lines += ["", "## Metrics on the test data", ""]
        lines += _table(
            ["metric", *runtimes],
            [
                [name, *(f"{values[r]:.4f}" if r in values else "" for r in runtimes)]
                for name, values in report["metrics"].items()
            ],
        )
    if report["gates"]:
        lines += ["", "## Gates", ""]
        lines += _table(
            ["gate", "runtime", "measured", "allowed", ""],
            [
                [
                    g["gate"],
                    g["runtime"],
                    f"{g['measured']:.6g}",
                    g["allowed"],
                    "passed" if g["passed"] else "**failed**",
                ]
                for g in report["gates"]
            ],
        )
    if report["release"] is not None:
        release = report["release"]
        lines += [
            "",
            "## Release",
            "",
            f"`{release['name']}`: model `{release['model']}`, version {release['version']}",
        ]
        lines += [f"in `{release['repository']}`"]
    if report["served"] is not None:
        served = report["served"]
        lines += ["", f"Served at {served['http']} (gRPC {served['grpc']}).", "", "```sh", served["call"], "```"]
    return "\n".join(lines) + "\n"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(titles), _row(["---"] * len(titles)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
