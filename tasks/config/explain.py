"""Pydantic's errors in the words of someone who reads a pipeline file: what was expected, what is there, the mend."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.config.fields import Settings
from tasks.config.pipeline import Pipeline
from tasks.config.reference import all_fields, field_docs, inner_group, is_collection
from tasks.config.yaml_text import Place, YamlText, dotted, shown
from tasks.errors import Problem

_EXPECTED = {
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected a text",
    "tuple_type": "expected a list",
    "model_type": "expected a mapping",
    "model_attributes_type": "expected a mapping",
    "dict_type": "expected a mapping",
    "mapping_type": "expected a mapping",
    "finite_number": "expected a finite number",
    "literal_error": "expected {expected}",
    "greater_than_equal": "expected at least {ge}",
    "greater_than": "expected more than {gt}",
    "less_than_equal": "expected at most {le}",
    "less_than": "expected less than {lt}",
    "too_short": "expected at least one entry",
}

_BRANCH = re.compile(r"(?:\[key\]|(?:literal|list|tuple|dict|function-[\w-]+)\[.+\])$")
"""What pydantic adds to a place that is no part of the file: the type of a union's branch, or that a key is wrong."""

_YES, _NO = ("yes", "on", "y"), ("no", "off", "n")
"""What YAML 1.1 took for a boolean."""
_ALMOST_A_NUMBER = re.compile(r"[-+]?[\d_]+(\.[\d_]*)?([eE][-+]?\d+)?")


def explain(errors: Sequence[Any], text: YamlText, file: Path) -> Iterator[tuple[Place, Problem]]:
    """Each error (as of `ValidationError.errors()`) with its place and line."""
    for place, message, hint in _joined(_tell(errors, Pipeline, (), text)):
        line, file_of_line = _line(place, text, file)
        if file_of_line is None:
            message = f"{message}; given by --set"  # noqa: PLW2901
        yield place, Problem(message, file=file_of_line, line=line, field=dotted(place) or None, hint=hint)


def _joined(told: Iterable[tuple[Place, str, str | None]]) -> Iterator[tuple[Place, str, str | None]]:
    """What the branches of a union expected at one place, as one message: `expected 'auto' or a list, got …`."""
    for place, group in itertools.groupby(told, key=lambda each: each[0]):
        messages, hints = zip(*((message, hint) for _, message, hint in group), strict=True)
        expected = [message.removeprefix("expected ").partition(", got ") for message in messages]
        if len(messages) > 1 and all(message.startswith("expected ") for message in messages):
            choices = " or ".join(choice for choice, _, _ in expected)
            yield place, f"expected {choices}, got {expected[0][2]}", next(filter(None, hints), None)
        else:
            yield from ((place, message, hint) for message, hint in zip(messages, hints, strict=True))


def _line(place: Place, text: YamlText, file: Path) -> tuple[int | None, Path | None]:
    """The line of a field, or of what it should stand in; no file where `--set` gave it."""
    for end in range(len(place), 0, -1):
        if place[:end] in text.given:
            return None, None
        if place[:end] in text.lines:
            return text.lines[place[:end]], file
    return None, file


def _tell(
    errors: Sequence[Any], group: type[Settings], inside: Place, text: YamlText
) -> Iterator[tuple[Place, str, str | None]]:
    for error in errors:
        place = (*inside, *(part for part in error["loc"] if not _BRANCH.match(str(part))))
        context = error.get("ctx", {})
        match error["type"]:
            case "nested":
                yield from _tell(context["errors"], context["model"], place, text)
            case "default_factory_not_called":
                pass  # follows from another error
            case "extra_forbidden":
                yield place, "there is no such field", _near_field(group, place, len(inside))
            case "missing":
                holder = _group_at(group, place[len(inside) : -1])
                about = field_docs(holder).get(str(place[-1])) if holder else None
                yield place, "missing", about
            case "value_error":
                yield place, str(context["error"]), None
            case kind if kind in _EXPECTED:
                message = f"{_EXPECTED[kind].format_map(context)}, got {shown(error['input'])}"
                yield place, message, _mend(kind, error["input"], context, text.written.get(place))
            case _:
                yield place, error["msg"], context.get("hint")


def _mend(kind: str, value: object, context: Mapping[str, Any], written: str | None) -> str | None:
    match kind, value:
        case _, None:
            return "give it a value, or leave the field out for its default"
        case "string_type", _ if written is not None:
            return f'put it in quotes: "{written}"'
        case "literal_error", _:
            choices = re.findall(r"'([^']*)'", str(context["expected"]))
            near = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.5)
            return f"did you mean {near[0]}?" if near else None
        case "bool_type", str() if value.lower() in _YES + _NO:
            return f"write {'true' if value.lower() in _YES else 'false'}"
        case "int_type" | "float_type", str() if _ALMOST_A_NUMBER.fullmatch(value):
            return f"write {value.replace('_', '')}, without {'underscores' if written else 'quotes'}"
    return None


def _group_at(group: type[Settings], place: Place) -> type[Settings] | None:
    """The group of fields at a place below `group`."""
    here: type[Settings] | None = group
    rest = list(place)
    while rest and here is not None:
        info = here.model_fields.get(str(rest.pop(0)))
        here = inner_group(info.annotation) if info else None
        if info and is_collection(info.annotation):
            rest = rest[1:]  # the free name or the index between
    return here


def _near_field(group: type[Settings], place: Place, depth: int) -> str | None:
    holder = _group_at(group, place[depth:-1])
    if holder is None:
        return None
    name, before = str(place[-1]), place[:-1]
    near = difflib.get_close_matches(name, holder.model_fields, n=1, cutoff=0.6)
    if near:
        return f"did you mean {dotted((*before, near[0]))}?"
    elsewhere = [field for field in all_fields() if field.rpartition(".")[2] == name]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    return f"{dotted(before) or 'the pipeline file'} has {', '.join(holder.model_fields)}"
