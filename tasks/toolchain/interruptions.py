"""What interrupts a training that torchrun runs: written down as it happens, told in the record, answered by a restart.

    work/interruptions.jsonl     one line for each (`_Entry`); it outlives the run, so that the record of what is built
                                 at last tells also of what befell earlier runs
    work/running                 there while a run of ours trains; one that finds it follows a run that was killed

torchrun restarts workers by itself and says so in one line, which names the process that it saw end first. Where the
ranks know better, the first cause takes that line's place.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from tasks.errors import CommandFailed
from tasks.toolchain.command import usual_cause
from tasks.toolchain.torchrun import (
    agent_signal,
    cause_among,
    death,
    end_of_log,
    failures,
    failures_about,
    lost_rendezvous,
    nobody_came,
)

FILE, RUNNING = "interruptions.jsonl", "running"


class _Entry(TypedDict):
    reason: str
    checkpoint: str | None
    """The newest one at that time; None where there was none yet."""
    rank: NotRequired[int]
    """Whose end it was, where one rank's was the cause."""
    resubmitted: NotRequired[bool]
    """Whether torchrun itself had to be started again."""
    pid: NotRequired[int]
    """Of the process that torchrun named; not kept in the record."""


@dataclass(kw_only=True)
class Interruptions:
    """Sees one training's torchrun start, speak and fail; a `tasks.stage.Attendant`."""

    output: Path
    work: Path
    allowed: int
    """How often torchrun is started again without a new checkpoint in between."""
    invitation: str | None = None
    """A shell script with which other machines take part."""
    _deaths: int = field(default=0, init=False)
    """Lines about the end of workers since the last start."""

    def starting(self) -> str | None:
        """Torchrun is about to start."""
        if (self.work / RUNNING).exists():
            self._add({"reason": "the run that trained was killed", "checkpoint": self._checkpoint()})
        (self.work / RUNNING).touch()
        self._deaths = 0
        if self.invitation is None:
            return None
        script = self.work.parent / "join.sh"
        script.write_text(self.invitation)
        return f"other machines take part with: sh {shlex.quote(str(script))}"

    def line(self, line: str) -> None:
        """Torchrun, or one of its workers, said something."""
        if (seen := death(line)) is None:
            return
        self._deaths += 1
        beat = _beat_of(self.work, seen.pid)
        who = f"local rank {seen.local_rank}" if beat is None else f"rank {beat['rank']}"
        where = "" if beat is None else f' in the phase "{beat["phase"]}" of step {beat["step"]}'
        entry: _Entry = {
            "reason": f"{who} {seen.how}{where}",
            "checkpoint": self._checkpoint(),
            "rank": seen.local_rank if beat is None else beat["rank"],
            "pid": seen.pid,
        }
        # What the ranks know by now goes with this output, should this process be killed before it can `settle`.
        self._add(_with_first_cause(entry, self.output, seen.pid))

    def failed(self, failure: CommandFailed) -> str | None:
        """Torchrun ended otherwise than well: why it shall be started again, or None; raises what explains it better.

        What the ranks told in `error.json` would fail again in the same way, unless it is a notice of preemption.
        """
        lines = end_of_log(failure)
        error = self.output / "error.json"
        told = json.loads(error.read_bytes()) if error.exists() else None
        settle(self.output, self.work)
        if failure.ended == "cancelled" or failure.ended.startswith("deadline"):
            self._add({"reason": f"training ended: {failure.ended}", "checkpoint": self._checkpoint()})
            return None
        if told is not None and told["kind"] == "preempted":
            return self._again(told["message"])
        if told is not None:
            self._final(told["message"])
            return None
        if failure.ended.startswith("killed by"):
            return self._again(f"torchrun was {failure.ended}")
        if (name := agent_signal(lines)) is not None:
            return self._again(f"torchrun got {name}")
        explained = self._explained(failure, lines)
        if not lost_rendezvous(lines):
            self._final(explained.cause or explained.ended)
        elif (reason := self._again("the place where the machines meet was lost")) is not None:
            return reason
        raise explained from failure

    def _explained(self, failure: CommandFailed, lines: Sequence[str]) -> CommandFailed:
        """The failure with its first cause, which torchrun does not know."""
        cause = cause_among(failures(self.output), lines)
        parts = [] if cause is None else [cause.text, *([cause.hint] if cause.hint else [])]
        if cause is None and self._deaths:
            parts = [_read(self.work)[-1]["reason"]]
        # torchrun's own report may be longer than what `command.run` looked at.
        usual = failure.cause or nobody_came(lines) or usual_cause(lines)
        if usual is not None and (cause is None or "memory" in usual):
            parts.insert(0, usual)
        return failure.with_cause("\n".join(parts) or None)

    def _again(self, reason: str) -> str | None:
        """The reason, unless too many came at the same checkpoint."""
        at = self._checkpoint()
        self._add({"reason": reason, "checkpoint": at, "resubmitted": True})
        here = 0
        for entry in reversed(_read(self.work)):
            if entry["checkpoint"] != at:
                break
            here += entry.get("resubmitted", False)
        return reason if here <= self.allowed else None

    def _final(self, reason: str) -> None:
        if not self._deaths:  # otherwise torchrun's line is there already
            self._add({"reason": reason, "checkpoint": self._checkpoint()})

    def _add(self, entry: _Entry) -> None:
        with (self.work / FILE).open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def _checkpoint(self) -> str | None:
        latest = self.work / "checkpoints" / "LATEST"
        return latest.read_text().strip() if latest.exists() else None


def settle(output: Path, work: Path) -> list[dict[str, Any]]:
    """No torchrun runs any more: put the first cause, as the ranks know it, in place of what torchrun saw; all of them.

    What the ranks know lies in `output`, which the next start empties.
    """
    (work / RUNNING).unlink(missing_ok=True)
    entries = _read(work)
    for entry in entries:
        if "pid" in entry:
            _with_first_cause(entry, output, entry.pop("pid"))
    if entries:
        partial = work / f".{FILE}"
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        partial.replace(work / FILE)
    return [dict(entry) for entry in entries]


def _with_first_cause(entry: _Entry, output: Path, pid: int) -> _Entry:
    """The same entry, with what the ranks have told of that attempt in which this process ended."""
    cause = cause_among(failures_about(output, pid), ())
    if cause is None or (cause.silent and cause.rank == entry.get("rank")):
        return entry  # how a process ended that could say nothing is known from torchrun alone
    entry["reason"] = cause.text
    if cause.rank is not None:
        entry["rank"] = cause.rank
    return entry


def _read(work: Path) -> list[_Entry]:
    file = work / FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _beat_of(work: Path, pid: int) -> dict[str, Any] | None:
    """The last sign of life (`Beat` in tasks/programs/beats.py) of a process; None of a program without such."""
    for path in (work / "ranks").glob("rank-*.json"):
        beat: dict[str, Any] = json.loads(path.read_bytes())
        if beat["pid"] == pid:
            return beat
    return None
