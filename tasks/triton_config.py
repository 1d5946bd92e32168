"""The stage that writes Triton's `config.pbtxt` from the export's signature and the pipeline's `serve` options.

Pure functions: equal arguments give equal bytes. The text lists no versions; that is what publishing and releasing add
(`with_versions`), so that one config content serves every release that does not change it. Field names and meanings
are those of Triton's model_config.proto.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tasks.config import Pipeline, keyed
from tasks.engines import kind_of
from tasks.errors import ConfigError, Problem
from tasks.stage import Built, Identity, KeyedStage, KeyParts, Site, Step, read_json
from tasks.toolchain.config_pbtxt import (
    BATCH,
    Accelerator,
    ServedSignature,
    Signature,
    Tensor,
    check,
    messages,
    print_config,
    signature_of,
    with_versions,
)

__all__ = [
    "STAGE",
    "ServedSignature",
    "Signature",
    "Tensor",
    "check",
    "model_config",
    "signature_of",
    "with_versions",
]

TRITON_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "bfloat16": "TYPE_BF16",
    "string": "TYPE_STRING",
}
"""numpy's name (`string` for text, `bfloat16` as ml_dtypes calls it) to Triton's `DataType`."""


class DynamicBatching(Protocol):
    @property
    def max_queue_delay_microseconds(self) -> int: ...
    @property
    def preferred_batch_size(self) -> Sequence[int]: ...


class InstanceGroup(Protocol):
    @property
    def count(self) -> int: ...
    @property
    def kind(self) -> str: ...


class ServeOptions(Protocol):
    """The `serve` part of a pipeline file, as far as the config goes."""

    @property
    def max_batch_size(self) -> int: ...
    @property
    def dynamic_batching(self) -> DynamicBatching | None: ...
    @property
    def instance_group(self) -> Sequence[InstanceGroup]: ...


class Range(Protocol):
    """The declared sizes of one dynamic axis."""

    @property
    def max(self) -> int: ...


def model_config(
    *,
    model: str,
    platform: str,
    signature: Signature,
    serve: ServeOptions,
    shapes: Mapping[str, Range],
    accelerator: Accelerator | None = None,
    profiles: int = 1,
) -> str:
    """The text of `config.pbtxt`, without a version policy.

    `platform` is `onnxruntime_onnx` or `tensorrt_plan`; `shapes` are the pipeline's declared axes. With
    `max_batch_size` above 0 the leading `batch` axis is Triton's own and leaves the dims; any other named axis becomes
    -1. A tensor with no axis but `batch` gets dims [1] and a reshape, since Triton's dims cannot be empty.
    `accelerator` becomes the model's `optimization`; an engine of several optimization profiles lists them all in each
    instance group, and Triton takes for each request one that fits.

    Raises:
        ConfigError: with every problem found: a tensor that has no batch axis in front, or a type, that Triton could
            batch or name; sizes that contradict `shapes`.
    """
    problems: list[Problem] = []
    pb = messages()
    config = pb.ModelConfig(name=model, platform=platform, max_batch_size=serve.max_batch_size)
    if BATCH in shapes and serve.max_batch_size > shapes[BATCH].max:
        problems.append(
            Problem(
                f"{serve.max_batch_size} is above shapes.{BATCH}.max, {shapes[BATCH].max}: "
                "the model is not built for such batches",
                field="serve.max_batch_size",
            )
        )
    for tensor in signature.inputs:
        problems += _fill(config.input.add(), tensor, "input", serve.max_batch_size)
    for tensor in signature.outputs:
        problems += _fill(config.output.add(), tensor, "output", serve.max_batch_size)
    if serve.dynamic_batching is not None:
        batching = config.dynamic_batching
        batching.SetInParent()
        batching.max_queue_delay_microseconds = serve.dynamic_batching.max_queue_delay_microseconds
        batching.preferred_batch_size[:] = sorted(serve.dynamic_batching.preferred_batch_size)
    for group in serve.instance_group:
        added = config.instance_group.add(count=group.count, kind=pb.ModelInstanceGroup.Kind.Value(group.kind))
        if profiles > 1:
            added.profile[:] = map(str, range(profiles))
    if accelerator is not None:
        gpu = config.optimization.execution_accelerators.gpu_execution_accelerator.add(name=accelerator.name)
        gpu.parameters.update(accelerator.parameters)
    text = print_config(config)
    # What is wrong with a tensor already has its own, nearer words above.
    problems = problems or check(text, signature=signature)
    if problems:
        raise ConfigError(*problems)
    return text


def _fill(target: Any, tensor: Tensor, kind: str, max_batch_size: int) -> list[Problem]:
    """Describe `tensor` in the message `target`; returns what Triton could not serve of it."""
    problems: list[Problem] = []
    what = f"{kind} `{tensor.name}` {list(tensor.shape)}".replace("'", "")
    axes = tensor.shape
    if max_batch_size > 0:
        if axes[:1] != (BATCH,):
            problems.append(
                Problem(
                    f"{what} does not begin with the axis `{BATCH}`, along which Triton gathers requests",
                    field="serve.max_batch_size",
                    hint=f"begin every input and output with `{BATCH}`, or set serve.max_batch_size: 0",
                )
            )
        elif BATCH in axes[1:]:
            problems.append(
                Problem(
                    f"{what} has the axis `{BATCH}` twice, so Triton cannot give each request its own rows",
                    field="serve.max_batch_size",
                    hint="set serve.max_batch_size: 0",
                )
            )
        axes = axes[1:]
    elif not axes:
        problems.append(Problem(f"{what} has no axis, and Triton has no such tensor", hint="give it an axis of size 1"))
    target.name = tensor.name
    if tensor.dtype in TRITON_TYPES:
        target.data_type = messages().DataType.Value(TRITON_TYPES[tensor.dtype])
    else:
        near = difflib.get_close_matches(tensor.dtype, TRITON_TYPES, n=1)
        problems.append(
            Problem(
                f"{what} has the type `{tensor.dtype}`, for which Triton has no name",
                hint=f"did you mean `{near[0]}`?" if near else f"one of {', '.join(TRITON_TYPES)}",
            )
        )
    target.dims[:] = [axis if isinstance(axis, int) else -1 for axis in axes] or [1]
    if not axes:
        target.reshape.SetInParent()
    return problems


def _parts(pipeline: Pipeline, _identity: Identity) -> KeyParts:
    kind = kind_of(pipeline)
    config: dict[str, Any] = {"model": pipeline.model, "platform": kind.platform, "serve": keyed(pipeline.serve)}
    accelerator, profiles = kind.accelerator(pipeline), kind.profiles(pipeline)
    if accelerator is not None:
        config["accelerator"] = {"name": accelerator.name, "parameters": dict(accelerator.parameters)}
    if profiles > 1:
        config["profiles"] = profiles
    return KeyParts(config=config)


def _steps(_site: Site) -> tuple[Step, ...]:
    return ()


def _collect(site: Site) -> Built:
    text = model_config(
        model=site.pipeline.model,
        platform=kind_of(site.pipeline).platform,
        signature=Signature.from_json(read_json(site.materials["engine"] / "signature.json")),
        serve=site.pipeline.serve,
        shapes=site.pipeline.shapes,
        accelerator=kind_of(site.pipeline).accelerator(site.pipeline),
        profiles=kind_of(site.pipeline).profiles(site.pipeline),
    )
    site.product.mkdir(parents=True, exist_ok=True)
    (site.product / "config.pbtxt").write_text(text, encoding="utf-8")
    return Built()


def _preview(pipeline: Pipeline) -> tuple[str, ...]:
    """The part of the config that the pipeline file alone decides; the outputs are the export's to tell."""
    kind, serve = kind_of(pipeline), pipeline.serve
    lines = [f"platform {kind.platform}, max_batch_size {serve.max_batch_size}"]
    for name, spec in pipeline.inputs.items():
        axes = spec.shape[1:] if serve.max_batch_size else spec.shape
        dims = [axis if isinstance(axis, int) else -1 for axis in axes]
        lines.append(f"input {name}: {TRITON_TYPES[spec.dtype]} {dims or [1]}")
    profiles, accelerator = kind.profiles(pipeline), kind.accelerator(pipeline)
    for group in serve.instance_group:
        lines.append(
            f"{group.count} x {group.kind}" + (f" with {profiles} optimization profiles" if profiles > 1 else "")
        )
    if accelerator is not None:
        lines.append(f"execution provider {accelerator.name}: {dict(accelerator.parameters)}")
    return tuple(lines)


STAGE = KeyedStage(
    name="triton_config",
    version=1,  # also when the header of the text changes: it is part of the bytes
    reproducible=True,
    materials=("engine",),
    parts=_parts,
    steps=_steps,
    collect=_collect,
    preview=_preview,
)
