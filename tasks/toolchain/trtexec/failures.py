"""The known ways in which building an engine fails: the text that shows each, its cause, and the mend.

The texts are those of NVIDIA's sources, of reports by users, and (for graphs and profiles) of TensorRT-RTX, whose
parser we ran; none was recorded from a build of ours. A failure that is not in here keeps the log's last lines, so
nothing is lost but the short answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tasks.errors import CommandFailed, ConfigError, EnginehouseError, Problem, ToolMissing
from tasks.toolchain.trtexec.options import find_option
from tasks.toolchain.trtexec.output import TrtexecOutput

Kind = Literal[
    "unknown option",
    "unsupported operator",
    "graph refused",
    "no profile",
    "invalid profile",
    "static model given shapes",
    "dynamic input without shapes",
    "workspace too small",
    "GPU memory full",
    "no GPU",
    "driver too old",
    "GPU not supported",
    "other version",
    "other device",
    "library missing",
    "Docker without GPUs",
    "Docker not running",
    "image missing",
    "plan missing",
]


@dataclass(frozen=True, slots=True)
class Known:
    """One known failure. `cause` and `mend` take the pattern's named groups."""

    kind: Kind
    pattern: re.Pattern[str]
    cause: str
    mend: str
    raises: Literal["configuration", "tool missing", "command failed"]


def _known(
    kind: Kind,
    pattern: str,
    cause: str,
    mend: str,
    raises: Literal["configuration", "tool missing", "command failed"] = "command failed",
) -> Known:
    return Known(kind, re.compile(pattern), cause, mend, raises)


