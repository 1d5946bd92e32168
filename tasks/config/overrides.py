"""`--set field.sub=value`: values from the command line in the place of those from the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.config.yaml_text import Place, YamlText, dotted, read_yaml, shown
from tasks.errors import ConfigError, Problem

_BY_KIND = ("engine", "deploy")


def override(text: YamlText, overrides: Sequence[str]) -> None:
    """Put each `field.sub=value` into `text`; what it replaces loses its lines, so that no message points at them.

    The value is read as YAML. Missing mappings on the way are made. A change of `engine.kind` or `deploy.kind` drops
    the old kind's fields; kinds are set first, in whatever order they are given. `ConfigError` for what has no `=`, is
    not YAML, or leads through something that is no mapping.
    """
    parsed = [_parse(item) for item in overrides]
    for place, value in sorted(parsed, key=lambda p: not _is_kind(p[0])):
        if _is_kind(place) and isinstance(group := text.value.get(place[0]), dict) and group.get("kind") != value.value:
            for name in group:
                _forget(text, (place[0], name))
            group.clear()
        _put(text, place, value)


def _is_kind(place: Place) -> bool:
    return len(place) == 2 and place[0] in _BY_KIND and place[1] == "kind"


def _parse(item: str) -> tuple[Place, YamlText]:
    name, equals, value = item.partition("=")
    parts = tuple(name.strip().split("."))
    if not equals or not all(parts):
        raise ConfigError(Problem(f"--set {item}: expected field.sub=value", hint="such as --set train.max_epochs=3"))
    read = read_yaml(value, None)
    if read.problems:
        raise ConfigError(*(Problem(f"--set {item}: {found.message}", hint=found.hint) for _, found in read.problems))
    return parts, read


def _put(text: YamlText, place: Place, value: YamlText) -> None:
    here: Any = text.value
    reached: tuple[str | int, ...] = ()
    for part in place[:-1]:
        step = _step(here, part, reached, place)
        if isinstance(here, dict) and here.get(step) is None:
            here[step] = {}
            _forget(text, (*reached, step))
            text.given.add((*reached, step))
        here, reached = here[step], (*reached, step)
    last = _step(here, place[-1], reached, place)
    here[last] = value.value
    reached = (*reached, last)
    _forget(text, reached)
    text.written.update({(*reached, *inner): words for inner, words in value.written.items()})
    text.given.add(reached)


def _step(here: Any, part: str | int, reached: Place, place: Place) -> str | int:
    """The key or index that `part` means in `here`."""
    if isinstance(here, dict):
        return part
    if isinstance(here, list) and str(part).isdecimal() and int(part) < len(here):
        return int(part)
    if isinstance(here, list):
        message = f"--set {dotted(place)}: {dotted(reached)} is a list of {len(here)}, expected an index from 0"
    else:
        message = f"--set {dotted(place)}: {dotted(reached)} is {shown(here)}, which has no fields"
    raise ConfigError(Problem(message))


def _forget(text: YamlText, place: Place) -> None:
    for known in (text.lines, text.written):
        for inner in [p for p in known if p[: len(place)] == place]:
            del known[inner]
    text.problems = [told for told in text.problems if told[0][: len(place)] != place]
