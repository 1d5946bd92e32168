"""Tells a recipe's metric from the rest of it, so that editing the metric does not train again.

A module is seen as pieces: each definition, each imported name, each plain constant is one. A piece reaches the pieces
that bind the names it uses. The metric's part is what the class's `metric` member reaches; the other part is everything
that is not reached by the metric alone. In doubt a piece is in both: any other statement at the top level is, as
are a definition whose decorator may do more than decorate, and everything if names are looked up by `globals`, `eval`
or `exec`.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tasks.artifacts.code.syntax import says_nothing
from tasks.config.recipe_source import bound_names

METRIC = "metric"

_DECORATORS_THAT_ONLY_DECORATE = frozenset(
    {
        "dataclass", "property", "staticmethod", "classmethod", "abstractmethod", "final", "override", "wraps",
        "cache", "lru_cache", "cached_property", "total_ordering", "contextmanager", "runtime_checkable",
        "no_grad", "inference_mode",
    }
)  # fmt: skip
"""By their last name: `functools.cache` is `cache`."""
_LOOKS_UP_ANY_NAME = frozenset({"globals", "eval", "exec"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The statements of a recipe's module that decide about training and about the metric; they may overlap."""

    train: list[ast.stmt]
    metric: list[ast.stmt]


class Piece:
    """One definition, imported name, constant or statement of a module or class."""

    def __init__(self, node: ast.stmt, *, shared: bool = False) -> None:
        self.node, self.shared = node, shared

    @cached_property
    def binds(self) -> frozenset[str]:
        return frozenset(bound_names(ast.Module(body=[self.node], type_ignores=[])))

    @cached_property
    def uses(self) -> frozenset[str]:
        """The names that it looks up in the module, found by Python's own rules of scope."""
        return frozenset(_global_names(symtable.symtable(ast.unparse(self.node), "<piece>", "exec")))


def split(tree: ast.Module, recipe: ast.ClassDef | None) -> Parts:
    """The two parts of a recipe's module; the whole module for both where they cannot be told apart."""
    whole = Parts(train=tree.body, metric=tree.body)
    try:
        return whole if recipe is None else _split(tree, recipe, whole)
    except RecursionError:  # an expression that nests deeper than Python writes out
        return whole


def _split(tree: ast.Module, recipe: ast.ClassDef, whole: Parts) -> Parts:
    inside = _metric_members(recipe)
    if inside is None:
        return whole
    others = [piece for node in tree.body if node is not recipe for piece in _pieces(node)]
    train_class = Piece(_with_body(recipe, [m for m in recipe.body if METRIC not in _names(m)]), shared=True)
    metric_class = Piece(_with_body(recipe, inside))
    everything = [*others, train_class, metric_class]
    if any(piece.uses & _LOOKS_UP_ANY_NAME for piece in everything) or "*" in bound_names(tree):
        return whole

    shared = [piece for piece in others if piece.shared]
    by_metric = _reached([metric_class, *shared], [*others, train_class])  # it may use the class by its name
    by_train = _reached([train_class, *shared, *(p for p in others if p not in by_metric)], others)
    # The metric's own members leave the class only if nothing else takes hold of them through the class.
    if any(_takes_metric(piece.node, recipe) for piece in by_train):
        return whole
    return Parts(
        train=[p.node for p in everything if p in by_train],
        metric=[p.node for p in everything if p in by_metric],
    )


def _pieces(node: ast.stmt) -> Iterator[Piece]:
    match node:
        case _ if says_nothing(node) or is_never_run(node):
            return
        case ast.Import(names=names):
            for alias in names:
                yield Piece(ast.copy_location(ast.Import(names=[alias]), node))
        case ast.ImportFrom(module=module, names=names, level=level) if module != "__future__":
            for alias in names:
                yield Piece(ast.copy_location(ast.ImportFrom(module=module, names=[alias], level=level), node))
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield Piece(node, shared=not all(map(_only_decorates, node.decorator_list)))
        case ast.Assign(targets=targets, value=value) if all(isinstance(t, ast.Name) for t in targets):
            yield Piece(node, shared=not _is_constant(value))
        case ast.AnnAssign(target=ast.Name(), value=assigned):
            yield Piece(node, shared=assigned is not None and not _is_constant(assigned))
        case _:
            yield Piece(node, shared=True)


def is_never_run(node: ast.AST) -> bool:
    """`if __name__ == "__main__":` and `if TYPE_CHECKING:` without an else: a recipe is imported."""
    if not isinstance(node, ast.If) or node.orelse:
        return False
    match node.test:
        case ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant(value="__main__")]):
            return True
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(value=ast.Name(id="typing"), attr="TYPE_CHECKING"):
            return True
    return False


def _metric_members(recipe: ast.ClassDef) -> list[ast.stmt] | None:
    """The `metric` member and the other members that it uses; `None` if that cannot be told."""
    members = {name: m for m in recipe.body for name in _names(m)}
    if METRIC not in members:
        return None  # inherited
    taken: list[ast.stmt] = [m for m in recipe.body if METRIC in _names(m)]
    for member in taken:  # grows while it is read
        used = _uses_of_self(member) if isinstance(member, ast.FunctionDef) else Piece(member).uses & members.keys()
        if used is None or not used <= members.keys():
            return None  # self as a whole, or an attribute that __init__ or a base class gives it
        taken += [m for m in recipe.body if used & _names(m) and m not in taken]
    return [m for m in recipe.body if m in taken]


def _uses_of_self(function: ast.FunctionDef) -> set[str] | None:
    """The attributes that a method takes from `self`; `None` if it uses `self` in another way."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    if not arguments or any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list):
        return set()
    me = arguments[0].arg
    attributes = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me
    ]
    uses = sum(isinstance(node, ast.Name) and node.id in (me, "super") for node in ast.walk(function))
    return {node.attr for node in attributes} if uses == len(attributes) else None


def _takes_metric(node: ast.stmt, recipe: ast.ClassDef) -> bool:
    """Whether a piece of the training's part may call the metric: by `x.metric`, or by the class as a whole."""
    attributes = [n for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    if any(n.attr == METRIC and isinstance(n.value, ast.Name) for n in attributes):
        return True
    named = sum(isinstance(n, ast.Name) and n.id == recipe.name for n in ast.walk(node))
    return named > sum(isinstance(n.value, ast.Name) and n.value.id == recipe.name for n in attributes)


def _reached(start: Iterable[Piece], pieces: Sequence[Piece]) -> set[Piece]:
    found: set[Piece] = set()
    pending = list(start)
    while pending:
        piece = pending.pop()
        if piece not in found:
            found.add(piece)
            pending += [other for other in pieces if other.binds & piece.uses]
    return found


def _with_body(recipe: ast.ClassDef, body: list[ast.stmt]) -> ast.ClassDef:
    fields = {name: value for name, value in ast.iter_fields(recipe) if name != "body"}
    return ast.copy_location(ast.ClassDef(**fields, body=body or [ast.Pass()]), recipe)


def _names(member: ast.stmt) -> set[str]:
    return bound_names(ast.Module(body=[member], type_ignores=[]))


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _global_names(inner)


def _only_decorates(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(function).rpartition(".")[2] in _DECORATORS_THAT_ONLY_DECORATE


def _is_constant(value: ast.expr) -> bool:
    """Whether evaluating it calls nothing, so that its only effect is the name."""
    allowed = (
        ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.BinOp, ast.operator,
        ast.unaryop, ast.expr_context,
    )  # fmt: skip
    return all(isinstance(node, allowed) for node in ast.walk(value))
