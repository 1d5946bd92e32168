"""Compiles a graph with TensorRT-RTX on the CPU, before a GPU is paid for; job and products are `jobs.PreflightJob`.

TensorRT-RTX shares TensorRT's ONNX parser and most of its layers, and it builds for a GPU that is not there. What it
refuses, TensorRT will most likely refuse too: operators without a layer, shapes that do not fit, profiles that make no
sense. What it accepts is no proof: kernels, memory, speed and the plan itself are another builder's.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import tensorrt_rtx as trt

from .failures import ProgramFailed
from .jobs import PreflightJob
from .notes import Notes, Progress, write_json

PROVES = (
    "every operator has a layer in TensorRT-RTX's parser, which is TensorRT's",
    "the shapes of all tensors fit together over the whole range of every profile",
    "the graph's types are consistent for a strongly typed network",
)
DOES_NOT_PROVE = (
    "that TensorRT has kernels for every layer on the serving GPU, and the memory for them",
    "anything about speed, or about the answers: TensorRT-RTX is another builder with kernels of its own",
    "that a plugin, a sparsity or a compatibility option works",
)
SHOWN = 8


class Listener(trt.ILogger):  # type: ignore[misc] # no types are published
    """Keeps what TensorRT says, so that a refusal can quote it."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
            self.errors.append(message)
        elif severity == trt.ILogger.WARNING and message not in self.warnings:
            self.warnings.append(message)


def main(job: PreflightJob) -> None:
    notes, listener = Notes(), Listener()
    progress = Progress(3)
    onnx = Path(job["onnx"])
    builder = trt.Builder(listener)

    progress(0, "operators")
    with notes.timed("operators"):
        _check_operators(builder, listener, onnx)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, listener)
    with notes.timed("parse"):
        if not parser.parse_from_file(str(onnx)):
            raise _refused("the graph", _parser_errors(parser))

    progress(1, "profiles")
    config = builder.create_builder_config()
    target = _target(job["compute_capability"])
    config.num_compute_capabilities = 1
    config.set_compute_capability(target, 0)
    with notes.timed("profiles"):
        if not job["profiles"]:
            _check_static(network)
        for index, profile in enumerate(job["profiles"]):
            _add_profile(builder, config, network, listener, index, profile)

    progress(2, f"compilation for {target.name}")
    began = time.monotonic()
    with notes.timed("build"):
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise _refused("the network", listener.errors)
    write_json(
        Path(job["output"]) / "report.json",
        {
            "tool": f"tensorrt-rtx {trt.__version__}",
            "compiled_for": target.name,
            "asked_for": job["compute_capability"],
            "layers": network.num_layers,
            "profiles": len(job["profiles"]),
            "plan_bytes": plan.nbytes,
            "warnings": listener.warnings[:SHOWN],
            "proves": list(PROVES),
            "does_not_prove": list(DOES_NOT_PROVE),
        },
    )
    notes.environment["tensorrt-rtx"] = trt.__version__
    notes.seconds["build_only"] = round(time.monotonic() - began, 3)
    notes.write(Path(job["work"]))
    progress(3, "done")


def _check_operators(builder: Any, listener: Listener, onnx: Path) -> None:
    """Name every node that the parser has no layer for, not only the first."""
    network = builder.create_network(0)  # kept by name: the parser does not keep it alive
    parser = trt.OnnxParser(network, listener)
    if parser.supports_model_v2(onnx.read_bytes(), str(onnx)):
        return
    errors = _parser_errors(parser)
    if not errors:
        return  # it says no without saying why (a model with external weights): parsing will tell
    raise _refused("the graph", errors)


def _parser_errors(parser: Any) -> list[str]:
    found = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        what = _told(error.desc())
        if error.node() < 0:
            found.append(what)
        elif what in ("", "false"):  # what is left of the parser's own condition
            found.append(f"node {_node(error)}: no layer for this operator")
        else:
            found.append(f"node {_node(error)}: {what}")
    return list(dict.fromkeys(found))


def _node(error: Any) -> str:
    name = error.node_name() or f"number {error.node()}"
    return f"{name} ({error.node_operator()})" if error.node_operator() else name


