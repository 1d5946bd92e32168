"""Digests, canonical JSON, and hashing that reads every byte once.

Two laws hold for everything in this package that has a JSON form, and are tested as such:

    Digest.parse(str(d)) == d
    canonical_json(json.loads(canonical_json(value))) == canonical_json(value)
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tasks.errors import Refused

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
"""What canonical JSON can say. Sequences other than strings become arrays, mappings with string keys objects."""

_HEX = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """A SHA-256 digest; `str(d)` is `sha256:<64 hex digits>`, and `Digest.parse(str(d)) == d`."""

    hex: str

    def __post_init__(self) -> None:
        if not _HEX.fullmatch(self.hex):
            raise ValueError(f"{self.hex!r} is no SHA-256 digest: 64 lower-case hex digits are expected")

    def __str__(self) -> str:
        return f"sha256:{self.hex}"

    @classmethod
    def parse(cls, text: str) -> Digest:
        """The digest that `text` names; raises ValueError for any other algorithm or spelling."""
        algorithm, colon, digits = text.partition(":")
        if not colon or algorithm != "sha256":
            raise ValueError(f"{text!r} is no digest: sha256:<64 hex digits> is expected")
        return cls(digits)

    @classmethod
    def of(cls, data: bytes) -> Digest:
        """The digest of `data`."""
        return cls(hashlib.sha256(data).hexdigest())

    @property
    def short(self) -> str:
        """The first 12 hex digits, for people."""
        return self.hex[:12]


def canonical_json(value: JSON) -> bytes:
    """The one spelling of `value`: keys sorted by code point, no spaces, UTF-8 without escapes that are not needed.

    Floats are written as the shortest decimal that reads back as the same double (1.0 stays 1.0, and is not 1).
    Raises ValueError for NaN and infinities and TypeError for what JSON cannot say; both name the place.
    """
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def digest_of(value: JSON) -> Digest:
    """The digest of `value`'s canonical JSON."""
    return Digest.of(canonical_json(value))


def plain(value: JSON, where: str = "") -> Any:
    """A deep copy of `value` out of dict, list, str, int, float, bool and None; raises as `canonical_json` does."""
    match value:
        case None | bool():
            return value
        # Subclasses (an IntEnum, a StrEnum) are reduced to the plain value that JSON will show.
        case int():
            return int(value)
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{where or 'the value'}: {value} is no JSON number")
            return float(value)
        case str():
            return _text(str.__str__(value), where)
        case Mapping():
            for name in value:
                if not isinstance(name, str):
                    raise TypeError(f"{where or 'the value'}: the key {name!r} is no string")
            return {_text(str.__str__(k), where): plain(v, f"{where}.{k}" if where else k) for k, v in value.items()}
        case list() | tuple():
            return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        case _:
            raise TypeError(f"{where or 'the value'}: {type(value).__name__} {value!r} has no JSON form")


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where or 'the value'}: {text!r} is not valid Unicode") from None
    return text


def hash_file(path: Path) -> Digest:
    """The digest of the file's bytes."""
    with path.open("rb", buffering=0) as file:
        return Digest(hashlib.file_digest(file, "sha256").hexdigest())


def copy_hashed(source: Path, destination: Path) -> tuple[int, Digest]:
    """Copies and hashes in one pass, syncs the copy, and returns its size in bytes and its digest.

    `destination` must not exist. On any error nothing is left there. Raises Refused when `source` changed meanwhile:
    its bytes at no instant are the ones that were copied.
    """
    hasher = hashlib.sha256()
    size = 0
    buffer = memoryview(bytearray(_CHUNK))
    with source.open("rb", buffering=0) as reader:
        before = os.fstat(reader.fileno())
        with destination.open("xb", buffering=0) as writer:
            try:
                while count := reader.readinto(buffer):
                    hasher.update(buffer[:count])
                    written = 0
                    while written < count:  # an unbuffered write may take less than it is given
                        written += writer.write(buffer[written:count])
                    size += count
                os.fsync(writer.fileno())
                after = os.fstat(reader.fileno())
                if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or size != after.st_size:
                    raise Refused(
                        f"{source} changed while it was being copied\n"
                        "something still writes to it: let that end, then run again"
                    )
            except BaseException:
                destination.unlink()
                raise
    return size, Digest(hasher.hexdigest())
