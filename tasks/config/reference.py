"""The reference of the pipeline file, docs/pipeline-file.md, made from the docstrings beneath the fields.

`python -m tasks.config.reference docs/pipeline-file.md` writes it; a test fails when it is not up to date.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from tasks.config.fields import Role, Settings, role
from tasks.config.kinds import DEPLOY_TARGETS, ENGINES, DeployConfig, EngineConfig, kinds, load_kind
from tasks.config.pipeline import Pipeline


def field_docs(group: type[Settings]) -> dict[str, str]:
    """The docstring beneath each field of a group, also those it inherits, as one line."""
    docs: dict[str, str] = {}
    for ancestor in reversed(group.__mro__):
        if not issubclass(ancestor, Settings) or ancestor is Settings:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(ancestor))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.split())
    return docs


def inner_group(annotation: Any) -> type[Settings] | None:
    """The group of fields that a field holds, itself or in a mapping or list."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    return next(filter(None, map(inner_group, get_args(annotation))), None)


def is_collection(annotation: Any) -> bool:
    """Whether a field holds a mapping or a list of groups, with names or indexes between it and their fields."""
    return not isinstance(annotation, type) and get_origin(annotation) not in (Union, UnionType)


def all_fields(group: type[Settings] = Pipeline, prefix: str = "") -> Iterator[str]:
    """Every field's dotted name, `NAME` standing for a free name, except those that depend on a kind."""
    for name, info in group.model_fields.items():
        yield prefix + name
        inner = inner_group(info.annotation)
        if inner is not None:
            between = ("NAME." if "Mapping" in str(info.annotation) else "0.") if is_collection(info.annotation) else ""
            yield from all_fields(inner, f"{prefix}{name}.{between}")


def expected(annotation: Any) -> str:
    """A field's type in the words of the reference."""
    args = [a for a in get_args(annotation) if a is not NoneType]
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin in (Union, UnionType):
        return " or ".join(map(expected, args))
    if origin is tuple:
        return f"list of {expected(args[0])}"
    if origin is not None and args and "Annotated" in str(type(annotation)):
        return expected(args[0])
    if origin is not None:
        return "mapping"
    words = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`"}
    return words.get(annotation, "group")


def limits(annotation: Any, metadata: Sequence[Any]) -> str:
    """A field's bounds, such as `>= 1`; those of `X | None` are X's."""
    found = [
        f"{sign} {bound}"
        for m in metadata
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if (bound := getattr(m, attribute, None)) is not None
    ]
    inner = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    for part in filter(lambda a: hasattr(a, "__metadata__"), inner):
        for m in part.__metadata__:
            # A `Field(ge=1)` inside a union keeps its bounds to itself.
            found.append(limits(None, getattr(m, "metadata", [m])))
    return ", ".join(filter(None, found))


def _default(info: Any) -> str:
    if info.is_required():
        return "**required**"
    if info.default is PydanticUndefined:
        return "—"
    if info.default is None or isinstance(info.default, Settings | tuple):
        return "—"
    return f"`{info.default}`"


def table(group: type[Settings], prefix: str) -> Iterator[str]:
    """The fields of a group as Markdown, and those of the groups in it below."""
    docs, inner_tables = field_docs(group), []
    yield "| Field | Type | Default | Key | |"
    yield "|---|---|---|---|---|"
    for name, info in group.model_fields.items():
        inner = inner_group(info.annotation)
        dotted = f"{prefix}{name}"
        kind = expected(info.annotation)
        if inner is not None:
            collection = is_collection(info.annotation)
            listed = collection and "Mapping" not in str(info.annotation)
            kind = ("list of groups" if listed else "groups by name") if collection else "group"
            between = (".0" if listed else ".NAME") if collection else ""
            if inner not in (EngineConfig, DeployConfig):
                inner_tables.append((f"{dotted}{between}", inner))
        bounds = limits(info.annotation, info.metadata)
        kind = f"{kind}, {bounds}" if bounds else kind
        part = "" if inner is not None else ("no" if role(group, name) is Role.PLACEMENT else "yes")
        yield f"| `{dotted}` | {kind} | {_default(info)} | {part} | {docs.get(name, '')} |"
    for dotted, inner in inner_tables:
        yield from ("", f"{'##' if '.' not in dotted else '###'} `{dotted}`", "", _about(inner), "")
        yield from table(inner, f"{dotted}.")


def _about(group: type[Settings]) -> str:
    return " ".join((group.__doc__ or "").split())


def _by_kind(field: str, entry_points: str) -> Iterator[str]:
    yield from ("", f"## `{field}`", "")
    yield f"The fields depend on `{field}.kind`. Further kinds come with distributions that have an entry point in"
    yield f"`{entry_points}`."
    for kind in kinds(entry_points):
        target = load_kind(entry_points, kind)
        if not target.__module__.startswith("tasks."):
            continue  # another distribution's kind has its own reference
        yield from ("", f"### `{field}: {{kind: {kind}}}`", "", _about(target.Config), "")
        yield from table(target.Config, f"{field}.")


def reference() -> str:
    """The whole page."""
    lines = [*_INTRODUCTION.strip().splitlines(), "", "## The top level", ""]
    lines += table(Pipeline, "")
    lines += _by_kind("engine", ENGINES)
    lines += _by_kind("deploy", DEPLOY_TARGETS)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


_INTRODUCTION = """
# The pipeline file

One YAML file beside the recipe describes a pipeline. This page is made from the docstrings beneath the fields
(`python -m tasks.config.reference docs/pipeline-file.md`); edit those.

```yaml
name: digits
recipe: recipe.py:Digits
data:   {digits: {distribution: scikit-learn}}
shapes: {batch: {min: 1, opt: 8, max: 32}}
inputs: {image: {dtype: float32, shape: [batch, 1, 8, 8]}}
train:  {nproc_per_node: 2, max_epochs: 20, batch_size: 64}
engine: {kind: onnxruntime}
serve:  {max_batch_size: 32, dynamic_batching: {max_queue_delay_microseconds: 500}}
gates:  {parity: {atol: 1e-4}, metrics: {accuracy: {min: 0.95}}}
deploy: {kind: process}
```

- Unknown and repeated fields are errors; types are strict: `"64"` is no number and `1.10` is no text.
- Scalars are read by YAML 1.2's core schema. `1e-4` is a number; `yes`, `no`, `on`, `off` and dates are texts;
  a boolean is `true` or `false`.
- Paths are relative to the pipeline file. Neither `~` nor environment variables are expanded.
- `--set field.sub=value` overrides a field for one run; the value is read as YAML, an entry of a list is reached by its
  index (`serve.instance_group.0.count=2`). Setting `engine.kind` or `deploy.kind` to another kind drops the file's
  fields of the old kind.
- The column *Key* says whether another value builds anew (*yes*) or reuses what is there (*no*). Which stages a field
  touches is in [architecture.md](architecture.md).
"""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
