"""The report of a run as one JSON value, and the same for people who read Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from flows.chain import Job
from flows.release import Served
from flows.show import RUNTIME_TITLES
from tasks import deploy, validate
from tasks.artifacts.lineage import Lineage
from tasks.artifacts.record import ArtifactRef
from tasks.errors import GateResult
from tasks.releases import gates_json
from tasks.stage import Outcome

RELEASED, UNCHANGED, BUILT = "released", "unchanged", "built"
"""States of a report."""


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

    `pipeline`, `state` (`released`, `unchanged`, or `built` where the live servers were not to be touched), `seconds`,
    `stages`, `metrics` (per metric, per runtime), `gates`, `release` (also one that is not promoted) and `served`. What
    was judged just now, `gates`, takes the place of what is recorded of the same gate.
    """
    metrics: dict[str, dict[str, float]] = {}
    if "validate" in products:
        measured = validate.measured(job.store.path(products["validate"]))["metrics"]
        metrics = {name: dict(values) for name, values in measured.items()}
    if served is not None:
        for name, values in served.metrics.items():
            metrics.setdefault(name, {}).update(values)
    changed = any(outcome.state != "reused" for outcome in outcomes)
    judged = {(gate["gate"], gate["runtime"]): gate for gate in gates_json(gates)}
    for gate in () if served is None else served.gates:
        judged.setdefault((gate["gate"], gate["runtime"]), dict(gate))
    deployed = any(outcome.stage == deploy.STAGE for outcome in outcomes)
    state = BUILT if not deployed else RELEASED if changed else UNCHANGED
    report = {
        "pipeline": job.pipeline.name,
        "state": state,
        "seconds": round(seconds, 3),
        "stages": [outcome.to_json() for outcome in outcomes],
        "metrics": metrics,
        "gates": list(judged.values()),
        "release": None,
        "served": None,
    }
    return report | ({} if served is None else served.to_json())


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What the page shows beside the report's own values."""

    run: str | None = None
    """The flow run in Prefect's UI."""
    history: Sequence[Mapping[str, Any]] = ()
    """The training, epoch by epoch."""
    lineage: Lineage | None = None
    """Of the release, else of the last product."""

    @classmethod
    def of(cls, job: Job, report: Mapping[str, Any], *, run: str | None = None) -> "Extras":
        """Read from the store what the report's artifacts have to tell."""
        made = [row["artifact"] for row in report["stages"] if row["artifact"]]
        trained = next((row["artifact"] for row in report["stages"] if row["stage"] == "train"), None)
        record = None if trained is None else job.store.get_record(job.store.resolve(trained))
        history = () if record is None else cast("Sequence[Mapping[str, Any]]", record.details.get("history", ()))
        end = report["release"]["name"] if report["release"] else made[-1] if made else None
        return cls(run=run, history=history, lineage=None if end is None else job.store.lineage(job.store.resolve(end)))


def markdown(report: Mapping[str, Any], extras: Extras | None = None, *, curves: str | None = None) -> str:
    """The report as a page; `curves` is the address of a picture of the training's."""
    extras = extras or Extras()
    lines = [f"# {report['pipeline']}: {report['state']}", ""]
    lines += _links(report, extras)
    lines += _table(
        ["stage", "result", "artifact", "seconds"],
        [[row["stage"], row["state"], row["artifact"] or "", f"{row['seconds']:.1f}"] for row in report["stages"]],
    )
    if report["metrics"]:
        runtimes = [name for name in RUNTIME_TITLES if any(name in values for values in report["metrics"].values())]
        lines += ["", "## Metrics on the test data", ""]
        lines += _table(
            ["metric", *(RUNTIME_TITLES[name] for name in runtimes)],
            [
                [name, *(f"{values[r]:.4f}" if r in values else "" for r in runtimes)]
                for name, values in report["metrics"].items()
            ],
        )
    if report["gates"]:
        lines += ["", "## Gates", ""]
        lines += _table(
            ["gate", "runtime", "result", "measured", "allowed"],
            [
                [
                    g["gate"],
                    g["runtime"],
                    "passed" if g["passed"] else "**failed**",
                    f"{g['measured']:.6g}",
                    g["allowed"],
                ]
                for g in report["gates"]
            ],
        )
    if extras.history:
        lines += ["", "## Training", ""]
        lines += _table(["", "first", "last", "epoch by epoch"], curves_in_words(extras.history))
        if curves is not None:
            lines += ["", f"![curves of the training]({curves})"]
    if extras.lineage is not None:
        lines += ["", "## Made of", "", *_lineage(extras.lineage, extras.lineage.label, 0, set())]
    if report["served"] is not None:
        served = report["served"]
        lines += ["", "## Ask it", "", "```sh", served["call"], "```"]
    return "\n".join(lines) + "\n" + (f"\n{end(report['error'])}" if report.get("error") else "")


END = "## How it ended"


def end(message: str) -> str:
    """The part of the page that tells why a run did not reach its end."""
    return f"{END}\n\n```text\n{message}\n```\n"


def curves_in_words(history: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row per measured value: its first, its last, and a line of bars, which any page can show."""
    series: dict[str, list[float | None]] = {}
    for epoch in history:
        values = {name: epoch[name] for name in ("train_loss", "validation_loss") if name in epoch}
        values |= {f"validation {name}": value for name, value in (epoch.get("validation") or {}).items()}
        for name, value in values.items():
            series.setdefault(name.replace("_", " "), []).append(value)
    rows = []
    for name, values_ in series.items():
        known = [value for value in values_ if value is not None]
        if known:
            rows.append([name, f"{known[0]:.4g}", f"{known[-1]:.4g}", bars(known)])
    return rows


def bars(values: Sequence[float], width: int = 40) -> str:
    """A curve as a line of bars, at most `width`; equal values are all low.

    >>> bars([0.0, 0.5, 1.0])
    '▁▅█'
    """
    step = max(1, -(-len(values) // width))
    shown = [*values[:-1:step], values[-1]]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in shown)


BARS = "▁▂▃▄▅▆▇█"


def _links(report: Mapping[str, Any], extras: Extras) -> list[str]:
    facts = []
    if extras.run is not None:
        facts.append(f"[this run]({extras.run})")
    if (release := report["release"]) is not None:
        word = "released as" if release["promoted"] else "candidate"
        facts.append(
            f"{word} `{release['name']}`: model `{release['model']}`, version {release['version']}, "
            f"in `{release['repository']}`"
        )
    if (served := report["served"]) is not None:
        facts.append(
            f"served at [{served['http']}]({served['http']}/v2/models/{release['model']}) (gRPC {served['grpc']})"
        )
    return [*(f"- {fact}" for fact in facts), ""] if facts else []


def _lineage(node: Lineage, role: str, depth: int, told: set[str]) -> list[str]:
    name = f"{role}: " if role not in (node.label, node.record.stage if node.record else None) else ""
    line = f"{'  ' * depth}- {name}`{node.label}` {node.content.short}"
    if str(node.record_id) in told:
        return [line]
    told.add(str(node.record_id))
    return [line, *(part for r, m in node.materials.items() for part in _lineage(m, r, depth + 1, told))]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(titles), _row(["---"] * len(titles)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