_NOISE = (
    # That there is no driver here is no news.
    r"\[[^\]]*catchCudaError[^\]]*\] Error Code 1: Cuda Runtime \(.*?\)\)",
    r"Error Code 1: Cuda Runtime \(In catchCudaError.*?\)\)",
    # Places in NVIDIA's own files.
    r" In [\w()]+ at /_src/[^\s)]+",
    r"^(?:\[?\S+\.(?:cpp|h)\S*\]?:?\s*)+",
)


def _told(text: str) -> str:
    """The part of a message that helps someone without NVIDIA's sources."""
    for pattern in _NOISE:
        text = re.sub(pattern, "", text)
    return re.sub(r"\s+", " ", text).strip()


def _check_static(network: Any) -> None:
    dynamic = [i.name for i in map(network.get_input, range(network.num_inputs)) if -1 in tuple(i.shape)]
    if dynamic:
        raise _refused(
            "the graph without a profile", [f'the graph\'s input "{dynamic[0]}" is dynamic, and it is given no sizes']
        )


def _add_profile(
    builder: Any, config: Any, network: Any, listener: Listener, index: int, profile: dict[str, dict[str, list[int]]]
) -> None:
    made = builder.create_optimization_profile()
    inputs = {network.get_input(i).name: tuple(network.get_input(i).shape) for i in range(network.num_inputs)}
    for name, shape in profile["opt"].items():
        if name not in inputs:
            raise _refused(f"profile {index}", [f'the graph has no input "{name}": it has {", ".join(inputs)}'])
        graph = inputs[name]
        for end in ("min", "opt", "max"):
            sizes = profile[end][name]
            fits = len(sizes) == len(graph) and all(a in (-1, b) for a, b in zip(graph, sizes, strict=True))
            if not fits:
                raise _refused(
                    f"profile {index}", [f'{end} of "{name}" is {sizes}, and the graph declares {list(graph)}']
                )
        try:
            made.set_shape(name, profile["min"][name], shape, profile["max"][name])
        except (ValueError, RuntimeError) as error:
            raise _refused(f"profile {index}", [f'"{name}": {error}', *listener.errors]) from error
    dynamic = [name for name, shape in inputs.items() if -1 in shape]
    missing = [name for name in dynamic if name not in profile["opt"]]
    if missing:
        raise _refused(f"profile {index}", [f'the graph\'s input "{missing[0]}" is dynamic, and it is given no sizes'])
    if dynamic and config.add_optimization_profile(made) < 0:
        raise _refused(f"profile {index}", listener.errors)


def _target(capability: str | None) -> Any:
    """The generation to compile for; TensorRT-RTX knows fewer than TensorRT, so the nearest older one stands in."""
    known = {
        int(name.removeprefix("SM")): value
        for name, value in trt.ComputeCapability.__members__.items()
        if name.startswith("SM")
    }
    asked = int(capability.replace(".", "")) if capability else 89
    below = [number for number in known if number <= asked]
    return known[max(below) if below else min(known)]


def _refused(what: str, errors: list[str]) -> ProgramFailed:
    told = list(dict.fromkeys(filter(None, map(_told, errors))))
    shown = [f"  {text}" for text in told[:SHOWN]] or ["  it gave no reason"]
    more = [f"  and {len(told) - SHOWN} more"] if len(told) > SHOWN else []
    return ProgramFailed(
        "gate failed",
        "\n".join([f"TensorRT-RTX refuses {what}, so TensorRT most likely will too:", *shown, *more]),
        hint=_mend(errors),
    )


def _mend(errors: list[str]) -> str:
    text = " ".join(errors)
    if re.search(r"no layer for|No importer registered|not supported|[Uu]nsupported|Plugin not found", text):
        return (
            "write the operator with others in the recipe, give TensorRT the plugin that brings it (engine.plugins, "
            "which the preflight cannot load), or serve the graph itself with engine: {kind: onnxruntime}"
        )
    if "profile" in text or "shape" in text.lower() or "dimension" in text:
        return "check shapes and inputs of the pipeline file against what the model can take"
    if "data type" in text or "types" in text:
        return (
            "convert the tensor's type in the recipe's model; TensorRT knows no texts, and mixes no types in one node"
        )
    return "the nodes are named as in the exported graph; `enginehouse artifacts show` finds its file"
