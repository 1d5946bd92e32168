"""The known ways in which building an engine fails: data, in the order in which a log is searched for them.

The texts are those of NVIDIA's sources, of reports by users, and (for graphs and profiles) of TensorRT-RTX, whose
parser we ran; none was recorded from a build of ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

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
        "name the Triton release or the TensorRT that really builds, with engine.target or engine.tensorrt; or leave "
        "the option out of engine.extra_flags, if it came from there",
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
        "other version",
        r"Version tag does not match.{0,9}Current Version: (?P<expected>\d+), Serialized Engine Version: (?P<got>\d+)",
        "the plan was built by another TensorRT: its serialisation has version {got}, and this one reads {expected}",
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
