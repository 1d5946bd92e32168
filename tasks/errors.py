"""Every failure that a user can mend, as one small tree; its text says what happened, where, and what to do.

    EnginehouseError
    ├── ConfigError        2   the pipeline file, the recipe or the command line is wrong
    ├── ToolMissing        3   a program or a library that the work needs is not there
    ├── CommandFailed      4   a child process failed, was killed or ran past its deadline
    ├── GateFailed         5   a measured value lies outside what the pipeline file allows
    │   └── ExportRefused  5   the exported graph is not what was declared, or does not answer as PyTorch does
    ├── NotReady           6   a server does not come up, or does not serve what it should
    ├── ArtifactCorrupt    7   stored bytes are not the bytes that were stored
    │   └── NotReproducible 7  a rebuild that must give equal bytes gave others
    ├── StoreUnusable      8   the artifact store or the model repository cannot be read or written
    ├── Refused            9   doing it would overwrite or break something that exists
    └── Rejected          10   a person was asked for approval and said no

The number is the exit status of the command line (`flows.cli`, the only place that exits). Errors of programming are
no part of this tree and are never wrapped in it: they keep their traceback and end with status 1.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


class EnginehouseError(Exception):
    """The root. `str(error)` is complete for a person: what, where, and the mend."""

    exit_status: ClassVar[int] = 1
    kind: ClassVar[str] = "error"

    @property
    def passes(self) -> bool:
        """Whether the same may go well in a while though nobody mends anything: a run that nobody watches retries."""
        return False


class Told(EnginehouseError):
    """An error of this tree that another process, or a run on another machine, told us in words."""

    def __init__(self, message: str, *, kind: str, exit_status: int) -> None:
        super().__init__(message)
        self.kind, self.exit_status = kind, exit_status  # type: ignore[misc]  # of this one instance


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in an input file."""

    message: str
    """What is wrong and what was expected, without the place."""
    file: Path | None = None
    line: int | None = None
    """Counted from 1; `None` where the value did not come from a line (a default, `--set`)."""
    field: str | None = None
    """Dotted path of the field, such as `train.batch_size`."""
    hint: str | None = None
    """The mend: the nearest valid name, the command to run."""

    def __str__(self) -> str:
        place = "" if self.file is None else f"{self.file}:{self.line}: " if self.line else f"{self.file}: "
        field = f"{self.field}: " if self.field else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{place}{field}{self.message}{hint}"


class ConfigError(EnginehouseError):
    """The pipeline file, the recipe or the command line is wrong; holds every problem found, not only the first."""

    exit_status = 2
    kind = "configuration"

    def __init__(self, *problems: Problem | str) -> None:
        self.problems: tuple[Problem, ...] = tuple(Problem(p) if isinstance(p, str) else p for p in problems)
        super().__init__("\n".join(map(str, self.problems)))


class ToolMissing(EnginehouseError):
    """A program or a library that the work needs is not there."""

    exit_status = 3
    kind = "tool missing"

    def __init__(self, tool: str, *, why: str, mend: str) -> None:
        self.tool, self.why, self.mend = tool, why, mend
        super().__init__(f"{tool} is missing: {why}\n{mend}")


class CommandFailed(EnginehouseError):
    """A child process failed, was killed or ran past its deadline."""

    exit_status = 4
    kind = "command failed"

    def __init__(
        self,
        what: str,
        *,
        argv: Sequence[str],
        ended: str,
        log: Path | None = None,
        last_lines: Sequence[str] = (),
        cause: str | None = None,
    ) -> None:
        """`ended` says how, such as `exit status 1`, `killed by SIGKILL` or `deadline of 60 s passed`."""
        self.what, self.argv, self.ended, self.log = what, tuple(argv), ended, log
        self.last_lines, self.cause = tuple(last_lines), cause
        parts = [f"{what} failed: {cause or ended}"]
        if cause:
            parts.append(f"ended: {ended}")
        parts.append(f"command: {shlex.join(argv)}")
        if log is not None:
            parts.append(f"log: {log}")
        if last_lines:
            parts.append("last lines:\n" + "\n".join(f"  {line}" for line in last_lines))
        super().__init__("\n".join(parts))

    def with_cause(self, cause: str | None) -> CommandFailed:
        """The same failure with the cause that somebody found who knows the command."""
        return CommandFailed(
            self.what, argv=self.argv, ended=self.ended, log=self.log, last_lines=self.last_lines, cause=cause
        )

    @property
    def passes(self) -> bool:
        """For a port that is taken, and for a child that was killed for no reason that lies in its work."""
        if self.cause is None:
            return self.ended == "supervisor killed" or self.ended.startswith("killed by")
        return "port is in use" in self.cause


@dataclass(frozen=True, slots=True)
class GateResult:
    """One comparison of a measured value with what is allowed."""

    gate: str
    """Such as `parity` or `metrics.accuracy`."""
    runtime: str
    """Where it was measured: `pytorch`, `onnx`, `engine`, `staging` or `live`."""
    measured: float
    allowed: str
    """Such as `>= 0.95` or `<= 1e-04`."""
    passed: bool

    def __str__(self) -> str:
        return f"{self.gate} on {self.runtime}: measured {self.measured:.6g}, allowed {self.allowed}"


class GateFailed(EnginehouseError):
    """A measured value lies outside what the pipeline file allows; nothing was released."""

    exit_status = 5
    kind = "gate failed"

    def __init__(self, message: str, *, results: Sequence[GateResult] = ()) -> None:
        self.results = tuple(results)
        super().__init__("\n".join([message, *(f"  {r}" for r in self.results if not r.passed)]))


class ExportRefused(GateFailed):
    """The exported graph is not what was declared, or does not answer as PyTorch does; nothing was committed."""

    kind = "export refused"


class NotReady(EnginehouseError):
    """A server does not come up, or does not serve what it should."""

    exit_status = 6
    kind = "not ready"

    def __init__(
        self, message: str, *, log: Path | None = None, last_lines: Sequence[str] = (), passes: bool = True
    ) -> None:
        """`passes`: whether waiting may help, as it does not where the server has said that it cannot."""
        self.log, self.last_lines, self._passes = log, tuple(last_lines), passes
        parts = [message]
        if log is not None:
            parts.append(f"log: {log}")
        if last_lines:
            parts.append("last lines:\n" + "\n".join(f"  {line}" for line in last_lines))
        super().__init__("\n".join(parts))

    @property
    def passes(self) -> bool:
        """A server may come up, and a port become free."""
        return self._passes


class ArtifactCorrupt(EnginehouseError):
    """Stored bytes are not the bytes that were stored."""

    exit_status = 7
    kind = "artifact corrupt"

    def __init__(self, message: str, *, dependents: Sequence[str] = ()) -> None:
        """`dependents` names the artifacts and releases that need the bytes, such as `digits/engine@3`."""
        self.dependents = tuple(dependents)
        needed = f"\nneeded by: {', '.join(self.dependents)}" if self.dependents else ""
        super().__init__(message + needed)


class NotReproducible(ArtifactCorrupt):
    """A rebuild of a stage that promises equal bytes gave others."""

    kind = "not reproducible"


class StoreUnusable(EnginehouseError):
    """The artifact store or the model repository cannot be read or written."""

    exit_status = 8
    kind = "store unusable"


class Refused(EnginehouseError):
    """Doing it would overwrite or break something that exists; nothing was changed."""

    exit_status = 9
    kind = "refused"


class Rejected(EnginehouseError):
    """A person was asked for approval and said no; the candidate stays a candidate, and nothing was moved."""

    exit_status = 10
    kind = "rejected"
