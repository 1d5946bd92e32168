"""Triton's `config.pbtxt` as text: what it lists, what it promises its clients, and what is wrong with it.

The format is Triton's `ModelConfig` message (model_config.proto) in protobuf's text form. Everything here is a pure
function of the text; building one is the stage `tasks.triton_config`. Both that stage and `tasks.publish` need these.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tasks.errors import ConfigError, Problem

HEADER = "# Written by enginehouse, which replaces this whole file at every release: edits made here are lost.\n"
"""First line of every config that we print, and the mark by which `is_ours` knows it. Part of the product's bytes."""

BATCH = "batch"
"""The axis along which Triton gathers requests; it is Triton's own, so it stands in no `dims`."""

_MARK = "# Written by enginehouse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One input or output as the model itself takes it, every axis included."""

    name: str
    dtype: str
    """numpy's name, such as `float32`; `string` for text."""
    shape: tuple[int | str, ...]
    """A size, or the name of a dynamic axis such as `batch`."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Tensor:
        return cls(name=value["name"], dtype=value["dtype"], shape=tuple(value["shape"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What the export wrote into `signature.json`; further keys of that file are not read."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Signature:
        return cls(
            inputs=tuple(map(Tensor.from_json, value["inputs"])),
            outputs=tuple(map(Tensor.from_json, value["outputs"])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A GPU execution provider that Triton's onnxruntime backend shall use before its own CUDA kernels."""

    name: str
    """`tensorrt`."""
    parameters: Mapping[str, str]
    """Such as `precision_mode: FP16`, `trt_engine_cache_enable: true`, `max_workspace_size_bytes`; texts all of them
    (README of triton-inference-server/onnxruntime_backend)."""


@dataclass(frozen=True, slots=True, order=True)
class ServedTensor:
    """One input or output as a client sees it."""

    name: str
    datatype: str
    """Triton's name without its prefix, such as `FP32`."""
    dims: tuple[int, ...]
    """Without the batch axis; -1 where any size will do."""


@dataclass(frozen=True, slots=True)
class ServedSignature:
    """What a config promises to clients. Two equal ones can stand for each other: clients go by name, not by order."""

    batched: bool
    """Whether a batch axis comes before the dims (`max_batch_size` above 0)."""
    inputs: tuple[ServedTensor, ...]
    outputs: tuple[ServedTensor, ...]

    def __str__(self) -> str:
        def side(tensors: Iterable[ServedTensor]) -> str:
            return ", ".join(f"{t.name} {t.datatype} [{', '.join(self._axes(t))}]" for t in tensors) or "nothing"

        return f"{side(self.inputs)} -> {side(self.outputs)}"

    def _axes(self, tensor: ServedTensor) -> list[str]:
        return [BATCH] * self.batched + [str(d) for d in tensor.dims]


def messages() -> Any:
    """Triton's generated protobuf module `tritonclient.grpc.model_config_pb2`."""
    return _load_messages()


