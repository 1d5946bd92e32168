"""A recipe from its reference in the pipeline file: imported, made, and checked as far as that needs no data."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .failures import ProgramFailed, names, nearest, users_code, users_failure
from .recipe import Recipe, definition, described
from .user_imports import load_file, put_first

METHODS = {
    "model": ("()", 0),
    "train_data": ("()", 0),
    "validation_data": ("()", 0),
    "test_data": ("()", 0),
    "loss": ("(outputs, targets)", 2),
    "metric": ("()", 0),
}
OPTIONAL_METHODS = {
    "optimizer": ("(model)", 1),
    "scheduler": ("(optimizer, total_steps)", 2),
    "collate": ("(items)", 1),
    "example": ("(sizes)", 1),
    "drift": ("(reference, recent)", 2),
}


def load_recipe(reference: str) -> Recipe:
    """Load `/abs/recipe.py:Digits`, put its folder first on the path, and check what needs no run of its methods."""
    path, _, name = reference.rpartition(":")
    file = Path(path)
    if not path or not name:
        raise ProgramFailed("configuration", f'recipe "{reference}" names no class', hint='write "recipe.py:Class"')
    if not file.is_file():
        near = nearest(file.name, (other.name for other in file.parent.glob("*.py"))) if file.parent.is_dir() else None
        raise ProgramFailed("configuration", f"the recipe file {file} does not exist", hint=near)
    file = file.resolve()
    loaded = sys.modules.get(file.stem)
    if loaded is not None and getattr(loaded, "__file__", None) != str(file):
        raise ProgramFailed(
            "configuration",
            f'a recipe file cannot be called "{file.name}": it would hide the module {file.stem}',
            hint="rename it, for example to recipe.py",
            where=str(file),
        )
    put_first(file.parent)
    with users_code(f"importing {file.name}", file.parent):
        module = loaded or _load(file)
    user_class = getattr(module, name, None)
    if not isinstance(user_class, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        found = "has no class" if user_class is None else f"has {described(user_class)}, not a class, as"
        own = [key for key in classes if vars(module)[key].__module__ == module.__name__]
        raise ProgramFailed(
            "configuration",
            f'{file.name} {found} "{name}"; it has {names(own)}',
            hint=nearest(name, classes),
            where=str(file),
        )
    with users_code(f"{name}()", file.parent, hint="a recipe is made without arguments"):
        user = user_class()
    return _checked(name, file.parent, user)


def _load(file: Path) -> Any:
    try:
        return load_file(file)
    except ModuleNotFoundError as error:
        if error.name is None:
            raise
        beside = nearest(error.name, (other.stem for other in file.parent.glob("*.py") if other != file))
        hint = beside or f"install it into this environment, or put {error.name}.py beside {file.name}"
        raise users_failure(error, f"importing {file.name}", file.parent, hint=hint) from error


def _checked(name: str, folder: Path, user: Any) -> Recipe:
    """Everything that is missing at once, not only the first."""
    place = definition(type(user))
    problems: list[str] = []
    known = [key for key in dir(user) if not key.startswith("_")]
    for method, (signature, count) in {**METHODS, **OPTIONAL_METHODS}.items():
        value = getattr(user, method, None)
        if value is None:
            if method in METHODS:
                strange = [key for key in known if key not in METHODS and key not in OPTIONAL_METHODS]
                near = nearest(method, strange)
                problems.append(f"has no method {method}{signature}" + (f" ({near})" if near else ""))
        elif not callable(value):
            problems.append(f"has {described(value)} as {method}; expected a method {method}{signature}")
        else:
            try:
                inspect.signature(value).bind(*range(count))
            except TypeError:
                problems.append(f"has {method}{inspect.signature(value)}; expected {method}{signature}")
    outputs = getattr(user, "outputs", None)
    if isinstance(outputs, str) or not isinstance(outputs, Sequence) or not outputs:
        problems.append(
            f"has {'nothing' if outputs is None else repr(outputs)} as outputs; expected a tuple of names such as "
            '("logits",)'
        )
    elif not all(isinstance(o, str) and o for o in outputs) or len(set(outputs)) != len(outputs):
        problems.append(f"has {outputs!r} as outputs; expected different names")
    if problems:
        raise ProgramFailed("configuration", "\n".join(f"{name} {problem}" for problem in problems), place=place)
    return Recipe(name=name, folder=folder, user=user, outputs=tuple(outputs or ()))