KNOWN: tuple[Known, ...] = (
    _known(
        "unknown option",
        r"Unknown option: (?P<option>--?\w+)",
        "this TensorRT's trtexec does not know the option {option}",
        "name the Triton release or the TensorRT that really builds, with engine.target or engine.tensorrt",
        "configuration",
    ),
    _known(
        "dynamic input without shapes",
        r"Dynamic dimensions required for input: (?P<input>[^,]+), but no shapes were provided",
        "the input {input} has a dynamic axis that no profile gives sizes for; trtexec would silently build it for 1",
        "declare the axis under shapes and inputs of the pipeline file",
        "configuration",
    ),
    _known(
        "no profile",
        r"no optimization profile has been defined",
        "the graph has dynamic inputs, and no optimization profile was given",
        "declare the dynamic axes under shapes and inputs of the pipeline file",
        "configuration",
    ),
    _known(
        "static model given shapes",
        r"Static model does not take explicit shapes",
        "the graph has no dynamic axis, yet shapes were given",
        "export again: the export and the engine come from different declarations of shapes",
        "configuration",
    ),
    _known(
        "invalid profile",
        r"Required optimization profile is invalid|Invalid optimization profiles for input tensors|"
        r"optimization profile.{0,80}(?:invalid|kMIN.{0,40}kMAX|min.{0,9}<=.{0,9}max)|"
        r"profile is missing values|Must specify only --optShapes",
        "TensorRT refuses an optimization profile",
        "check shapes (and engine.profiles): 1 <= min <= opt <= max for every axis, within what the graph allows",
        "configuration",
    ),
    _known(
        "unsupported operator",
        r"No importer registered for op: (?P<op>\w+)|operator: (?P<op2>\w+) .*(?:Plugin not found|UNSUPPORTED_NODE)|"
        r"Plugin not found|getPluginCreator could not find plugin:? (?P<op3>\w+)",
        "TensorRT has no layer for the operator {op}",
        "write it with other operators in the recipe, or give the plugin that brings it: engine.plugins",
    ),
    _known(
        "graph refused",
        r"While parsing node number (?P<number>\d+) \[(?P<node>[^\]]+)\]|Failed to parse onnx file|"
        r"ModelImporter\.cpp.*(?:INVALID_GRAPH|INVALID_NODE|Assertion failed)|Invalid Node - ",
        "TensorRT's ONNX parser refuses the graph",
        "the log names the node; `engine.preflight: tensorrt-rtx` finds such nodes on a machine without a GPU",
    ),
    _known(
        "workspace too small",
        r"insufficient workspace|Could not find any implementation for node (?P<node>[^\n]+?)(?: due to|\.?\)?$)"
        r"|Device memory is insufficient to use tactic.*\bFAILED",
        "no kernel fits the workspace that TensorRT may use",
        "raise engine.memory_pools.workspace (MiB), or leave it out to allow the whole GPU; int8 and fp8 can have too "
        "few kernels for a layer: keep it in higher precision with engine.keep_fp32",
    ),
    _known(
        "GPU memory full",
        r"Requested amount of GPU memory \((?P<bytes>\d+) bytes\) could not be allocated|\[?E\]?.*OutOfMemory"
        r"|CUDA error(?: code)?:? 2\b|out of memory",
        "the GPU's memory is full",
        "free the GPU, lower shapes' max, or limit engine.memory_pools.workspace",
    ),
    _known(
        "driver too old",
        r"CUDA driver version is insufficient|unsatisfied condition: (?P<condition>cuda>=[\d.]+)"
        r"|forward compatibility was attempted on non supported HW|CUDA initialization failure with error: 35\b",
        "the machine's NVIDIA driver is older than this CUDA needs",
        "update the driver, or choose an older engine.target: `enginehouse doctor` tells which driver each needs",
        "tool missing",
    ),
    _known(
        "no GPU",
        r"no CUDA-capable device is detected|CUDA initialization failure with error: (?:100|999)\b|"
        r"libcuda\.so\.1: cannot open shared object file|NVIDIA-SMI has failed|No devices were found|"
        r"nvidia-smi.*not found|libnvidia-ml\.so.*not found",
        "there is no NVIDIA GPU, or its driver does not answer",
        "build on a machine with a GPU of the serving kind; `engine.preflight: tensorrt-rtx` checks the graph without",
        "tool missing",
    ),
    _known(
        "GPU not supported",
        r"Target GPU SM (?P<sm>\d+) is not supported|no kernel image is available for execution on the device",
        "this TensorRT does not support the GPU's generation",
        "choose an older Triton release with engine.target, or a newer GPU",
        "tool missing",
    ),
    _known(
        "other version",
        r"with this version of TensorRT, expecting library version (?P<expected>[\d.]+) got (?P<got>[\d.]+)",
        "the plan was built by TensorRT {got}, and this is {expected}",
        "build it with the TensorRT of the server: engine.target names the server's Triton release",
    ),
    _known(
        "other device",
        r"generated on an incompatible device, expecting compute (?P<expected>[\d.]+) got compute (?P<got>[\d.]+)",
        "the plan was built for compute capability {got}, and this GPU has {expected}",
        "build it on a GPU of the serving kind, or with engine.hardware_compatibility",
    ),
    _known(
        "library missing",
        r"error while loading shared libraries: (?P<library>lib\S+?):",
        "{library} is not found",
        "put TensorRT's lib folder on LD_LIBRARY_PATH, or build in the Triton image: engine.builder: {{kind: docker}}",
        "tool missing",
    ),
    _known(
        "Docker without GPUs",
        r"could not select device driver|invalid runtime name: nvidia|failed to discover GPU vendor from CDI",
        "Docker cannot give a container a GPU",
        "install the NVIDIA Container Toolkit and run `nvidia-ctk runtime configure`",
        "tool missing",
    ),
    _known(
        "Docker not running",
        r"Cannot connect to the Docker daemon|permission denied while trying to connect to the Docker daemon",
        "the Docker engine does not answer",
        "start it, and see that this user may use it (group `docker`)",
        "tool missing",
    ),
    _known(
        "image missing",
        r"(?:pull access denied for|manifest for|manifest unknown|Error response from daemon: .*not found).{0,120}",
        "the image that builds the engine cannot be pulled",
        "log in to the registry (docker login nvcr.io), or name an image that is there: engine.builder.image",
        "tool missing",
    ),
)
"""In the order in which they are looked for: what explains more comes first."""

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

    A cancelled or late child, or one that the kernel killed for memory, keeps that cause: the log only shows how far
    it came.
    """
    if not failure.ended.startswith("exit status"):
        return failure
    found = explain(lines)
    if found is None and failure.ended == KILLED_IN_CONTAINER:
        return CommandFailed(
            failure.what,
            argv=failure.argv,
            ended=failure.ended,
            log=failure.log,
            last_lines=failure.last_lines,
            cause="the builder was killed inside its container, most likely for memory: give Docker more, or lower "
            "engine.builder_optimization_level",
        )
    return failure if found is None else _raised(found, failure)


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
            return CommandFailed(
                failure.what,
                argv=failure.argv,
                ended=failure.ended,
                log=failure.log,
                last_lines=failure.last_lines,
                cause=shown,
            )


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
