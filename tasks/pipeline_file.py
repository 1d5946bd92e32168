"""Reads a pipeline file; every problem in it is shown with its file, line and field, and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.config.explain import explain
from tasks.config.names import check_recipe
from tasks.config.overrides import override
from tasks.config.pipeline import Pipeline
from tasks.config.recipe_source import read_recipe
from tasks.config.yaml_text import YamlText, dotted, read_yaml, shown
from tasks.errors import ConfigError, Problem


def load(file: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """The pipeline of a file, with `field.sub=value` overrides.

    Raises `ConfigError` with every problem found, in the order of lines: in the YAML, in the fields, between fields,
    and in the recipe that the file names.
    """
    file = Path(file).absolute()
    text = read_yaml(_read(file), file)
    if text.value is None and text.problems:
        raise ConfigError(*(problem for _, problem in text.problems))
    if text.value is None:
        raise ConfigError(Problem("is empty, expected at least name, recipe, data and inputs", file=file))
    if not isinstance(text.value, dict):
        raise ConfigError(Problem(f"expected fields such as `name: digits`, got {shown(text.value)}", file=file))
    override(text, overrides)

    problems = [problem for _, problem in text.problems]
    pipeline: Pipeline | None = None
    try:
        lines: dict[str, int | None] = {dotted(place): line for place, line in text.lines.items()}
        lines |= dict.fromkeys(map(dotted, text.given))
        pipeline = Pipeline.model_validate(text.value, context={"source": file, "lines": lines})
    except ValidationError as error:
        told = explain(error.errors(include_url=False), text, file)
        problems.extend(problem for place, problem in told if not _refused(place, text))
    problems.extend(_recipe_problems(text, file))
    if problems or pipeline is None:
        raise ConfigError(*sorted(problems, key=lambda p: (p.file != file, p.line or 0)))
    return pipeline


@contextmanager
def at_their_lines(pipeline: Pipeline) -> Iterator[None]:
    """Give the problems that are found later, of fields that the file may hold, the file and their line."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*map(pipeline.located, error.problems)) from error


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(Problem("the pipeline file is not there", file=file, hint=_near(file))) from None
    except IsADirectoryError:
        raise ConfigError(Problem("is a folder, expected a pipeline file", file=file, hint=_near(file / "x"))) from None
    except OSError as error:
        raise ConfigError(Problem(f"cannot be read: {error.strerror}", file=file)) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(Problem("is not UTF-8 text", file=file, line=line, hint="save it as UTF-8")) from error


def _near(file: Path) -> str | None:
    found = sorted(path.name for pattern in ("*.yaml", "*.yml") for path in file.parent.glob(pattern))
    found = [name for name in found if name != "prefect.yaml"]  # beside each pipeline, and never one
    near = difflib.get_close_matches(file.name, found, n=1, cutoff=0.5)
    if near or len(found) == 1:
        return f"did you mean {(near or found)[0]}?"
    return f"in that folder: {', '.join(found[:5])}" if found else "enginehouse init makes a new one"


def _refused(place: tuple[str | int, ...], text: YamlText) -> bool:
    """Whether the YAML reader has said already what is wrong at or above this place."""
    return any(place[: len(refused)] == refused for refused, _ in text.problems)


def _recipe_problems(text: YamlText, file: Path) -> list[Problem]:
    """What is wrong with the recipe that the file names, said at the field and with the recipe's own line."""
    recipe: Any = text.value.get("recipe")
    try:
        path, _, attribute = check_recipe(recipe).rpartition(":")
    except (ValueError, AttributeError):
        return []  # the field itself is wrong, and told so
    try:
        read_recipe(file.parent / path, attribute)
    except ConfigError as error:
        (inner,) = error.problems
        place = (inner.file and f"{inner.file}:{inner.line}") if inner.line else str(inner.file)
        line = text.lines.get(("recipe",))
        field = dotted(("recipe",))
        return [
            Problem(f"{place}: {inner.message}", file=file if line else None, line=line, field=field, hint=inner.hint)
        ]
    return []
