"""The digest of a recipe's code, by static reading: nothing of the user's is imported.

    code = recipe_code(Path("recipe.py"), "Digits")
    code.train    {"recipe.py": "sha256:…", "model/net.py": "sha256:…", "distributions": {"torch": "2.13.0"}}
    code.metric   {"recipe.py": "sha256:…", "distributions": {"numpy": "2.3.0"}}

`syntax.py` turns syntax into a digest that comments, layout and docstrings do not change; `parts.py` tells the metric
from the rest of the recipe; `imports.py` follows imports into local modules; `distributions.py` names what an
installed module belongs to.

What counts as local is whatever Python would find beside the recipe, or elsewhere outside `site-packages` (a library
that is installed in editable mode). Of installed distributions the version counts, not the bytes.

What static reading cannot see, and what to do about it:

- files that are read at run time (weights, tables, JSON): declare them in the pipeline file's `data`;
- imports whose name is computed: `RecipeCode.notes` names them;
- a module that changes global state when it is imported (a registry, a seed, a patched class): it counts only for the
  parts that import it;
- environment variables, the network, the time: a recipe that depends on them cannot be told from one that does not.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts.code.distributions import Installed
from tasks.artifacts.code.imports import Closure
from tasks.artifacts.code.parts import is_never_run, split
from tasks.artifacts.code.syntax import syntax_digest
from tasks.config.recipe_source import parse, read_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeCode:
    """What of a recipe's code goes into the keys of stages, as JSON."""

    train: dict[str, Any]
    """Everything but the metric: POSIX file name -> digest, and `distributions`: name -> version.

    The version is `null` for what is imported and not installed, so that installing it later counts.
    """
    metric: dict[str, Any]
    """The same for the recipe's `metric` and all that it reaches. What both reach is in both."""
    notes: tuple[str, ...]
    """What could not be followed, with file and line."""


def script_code(file: Path) -> dict[str, Any]:
    """The same as `RecipeCode.train` for a program that is started by its file: all of it counts."""
    tree = parse(file)
    closure = Closure(file.absolute(), Installed())
    body: list[ast.stmt] = []
    for node in tree.body:
        # It is `__main__`, so what a recipe never runs is run here.
        body += node.body if is_never_run(node) and isinstance(node, ast.If) else [node]
    closure.follow(body, file.name, package="")
    closure.files[file.name] = syntax_digest(body)
    return closure.to_json()


def recipe_code(recipe_file: Path, attribute: str) -> RecipeCode:
    """The digests of a recipe's code.

    Laws: editing what only `metric` reaches changes `metric` only; editing anything else in the recipe or in a module
    that it imports changes `train`; comments, layout, docstrings and the folder change nothing. Raises `ConfigError`
    for a missing file or class, and for a file that is no Python.
    """
    source = read_recipe(recipe_file, attribute)
    parts = split(source.tree, source.definition)
    installed, found = Installed(), []
    for nodes in (parts.train, parts.metric):
        closure = Closure(recipe_file.absolute(), installed)
        closure.follow(nodes, recipe_file.name, package="")
        # A local module that imports the recipe's own module reaches all of it.
        whole = source.tree.body if closure.imports_the_recipe else nodes
        if whole is not nodes:
            closure.follow(whole, recipe_file.name, package="")
        closure.files[recipe_file.name] = syntax_digest(whole)
        found.append(closure)
    train, metric = found
    return RecipeCode(
        train=train.to_json(), metric=metric.to_json(), notes=tuple(dict.fromkeys((*train.notes, *metric.notes)))
    )
