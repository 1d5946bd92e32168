"""What a failed build means: its log searched for the known failures, each becoming a typed error with the mend.

A failure that is not known keeps the log's last lines, so nothing is lost but the short answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tasks.errors import CommandFailed, ConfigError, EnginehouseError, Problem, ToolMissing
from tasks.toolchain.trtexec.known_failures import KNOWN, Kind
from tasks.toolchain.trtexec.options import find_option
from tasks.toolchain.trtexec.output import TrtexecOutput

KILLED_IN_CONTAINER = "exit status 137"
"""How `docker run` ends when its container got a SIGKILL (128 + 9)."""

_LATE = frozenset({"graph refused", "workspace too small"})
"""Kinds that another failure's log holds too, so that they count only where nothing nearer was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A known failure that was recognised in a log."""

    kind: Kind
    cause: str
    mend: str
    raises: Literal["configuration", "tool missing", "command failed"]
    detail: str | None = None
    """The log's own line, or the node that it names."""


_NODE = re.compile(r"While parsing node number (\d+) \[(?P<op>[^\s\]]+)(?: -> \"(?P<output>[^\"]*)\")?\]")


def explain(lines: Iterable[str]) -> Explanation | None:
    """Find the nearest known cause in a log."""
    text = list(lines)
    node = next((found for line in text if (found := _NODE.search(line))), None)
    first: Explanation | None = None
    for known in KNOWN:
        for line in text:
            found = known.pattern.search(line)
            if not found:
                continue
            named = {name.rstrip("234"): value for name, value in found.groupdict().items() if value}
            if known.kind == "unsupported operator":
                named.setdefault("op", node["op"] if node else "in the log")
            detail = node[0] if node and known.kind in ("unsupported operator", "graph refused") else line.strip()
            explanation = Explanation(
                kind=known.kind,
                cause=known.cause.format_map(named),
                mend=known.mend.format_map(named),
                raises=known.raises,
                detail=detail,
            )
            if known.kind not in _LATE:
                return explanation
            first = first or explanation
    return first


def failure_of(failure: CommandFailed, lines: Iterable[str]) -> EnginehouseError:
    """The typed error behind a failed `trtexec`, or the failure as it was where the log says nothing known.

    What ended from outside (cancelled, late, killed for memory) keeps that cause, and gets its mend: the log only
    shows how far it came.
    """
    if not failure.ended.startswith("exit status"):
        cause = _mend_of_ending(failure)
        return failure if cause is None else failure.with_cause(cause)
    found = explain(lines)
    if found is None and failure.ended == KILLED_IN_CONTAINER:
        return failure.with_cause(f"the builder was killed inside its container, {_FOR_MEMORY}")
    return failure if found is None else _raised(found, failure)


_FOR_MEMORY = (
    "most likely for memory (RAM, not the GPU's): give the container or the job more, or lower "
    "engine.builder_optimization_level"
)


def _mend_of_ending(failure: CommandFailed) -> str | None:
    """What to do about an ending from outside; `None` where that is said already, or it was wanted."""
    if failure.cause is not None:
        return None
    if failure.ended == "killed by SIGKILL":
        return f"the builder was killed, {_FOR_MEMORY}"
    if failure.ended.startswith("deadline"):
        return f"{failure.ended}: raise engine.timeout_minutes, or lower engine.builder_optimization_level"
    return None


def judge(output: TrtexecOutput, lines: Iterable[str], *, otherwise: CommandFailed) -> EnginehouseError | None:
    """What is wrong with a run that ended with status 0; `None` if it is a success.

    `otherwise` is reported where no known cause is found. Success needs the PASSED line; and an input that trtexec
    silently gave the size 1 is a failure, whatever it prints at its end.
    """
    text = list(lines)
    for line in output.warnings:
        found = explain([line])
        if found is not None and found.kind == "dynamic input without shapes":
            return _raised(found, otherwise)
    if output.outcome == "passed":
        return None
    found = explain(text)
    return otherwise if found is None else _raised(found, otherwise)


def _raised(found: Explanation, failure: CommandFailed) -> EnginehouseError:
    shown = f"{found.cause}\n{found.mend}" + (f"\nin the log: {found.detail}" if found.detail else "")
    match found.raises:
        case "configuration":
            where = f"; log: {failure.log}" if failure.log else ""
            return ConfigError(
                Problem(f"{found.cause}{where}", field="engine", hint=found.mend + _option_hint(found.cause))
            )
        case "tool missing":
            return ToolMissing(
                _TOOLS.get(found.kind, "TensorRT"), why=f"{found.cause} ({found.detail})", mend=found.mend
            )
        case _:
            return failure.with_cause(shown)


_TOOLS: dict[Kind, str] = {
    "no GPU": "an NVIDIA GPU",
    "driver too old": "a newer NVIDIA driver",
    "GPU not supported": "a GPU that this TensorRT supports",
    "library missing": "TensorRT's library",
    "Docker without GPUs": "the NVIDIA Container Toolkit",
    "Docker not running": "Docker",
    "image missing": "the builder's image",
}


def _option_hint(cause: str) -> str:
    name = re.search(r"--\w+", cause)
    option = find_option(name[0]) if name else None
    return f"; in its place: {option.instead}" if option is not None and option.instead else ""
