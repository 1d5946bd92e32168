"""What runs leave in the home for people, CI and the exporter: a folder for each, with its report as page and as JSON.

runs/20250131T120000.000000Z-digits/report.md      for people, and for a CI's job summary
                                    report.json    the same for machines, with the time and the state
                                    curves.png     of the training, where plots can be drawn
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.report import BUILT, END, RELEASED, UNCHANGED, end
from tasks.artifacts.durable import reported
from tasks.home import Home
from tasks.stage import REUSED

PAGE, VALUES, CURVES = "report.md", "report.json", "curves.png"
RUNNING, WAITING, FAILED, REJECTED, CANCELLED = "running", "waiting", "failed", "rejected", "cancelled"
"""States beside those of a report (`report_of`) and Prefect's names of bad ends: it goes on; it waits for a person; it
ended with an error; a person said no; a person ended it."""
SUCCESS = frozenset({RELEASED, UNCHANGED, BUILT})
"""States of a run that reached its end."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Where one run leaves its report; made with the first file."""

    path: Path

    @classmethod
    def new(cls, home: Home, pipeline: str, moment: datetime | None = None) -> "RunFolder":
        """The folder of a run that began at `moment` (default: now)."""
        stamp = (moment or datetime.now(UTC)).astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        return cls(path=home.runs / f"{stamp}-{pipeline}")

    @property
    def page(self) -> Path:
        """The report for people."""
        return self.path / PAGE

    def keep(self, report: Mapping[str, Any], page: str | None = None, curves: Path | None = None) -> None:
        """Write or replace the report; what is not given stays as it was."""
        with reported(self.path, "the run's folder"):
            self.path.mkdir(parents=True, exist_ok=True)
            if curves is not None:
                shutil.copyfile(curves, self.path / CURVES)
            if page is not None:
                _replace(self.page, page)
            ended = datetime.now(UTC).isoformat(timespec="microseconds")
            _replace(self.path / VALUES, json.dumps({**report, "ended": ended}) + "\n")

    def fail(self, pipeline: str, state: str, message: str) -> None:
        """Write down that the run did not reach its end; what it had reported until then stays."""
        values = self.last() or {"pipeline": pipeline, "stages": [], "metrics": {}, "gates": []}
        before = self.page.read_text().partition("\n")[2] if self.page.exists() else ""
        before = before.partition(f"\n{END}\n")[0]
        self.keep({**values, "state": state, "error": message}, f"# {pipeline}: {state}\n{before}\n{end(message)}")

    def last(self) -> dict[str, Any] | None:
        """The report as it was kept last."""
        return read(self.path / VALUES)


def carried_over(report: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The report with what an earlier part of the same run had done, and this part found done.

    A run that waited for a person begins at the top again.
    """
    now = {row["stage"]: row for row in report["stages"]}
    then = {} if before is None else {row["stage"]: row for row in before["stages"] if row["state"] != FAILED}
    both = [(now[stage]["artifact"], then[stage]["artifact"]) for stage in now.keys() & then.keys()]
    if any(None not in (ours, theirs) and ours != theirs for ours, theirs in both):
        return dict(report)  # it came to another candidate
    rows = [then.get(stage, row) if row["state"] == REUSED else row for stage, row in now.items()]
    rows += [row for stage, row in then.items() if stage not in now]
    changed = any(row["state"] != REUSED for row in rows)
    return {**report, "stages": rows} | ({"state": RELEASED} if changed and report["state"] == UNCHANGED else {})


def _replace(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def read(file: Path) -> dict[str, Any] | None:
    """One `report.json`; None where there is none that can be read."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and "ended" in value else None


@dataclass
class RunReports:
    """Every run's report, read once each, and again only when it was replaced."""

    home: Home
    _known: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)

    def refresh(self) -> list[dict[str, Any]]:
        """All reports as they are now, in the order in which they ended: one that waited for a person is overtaken."""
        found: dict[str, tuple[int, dict[str, Any]]] = {}
        for folder in sorted(self.home.runs.iterdir()) if self.home.runs.is_dir() else ():
            file = folder / VALUES
            try:
                changed = file.stat().st_mtime_ns
            except (FileNotFoundError, NotADirectoryError):  # a log, or a run that has not reported yet
                continue
            before = self._known.get(folder.name)
            if before is not None and before[0] == changed:
                found[folder.name] = before
            elif (value := read(file)) is not None:
                found[folder.name] = (changed, value)
        self._known = found
        return sorted((value for _, value in found.values()), key=lambda value: str(value["ended"]))