@cache
def _load_messages() -> Any:
    # Past the package's own __init__, which imports grpc and numpy: a fifth of a second, in every run, for one message.
    spec = importlib.util.find_spec("tritonclient")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    module_spec = importlib.util.spec_from_file_location("_triton_model_config_pb2", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def print_config(config: Any, *, header: str = HEADER) -> str:
    """The one way we print a `ModelConfig`: equal messages give equal bytes."""
    from google.protobuf import text_format

    return header + text_format.MessageToString(config, use_short_repeated_primitives=True)


def parse(config_text: str) -> Any:
    """The `ModelConfig` that the text stands for.

    Raises:
        ConfigError: naming the line, where protobuf cannot read the text (and so the server could not).
    """
    from google.protobuf import text_format

    try:
        return text_format.Parse(config_text, messages().ModelConfig())
    except text_format.ParseError as error:
        message = re.sub(r"^\d+:\d+ : ", "", str(error))
        raise ConfigError(Problem(f"config.pbtxt cannot be read: {message}", line=error.GetLine())) from error


def is_ours(config_text: str) -> bool:
    """Whether we printed it (any version of us)."""
    return config_text.startswith(_MARK)


def with_versions(config_text: str, versions: Collection[int]) -> str:
    """The same config, listing exactly `versions` (in ascending order).

    For a text that `print_config` printed, every other byte stays: `with_versions(with_versions(t, a), b)` equals
    `with_versions(t, b)`. The comment lines at the top are kept for any text.
    """
    assert versions, "a policy that lists no version would serve nothing"
    config = parse(config_text)
    config.version_policy.specific.versions[:] = sorted(set(versions))
    header = re.match(r"(?:#[^\n]*\n)*", config_text)
    return print_config(config, header=header.group() if header else "")


def listed_versions(config_text: str) -> tuple[int, ...] | None:
    """The versions that the policy lists, ascending; `None` where it names none (`latest`, `all` or no policy)."""
    policy = parse(config_text).version_policy
    return tuple(sorted(policy.specific.versions)) if policy.HasField("specific") else None


def signature_of(config_text: str) -> ServedSignature:
    """What the config promises to clients, to be compared with another's."""
    config = parse(config_text)
    names = messages().DataType

    def side(tensors: Iterable[Any]) -> tuple[ServedTensor, ...]:
        return tuple(
            sorted(ServedTensor(t.name, names.Name(t.data_type).removeprefix("TYPE_"), tuple(t.dims)) for t in tensors)
        )

    return ServedSignature(config.max_batch_size > 0, side(config.input), side(config.output))


def check(
    config_text: str, *, versions: Collection[int] | None = None, signature: Signature | None = None
) -> list[Problem]:
    """What is wrong with a config: first of all, what the server does not notice or only warns of.

    `versions` are those that exist (then a listed one that does not is a problem); `signature` is the model's own (then
    a tensor that is missing or has another rank is one, such as the batch axis repeated in `dims`).
    """
    problems: list[Problem] = []
    if config_text.startswith("\ufeff"):
        problems.append(Problem("begins with a byte order mark, which Triton cannot read", line=1))
        config_text = config_text.removeprefix("\ufeff")
    try:
        config = parse(config_text)
    except ConfigError as error:
        return [*problems, *error.problems]
    for kind, tensors in (("input", config.input), ("output", config.output)):
        problems += _check_tensors(kind, tensors, batched=config.max_batch_size > 0)
    problems += _check_batching(config)
    problems += _check_instances(config, config_text)
    if versions is not None:
        problems += _check_versions(config, versions)
    if signature is not None:
        problems += _check_ranks("input", config.input, signature.inputs, batched=config.max_batch_size > 0)
        problems += _check_ranks("output", config.output, signature.outputs, batched=config.max_batch_size > 0)
    return problems


def _check_tensors(kind: str, tensors: Sequence[Any], *, batched: bool) -> Iterator[Problem]:
    if not tensors:
        yield Problem(f"the model has no {kind}", field=kind, hint=f"declare at least one {kind}")
    for name, times in Counter(t.name for t in tensors).items():
        if times > 1:
            yield Problem(f"{times} {kind}s are named `{name}`", field=kind, hint="each name once")
    for index, tensor in enumerate(tensors):
        field = f"{kind}[{index}]"
        if not tensor.name:
            yield Problem("has no name", field=field)
        if tensor.data_type == messages().TYPE_INVALID:
            yield Problem("has no data_type", field=field, hint="such as TYPE_FP32")
        if not tensor.dims:
            yield Problem("has no dims", field=field, hint="one value a row is `dims: [1]` with an empty `reshape`")
        if tensor.HasField("reshape") and not tensor.reshape.shape and not batched:
            yield Problem("is reshaped to no axis at all, which needs a max_batch_size above 0", field=field)
        for size in tensor.dims:
            if size < 1 and size != -1:
                yield Problem(f"{size} is no size of an axis", field=f"{field}.dims", hint="1 and above, or -1 for any")


def _check_batching(config: Any) -> Iterator[Problem]:
    if config.max_batch_size < 0:
        yield Problem(f"{config.max_batch_size} is below 0", field="max_batch_size", hint="0 turns batching off")
    if not config.HasField("dynamic_batching"):
        return
    if config.max_batch_size == 0:
        yield Problem(
            "does nothing while max_batch_size is 0", field="dynamic_batching", hint="raise max_batch_size, or drop it"
        )
    for size in config.dynamic_batching.preferred_batch_size:
        if not 0 < size <= config.max_batch_size:
            yield Problem(
                f"{size} is not between 1 and max_batch_size, {config.max_batch_size}",
                field="dynamic_batching.preferred_batch_size",
            )


def _check_instances(config: Any, config_text: str) -> Iterator[Problem]:
    # The message cannot tell a written 0 from no count at all, for which the server takes a default of its own.
    wrote_zero = re.search(r"^[^#\n]*\bcount\s*:\s*0+\b", config_text, re.MULTILINE) is not None
    for index, group in enumerate(config.instance_group):
        if group.count < 0 or (group.count == 0 and wrote_zero):
            yield Problem(f"{group.count} instances serve nothing", field=f"instance_group[{index}].count")


def _check_versions(config: Any, versions: Collection[int]) -> Iterator[Problem]:
    if not config.version_policy.HasField("specific"):
        return
    field = "version_policy.specific.versions"
    if not config.version_policy.specific.versions:
        yield Problem("lists no version, so nothing would be served", field=field)
    for version in config.version_policy.specific.versions:
        if version not in versions:
            there = ", ".join(map(str, sorted(versions))) or "none"
            yield Problem(f"version {version} does not exist", field=field, hint=f"there: {there}")


def _check_ranks(kind: str, served: Sequence[Any], own: Sequence[Tensor], *, batched: bool) -> Iterator[Problem]:
    by_name = {t.name: t for t in own}
    for missing in by_name.keys() - {t.name for t in served}:
        yield Problem(f"the model's {kind} `{missing}` is not declared", field=kind)
    for index, tensor in enumerate(served):
        field = f"{kind}[{index}]"
        if tensor.name not in by_name:
            yield Problem(f"the model has no {kind} `{tensor.name}`", field=field)
            continue
        shape = by_name[tensor.name].shape
        rank = len(tensor.reshape.shape) if tensor.HasField("reshape") else len(tensor.dims)
        if rank != len(shape) - batched:
            repeated = "; max_batch_size above 0 adds the batch axis itself" if batched and rank == len(shape) else ""
            yield Problem(
                f"{list(tensor.dims)} does not fit the model's {list(shape)}{repeated}", field=f"{field}.dims"
            )
