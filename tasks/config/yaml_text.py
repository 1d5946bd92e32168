"""YAML as nested values with the line of each, without YAML 1.1's surprises.

Read are the scalars of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema): `1e-4` is a number, and
`yes`, `no`, `on`, `off`, `2024-01-01` and `1:30` are texts. PyYAML by itself reads them by the rules of YAML 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tasks.errors import Problem

Place = tuple[str | int, ...]
"""Where a value is: keys of mappings and indexes of lists, from the outermost."""

_STR, _NULL, _BOOL, _INT, _FLOAT, _MAP, _SEQ = (
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "null", "bool", "int", "float", "map", "seq")
)
_MOST_VALUES = 20_000
"""Aliases of aliases make a short text say billions of values."""
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")


class _Loader(yaml.SafeLoader):
    """Only its parser and resolver are used."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    (_NULL, r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_INT, r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (_FLOAT, r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    (_FLOAT, r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)


class _TooLarge(Exception):
    pass


@dataclass(slots=True)
class YamlText:
    """What a YAML text says, and where."""

    value: Any = None
    """Nested dicts, lists and scalars; keys are always text."""
    lines: dict[Place, int] = field(default_factory=dict)
    """The line of each value, counted from 1: that of its key, or of the value in a list."""
    written: dict[Place, str] = field(default_factory=dict)
    """How each plain (not quoted) scalar is written."""
    problems: list[tuple[Place, Problem]] = field(default_factory=list)
    """What is wrong, each at its place; `value` there is not what the text says."""
    given: set[Place] = field(default_factory=set)
    """Where a value from the command line replaced the text's."""


def read_yaml(text: str, file: Path | None) -> YamlText:
    """Read one document; what is wrong with it as YAML is in `problems`, with `value` as far as it could be read."""
    result = YamlText()
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is not None:
            result.value = _Reader(result, file).value(node, (), ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        words = " ".join(filter(None, (error.context, error.problem)))
        hint = "indent with spaces, not tabs" if "\\t" in words else None
        line = mark.line + 1 if mark else None
        result.problems.append(((), Problem(f"not valid YAML: {words}", file=file, line=line, hint=hint)))
    except yaml.YAMLError as error:
        result.problems.append(((), Problem(f"not valid YAML: {' '.join(str(error).split())}", file=file)))
    except (RecursionError, _TooLarge):
        result.problems.append(((), Problem("too large or too deeply nested for a pipeline file", file=file)))
    return result


class _Reader:
    def __init__(self, result: YamlText, file: Path | None) -> None:
        self.result, self.file = result, file

    def refuse(self, node: yaml.Node, place: Place, message: str, hint: str | None = None) -> None:
        line, name = node.start_mark.line + 1, dotted(place) or None
        self.result.problems.append((place, Problem(message, file=self.file, line=line, field=name, hint=hint)))

    def refuse_tag(self, node: yaml.Node, place: Place) -> None:
        self.refuse(node, place, f"the YAML tag {node.tag} is not read here", "remove it, or put the text in quotes")

    def value(self, node: yaml.Node, place: Place, inside: tuple[yaml.Node, ...]) -> Any:
        self.result.lines.setdefault(place, node.start_mark.line + 1)
        if node in inside:
            return self.refuse(node, place, "an alias (*) to something that contains it")
        if len(self.result.lines) > _MOST_VALUES:
            raise _TooLarge
        if not isinstance(node, yaml.ScalarNode) and node.tag not in (_MAP, _SEQ):
            self.refuse_tag(node, place)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, place, (*inside, node))
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*place, at), (*inside, node)) for at, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self.scalar(node, place)

    def mapping(self, node: yaml.MappingNode, place: Place, inside: tuple[yaml.Node, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.refuse(key, place, "expected a text as the key", "a list or mapping cannot be a key")
            elif key.value in found:
                first = self.result.lines[(*place, key.value)]
                self.refuse(key, (*place, key.value), f"given twice, first in line {first}", "remove one of them")
            else:
                self.result.lines[(*place, key.value)] = key.start_mark.line + 1
                found[key.value] = self.value(value, (*place, key.value), inside)
        return found

    def scalar(self, node: yaml.ScalarNode, place: Place) -> Any:
        text: str = node.value
        if not node.style:
            self.result.written[place] = text
        match node.tag:
            case tag if tag == _STR:
                return text
            case tag if tag == _NULL:
                return None
            case tag if tag == _BOOL:
                return text.lower() == "true"
            case tag if tag == _INT and _LEADING_ZERO.fullmatch(text):
                stripped = str(int(text))
                hint = f"write {stripped}, 0o{stripped} for octal, or quotes around a text"
                self.refuse(node, place, f"{text} means different numbers to different readers of YAML", hint)
            case tag if tag in (_INT, _FLOAT):
                try:
                    return _number(text, tag)
                except ValueError:
                    self.refuse(node, place, f"not a number that can be read: {shown(text)}")
            case _:
                self.refuse_tag(node, place)
        return None


def _number(text: str, tag: str) -> int | float:
    if tag == _INT:
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    special = text.lower().lstrip("+-")
    if special in (".inf", ".nan"):
        return float(text.lower().replace(".", ""))
    return float(text)


def dotted(place: Place) -> str:
    """A place as a person writes it: `inputs.image.shape.0`."""
    return ".".join(map(str, place))


def shown(value: object) -> str:
    """A value for an error message, with its type in YAML's words, cut to one short line."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return f"the text {_cut(repr(value))}"
        case int() | float():
            return f"the number {_cut(repr(value)) if isinstance(value, float) or abs(value) < 10**40 else 'too large'}"
        case Mapping():
            return "a mapping"
        case _:
            return "a list"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}…"
