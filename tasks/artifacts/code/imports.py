"""Follows imports into local modules, as Python would find them, without importing anything."""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tasks.artifacts.code.distributions import Installed
from tasks.artifacts.code.parts import is_never_run
from tasks.artifacts.code.syntax import syntax_digest
from tasks.config.recipe_source import parse


class Imported(NamedTuple):
    """One import: the module's full name, and the names taken from it (`*` for all; none for a plain `import`)."""

    module: str
    names: tuple[str, ...]


class Closure:
    """What is reached by imports from some statements."""

    def __init__(self, recipe_file: Path, installed: Installed) -> None:
        self.recipe_file, self.installed = recipe_file, installed
        self.files: dict[str, str] = {}
        """POSIX name, as of the module's full name, -> digest."""
        self.external: set[str] = set()
        """Full names of the modules that are neither local nor Python's own."""
        self.imports_the_recipe = False
        self.notes: list[str] = []
        self._homes: dict[str, Path | None] = {}

    def to_json(self) -> dict[str, Any]:
        """The files and the distributions."""
        distributions: dict[str, str | None] = {}
        for module in sorted(self.external):
            found = self.installed.owners(module)
            distributions |= found or dict.fromkeys([module.partition(".")[0]])
        return {**dict(sorted(self.files.items())), "distributions": distributions}

    def follow(self, nodes: Iterable[ast.AST], file: str, *, package: str) -> None:
        """Take in every local module that these statements of `file` import, and what those import."""
        for imported in self._imports(nodes, file, package):
            found = self._take(imported.module)
            if found is None:
                continue
            for name in self._submodules(found, imported.names):
                self._take(f"{imported.module}.{name}")

    def _take(self, module: str) -> Path | None:
        """Take in a local module and the packages around it; the folder of a package, `None` for anything else."""
        top, *rest = module.split(".")
        home = self._home(top)
        if home is None:
            if top not in sys.stdlib_module_names:
                self.external.add(module)
            return None
        name, folder = top, self._file(home, top)
        for part in rest:
            if folder is None:
                return None  # an attribute of a module
            inner = _in_folder(folder, part)
            if inner is None:
                return None  # an attribute of a package
            name = f"{name}.{part}"
            folder = self._file(inner, name)
        return folder

    def _file(self, path: Path, module: str) -> Path | None:
        """Take in one module's file; the folder if it is a package."""
        if path.is_dir():  # a namespace package
            return path
        is_package = path.name == "__init__.py"
        name = module.replace(".", "/") + ("/__init__.py" if is_package else path.name[path.name.index(".") :])
        if path == self.recipe_file:
            self.imports_the_recipe = True
        elif name not in self.files:
            if path.suffix == ".py":
                tree = parse(path)
                self.files[name] = syntax_digest(tree.body)
                self.follow(tree.body, name, package=module if is_package else module.rpartition(".")[0])
            else:
                self.files[name] = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
        return path.parent if is_package else None

    def _home(self, top: str) -> Path | None:
        """The file of a top-level local module or package; `None` if it is not local."""
        if top not in self._homes:
            self._homes[top] = self._find(top)
        return self._homes[top]

    def _find(self, top: str) -> Path | None:
        if top in sys.builtin_module_names:
            return None
        beside = _in_folder(self.recipe_file.parent, top)
        if beside is not None and beside.is_file():
            return beside
        if top in sys.stdlib_module_names or self.installed.owners(top):
            return None
        return _elsewhere(top) or beside

    def _submodules(self, folder: Path, names: tuple[str, ...]) -> Iterator[str]:
        for name in names:
            if name == "*":
                listed = _listed_in_all(folder / "__init__.py")
                yield from (n for n in listed if _in_folder(folder, n) is not None)
            elif _in_folder(folder, name) is not None:
                yield name

    def _imports(self, nodes: Iterable[ast.AST], file: str, package: str) -> Iterator[Imported]:
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if is_never_run(node):
                continue
            pending.extend(ast.iter_child_nodes(node))
            match node:
                case ast.Import(names=names):
                    for alias in names:
                        yield Imported(alias.name, ())
                case ast.ImportFrom(module=module, names=names, level=level):
                    absolute = _absolute(module or "", level, package)
                    if absolute:
                        yield Imported(absolute, tuple(alias.name for alias in names))
                    else:  # `from . import x` at the top level
                        yield from (Imported(alias.name, ()) for alias in names)
                case ast.Call(func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module")):
                    match node.args:
                        case [ast.Constant(value=str(name)), *_]:
                            dots = len(name) - len(name.lstrip("."))
                            yield Imported(_absolute(name[dots:], dots, package), ())
                        case _:
                            self.notes.append(
                                f"{file}:{node.lineno}: an import whose name is computed is not followed; "
                                "import the module by its name if its code should count"
                            )


def _absolute(module: str, level: int, package: str) -> str:
    """The full name of a module that is imported from inside `package`, with `level` leading dots."""
    if level == 0:
        return module
    around = package.split(".") if package else []
    kept = around[: len(around) - (level - 1)]
    return ".".join([*kept, *([module] if module else [])])


def _elsewhere(top: str) -> Path | None:
    """Where an import finds what no wheel carries: a library in editable mode, or a module put there by hand."""
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None)
        if spec is not None:
            if spec.origin is not None and Path(spec.origin).is_file():
                return Path(spec.origin)
            return next((Path(p) for p in spec.submodule_search_locations or () if Path(p).is_dir()), None)
    return None


def _listed_in_all(file: Path) -> Iterator[str]:
    """What `from package import *` imports, where `__all__` is written as a list of texts."""
    for node in parse(file).body if file.is_file() else ():
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names) | ast.Tuple(elts=names)):
                yield from (n.value for n in names if isinstance(n, ast.Constant) and isinstance(n.value, str))


def _in_folder(folder: Path, name: str) -> Path | None:
    """What `import name` finds in one folder: Python's order is package, extension, module, namespace package."""
    package = folder / name / "__init__.py"
    if package.is_file():
        return package
    for suffix in (*importlib.machinery.EXTENSION_SUFFIXES, ".py"):
        if (file := folder / f"{name}{suffix}").is_file():
            return file
    return folder / name if (folder / name).is_dir() else None
