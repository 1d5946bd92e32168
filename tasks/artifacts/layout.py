"""Where things lie below the store's root; docs/artifacts.md says what they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from tasks.artifacts.digest import Digest, canonical_json
from tasks.artifacts.durable import Scratch, create, make_folder, names_in
from tasks.errors import ConfigError, Problem, StoreUnusable

STORE_FORMAT = 1
_KIND = "enginehouse artifact store"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Layout:
    """The paths of one store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects = root / "objects"
        self.contents = root / "contents"
        self.records = root / "records"
        self.keys = root / "keys"
        self.names = root / "names"
        self.aliases = root / "aliases"
        self.claims = root / "claims"
        self.pins = root / "pins"
        self.gc = root / "gc"
        self.trees = root / "trees"
        self.quarantine = root / "quarantine"
        self.data_digests = root / "data-digests"
        self.scratch = root / "tmp"

    def object(self, digest: Digest) -> Path:
        """A file's bytes."""
        return self.objects / digest.hex[:2] / digest.hex[2:]

    def content(self, digest: Digest) -> Path:
        """A content list."""
        return self.contents / digest.hex[:2] / f"{digest.hex[2:]}.json"

    def record(self, digest: Digest) -> Path:
        """A build record."""
        return self.records / digest.hex[:2] / f"{digest.hex[2:]}.json"

    def key(self, digest: Digest) -> Path:
        """The pointer from a key to its record."""
        return self.keys / digest.hex[:2] / f"{digest.hex[2:]}.json"

    def claim(self, digest: Digest) -> Path:
        """The leases and the working folder of a key."""
        return self.claims / digest.hex[:2] / digest.hex[2:]

    def tree(self, digest: Digest) -> Path:
        """The folder of hard links to read a content from."""
        return self.trees / digest.hex[:2] / digest.hex[2:]

    def data_digest(self, identity: Digest) -> Path:
        """The remembered digest of a file outside the store."""
        return self.data_digests / identity.hex[:2] / f"{identity.hex[2:]}.json"

    def stage_names(self, pipeline: str, stage: str) -> Path:
        """The folder of the names of one pipeline's stage."""
        return self.names / checked_name(pipeline, "pipeline") / checked_name(stage, "stage")

    def pipeline_aliases(self, pipeline: str) -> Path:
        """The folder of one pipeline's aliases."""
        return self.aliases / checked_name(pipeline, "pipeline")

    def create(self) -> None:
        """Makes what is missing, and checks that it is a store of this format that can be written."""
        make_folder(self.root)
        marker = self.root / "store.json"
        try:
            text = marker.read_bytes()
        except FileNotFoundError:
            text = self._mark(marker)
        self._check(marker, text)
        for folder in (self.objects, self.contents, self.records, self.keys, self.names, self.aliases):
            make_folder(folder)
        for folder in (self.claims, self.pins, self.gc, self.trees, self.quarantine, self.data_digests, self.scratch):
            make_folder(folder)
        probe = Scratch(self.scratch).file()
        probe.touch(exist_ok=False)
        probe.unlink()

    def _mark(self, marker: Path) -> bytes:
        strangers = [entry.name for entry in self.root.iterdir() if entry.name not in ("tmp", "store.json")]
        if strangers:
            raise StoreUnusable(
                f"{self.root} is no artifact store, and holds other files, such as {min(strangers)}\n"
                "place the store in a folder of its own"
            )
        make_folder(self.scratch)
        create(marker, canonical_json({"format": STORE_FORMAT, "kind": _KIND}), Scratch(self.scratch))
        return marker.read_bytes()

    def _check(self, marker: Path, text: bytes) -> None:
        try:
            value = json.loads(text)
            kind, version = value["kind"], value["format"]
        except (ValueError, KeyError, TypeError):
            kind, version = None, None
        if kind != _KIND:
            raise StoreUnusable(
                f"{marker} is not what an artifact store begins with\n"
                f"restore it (its bytes are {self._marker_text()}), or place the store elsewhere"
            )
        if version != STORE_FORMAT:
            raise StoreUnusable(
                f"the artifact store {self.root} has format {version}, and this enginehouse reads {STORE_FORMAT}\n"
                "install the version of enginehouse that wrote it, or place the store elsewhere"
            )

    @staticmethod
    def _marker_text() -> str:
        return canonical_json({"format": STORE_FORMAT, "kind": _KIND}).decode()


def digests_in(folder: Path, suffix: str = "") -> Iterator[Digest]:
    """The digests that name the entries of `folder`, which are split by their first two digits."""
    for start in names_in(folder):
        for rest in names_in(folder / start):
            digits = start + rest.removesuffix(suffix)
            if rest.endswith(suffix) and re.fullmatch(r"[0-9a-f]{64}", digits):
                yield Digest(digits)


def is_name(text: str) -> bool:
    """Whether `text` can name a pipeline, a stage or an alias."""
    return _NAME.fullmatch(text) is not None


def checked_name(text: str, what: str) -> str:
    """`text`, or ConfigError when it can be no name of a pipeline, a stage or an alias (which are parts of paths)."""
    if not is_name(text):
        raise ConfigError(
            Problem(
                f"{text!r} can be no {what}'s name",
                hint="letters, digits, '.', '_' and '-', beginning with a letter or digit, 128 at most",
            )
        )
    return text
