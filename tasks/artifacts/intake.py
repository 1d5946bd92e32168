"""Taking files into the store: hashed while they are copied, kept only when all of them are there.

The write order, and why a crash between any two steps leaves a whole store:

    1  every file is copied to tmp/, hashed and synced      left over: removed by gc
    2  the pin                                              counts for nothing once its process is dead
    3  objects, synced, then their folders, synced          named by nothing yet: removed by gc
    4  the content list                                     the same
    5  the build record                                     the same
    6  the key's pointer                                    found by the next lookup, which gives it its name
    7  the name
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tasks.artifacts.content import Content, FileEntry, files_in
from tasks.artifacts.digest import Digest
from tasks.artifacts.objects import Staged
from tasks.artifacts.record import BuildRecord
from tasks.artifacts.vault import Vault


class Intake:
    """A context manager; what was taken and not kept is gone after it."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._staged: list[Staged] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for item in self._staged:
            item.path.unlink(missing_ok=True)

    def take(self, folder: Path) -> Content:
        """Copies a folder's files. Raises ConfigError for what can be no content, Refused for files still written."""
        return Content.of(FileEntry(path, item.size, item.digest) for path, item in self._all(files_in(folder)))

    def take_byproducts(self, files: Mapping[str, Path]) -> dict[str, Digest]:
        """Copies single files, by name."""
        return {name: item.digest for name, item in self._all(list(files.items()))}

    def keep(self, content: Content) -> None:
        """Makes objects of all that was taken, and stores the content list; safe from gc from here on."""
        self._vault.pins.pin("commit", content.digest, {item.digest for item in self._staged})
        self._vault.objects.keep(self._staged)
        self._vault.ledger.put_content(content)

    def _all(self, files: list[tuple[str, Path]]) -> list[tuple[str, Staged]]:
        taken = []
        for name, path in files:
            item = self._vault.objects.stage(path)
            self._staged.append(item)
            taken.append((name, item))
        return taken


def put_record(vault: Vault, record: BuildRecord) -> None:
    """Stores a record whose content is there, pinned."""
    vault.pins.pin("record", record.id)
    vault.ledger.put_record(record)
