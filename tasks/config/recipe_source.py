"""A recipe's file, read and parsed but not imported."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSource:
    """A recipe's parsed file and where its class stands in it."""

    file: Path
    tree: ast.Module
    definition: ast.ClassDef | None
    """The class, `None` where the name is imported or assigned."""


def parse(file: Path) -> ast.Module:
    """Parse a Python file; `ConfigError` with the line if it is no Python or cannot be read."""
    try:
        # The bytes, not a text: Python's own rules for coding lines then hold.
        return ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise ConfigError(Problem(f"not valid Python: {error.msg}", file=file, line=error.lineno)) from error
    except ValueError as error:  # a null byte
        raise ConfigError(Problem(f"not valid Python: {error}", file=file)) from error
    except RecursionError as error:
        raise ConfigError(Problem("nested too deeply to be parsed", file=file)) from error
    except OSError as error:
        raise ConfigError(Problem(f"cannot be read: {error.strerror}", file=file)) from error


def read_recipe(file: Path, attribute: str) -> RecipeSource:
    """Find a recipe's class. `ConfigError` for a missing file or class, with the nearest names."""
    if not file.is_file():
        if file.is_dir():
            raise ConfigError(Problem("is a folder, expected the recipe's Python file", file=file))
        raise ConfigError(Problem("the recipe's file is not there", file=file, hint=_near_file(file)))
    tree = parse(file)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if attribute in classes:
        return RecipeSource(file=file, tree=tree, definition=classes[attribute])
    bound = bound_names(tree)
    functions = {n.name: n.lineno for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    if attribute in functions:
        raise ConfigError(
            Problem(f"{attribute} is a function, expected the recipe's class", file=file, line=functions[attribute])
        )
    if attribute in bound or "*" in bound:
        return RecipeSource(file=file, tree=tree, definition=None)
    near = difflib.get_close_matches(attribute, [*classes, *bound], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"it defines {', '.join(classes) or 'no class'}"
    raise ConfigError(Problem(f"there is no class {attribute} in the recipe's file", file=file, hint=hint))


def bound_names(tree: ast.Module) -> set[str]:
    """The names that a module's statements bind outside functions and classes; `*` for `from x import *`."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
                continue
            case ast.Lambda():
                continue
            case ast.Import() | ast.ImportFrom():
                names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
        pending.extend(ast.iter_child_nodes(node))
    return names


def _near_file(file: Path) -> str | None:
    folder = file.parent
    if not folder.is_dir():
        return f"the folder {folder} is not there either"
    names = sorted(path.name for path in folder.glob("*.py"))
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"beside it: {', '.join(names[:5])}" if names else None
