"""The digest of syntax: what the code does, not how it is written down."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator

_WITHOUT_MEANING = frozenset({"ctx", "type_comment", "kind", "type_ignores"})


def syntax_digest(nodes: Iterable[ast.AST]) -> str:
    """`sha256:…` over statements; positions, comments, docstrings and `pass` do not count.

    Fields that are empty are left out, so that Python versions whose syntax trees differ only in new, unused fields
    agree.
    """
    digest = hashlib.sha256()
    for word in _words(nodes):
        digest.update(word.encode())
        digest.update(b"\0")
    return f"sha256:{digest.hexdigest()}"


def says_nothing(node: ast.AST) -> bool:
    """A docstring, another text that stands by itself, or `pass`."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Pass)


def _words(nodes: Iterable[ast.AST]) -> Iterator[str]:
    # A stack of its own: long chains of operators nest deeper than Python recurses.
    pending: list[object] = [list(nodes)]
    while pending:
        item = pending.pop()
        if isinstance(item, ast.Constant):
            yield f"{type(item.value).__name__} {item.value!a}"
        elif isinstance(item, ast.AST):
            yield f"({type(item).__name__}"
            pending.append(_Word(")"))
            fields = [
                (n, v) for n, v in ast.iter_fields(item) if n not in _WITHOUT_MEANING and v is not None and v != []
            ]
            for name, value in reversed(fields):
                pending += (value, _Word(f".{name}"))
        elif isinstance(item, list):
            yield "["
            pending.append(_Word("]"))
            pending += [
                None if i is None else i for i in reversed(item) if not (isinstance(i, ast.AST) and says_nothing(i))
            ]
        elif isinstance(item, _Word):
            yield item
        else:
            yield f"{type(item).__name__} {item!a}"


class _Word(str):
    """A word that is ready, apart from texts of the tree."""

    __slots__ = ()
