"""What is written about the bytes: content lists, build records, and the pointer from a key to its record."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tasks.artifacts.content import Content
from tasks.artifacts.digest import Digest, canonical_json
from tasks.artifacts.durable import Scratch, create, replace
from tasks.artifacts.layout import Layout
from tasks.artifacts.objects import Fault
from tasks.artifacts.record import BuildRecord

POINTER_FORMAT = 1
T = TypeVar("T")


class Lost(Exception):
    """A content list, a record, a pointer or a name is missing or damaged; never leaves the store as such."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(str(fault))


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a key or a name points to."""

    record: Digest
    content: Digest

    def to_json(self) -> dict[str, Any]:
        """`{"content", "format": 1, "record"}`."""
        return {"format": POINTER_FORMAT, "record": str(self.record), "content": str(self.content)}


class Ledger:
    """The documents of one store."""

    def __init__(self, layout: Layout, scratch: Scratch) -> None:
        self._layout = layout
        self._scratch = scratch

    def put_content(self, content: Content) -> None:
        """Stores a content list; its objects must be there."""
        self._put(self._layout.content(content.digest), content.to_bytes())

    def content(self, digest: Digest) -> Content:
        """Reads a content list; raises Lost, and StoreUnusable for another format."""
        return self._read(self._layout.content(digest), digest, "content list", Content.from_json)

    def put_record(self, record: BuildRecord) -> None:
        """Stores a build record; its content must be there."""
        self._put(self._layout.record(record.id), record.to_bytes())

    def record(self, digest: Digest) -> BuildRecord:
        """Reads a build record; raises Lost, and StoreUnusable for another format."""
        return self._read(self._layout.record(digest), digest, "build record", BuildRecord.from_json)

    def keyed(self, key: Digest) -> Pointer | None:
        """What a key points to, None when it was never built; raises Lost for a damaged pointer."""
        value = read_document(self._layout.key(key), "key pointer", key)
        return None if value is None else parse_pointer(value, "key pointer", key)

    def point_key(self, key: Digest, pointer: Pointer, *, move: bool) -> bool:
        """Points a key at a record. Unless it is to be moved, the first wins: False when the key points already."""
        data = canonical_json(pointer.to_json())
        if move:
            replace(self._layout.key(key), data, self._scratch)
            return True
        return create(self._layout.key(key), data, self._scratch)

    def forget_key(self, key: Digest) -> None:
        """Removes a key's pointer."""
        self._layout.key(key).unlink(missing_ok=True)

    def _put(self, path: Path, data: bytes) -> None:
        if not create(path, data, self._scratch) and path.read_bytes() != data:
            replace(path, data, self._scratch)

    def _read(self, path: Path, digest: Digest, kind: str, parse: Callable[[Any], T]) -> T:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise Lost(Fault(kind, digest, "is missing")) from None
        if Digest.of(data) != digest:
            self._put_aside(path, digest)
            raise Lost(Fault(kind, digest, "holds other bytes than were stored"))
        return parse(json.loads(data))

    def _put_aside(self, path: Path, digest: Digest) -> None:
        try:
            path.rename(self._layout.quarantine / f"{digest.hex}.{secrets.token_hex(4)}")
        except FileNotFoundError:
            return  # another process was quicker


def read_document(path: Path, kind: str, subject: Digest | str) -> dict[str, Any] | None:
    """Reads a JSON object; None when it is not there. Raises Lost for what is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        value = None
    if not isinstance(value, dict) or value.get("format") != POINTER_FORMAT:
        raise Lost(Fault(kind, subject, "cannot be read"))
    return value


def parse_pointer(value: dict[str, Any], kind: str, subject: Digest | str) -> Pointer:
    """The pointer in a document that was read; raises Lost for a damaged one."""
    try:
        return Pointer(Digest.parse(value["record"]), Digest.parse(value["content"]))
    except (ValueError, KeyError, AttributeError):
        raise Lost(Fault(kind, subject, "cannot be read")) from None
