"""The bytes: one read-only file for each digest, however many contents hold it.

A sound object is *sealed*: its time of change is set to SEALED_NS once its bytes were verified. Any write moves the
time, so that size and time say cheaply whether the bytes are still those that were verified, with no list of them
to keep. An object that lost its seal in any other way (a backup that keeps no times, say) is hashed and sealed anew.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.artifacts.content import Content, FileEntry
from tasks.artifacts.digest import Digest, copy_hashed, hash_file
from tasks.artifacts.durable import Scratch, make_folder, remove_tree, sync_folder
from tasks.artifacts.layout import Layout

SEALED_NS = 946_684_800 * 10**9
"""2000-01-01T00:00:00Z exactly: no clock gives it, and zip files (which begin in 1980) can hold it."""
_FICLONE = 0x40049409  # linux/fs.h


@dataclass(frozen=True, slots=True)
class Staged:
    """Bytes that were copied into the store and hashed, but are not kept yet."""

    path: Path
    size: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Fault:
    """Something stored that is not what it should be."""

    kind: str
    """`object`, `content list`, `build record`, `key pointer`, `name` or `alias`."""
    subject: Digest | str
    """Which one."""
    problem: str
    """Such as `is missing`."""

    @property
    def what(self) -> str:
        """Such as `object sha256:…`."""
        return f"{self.kind} {self.subject}"

    def __str__(self) -> str:
        return f"{self.what} {self.problem}"


class Objects:
    """The objects of one store, and the folders made of them."""

    def __init__(self, layout: Layout, scratch: Scratch) -> None:
        self._layout = layout
        self._scratch = scratch

    def stage(self, source: Path) -> Staged:
        """Copies a file into the store's scratch folder, sealed and synced."""
        path = self._scratch.file()
        size, digest = copy_hashed(source, path)
        _seal(path)
        return Staged(path, size, digest)

    def keep(self, staged: Iterable[Staged]) -> None:
        """Makes staged bytes objects. What is there and sound stays; what is there and is not is replaced."""
        folders = set()
        for item in staged:
            path = self._layout.object(item.digest)
            make_folder(path.parent)
            folders.add(path.parent)  # also for what is there: who put it may not have come to syncing it yet
            try:
                os.link(item.path, path)
            except FileExistsError:
                if self.fault(item.digest, item.size) is not None:
                    # It lies in quarantine now, and its place is free (or taken by another's sound bytes).
                    item.path.replace(path)
                    continue
            item.path.unlink()
        for folder in folders:
            sync_folder(folder)

    def fault(self, digest: Digest, size: int | None = None, *, thorough: bool = False) -> Fault | None:
        """What is wrong with an object, if anything; what is wrong is moved to quarantine.

        Trusts a sealed object of the right size, unless it is told to be `thorough`. `size` None: any size.
        """
        try:
            return self._fault(digest, size, thorough)
        except FileNotFoundError:
            return Fault("object", digest, "is missing")

    def _fault(self, digest: Digest, size: int | None, thorough: bool) -> Fault | None:
        path = self._layout.object(digest)
        before = path.stat()
        if size is not None and before.st_size != size:
            problem = f"has {before.st_size} bytes instead of {size}"
        elif before.st_mtime_ns == SEALED_NS and not thorough:
            return None
        elif hash_file(path) == digest:
            if before.st_mtime_ns != SEALED_NS:
                _seal(path)
            return None
        else:
            problem = "holds other bytes than were stored"
        self._put_aside(path, digest, before.st_ino)
        return Fault("object", digest, problem)

    def faults(self, content: Content) -> list[Fault]:
        """What is wrong with the objects of a content."""
        found = (self.fault(entry.digest, entry.size) for entry in content.files)
        return list({fault.subject: fault for fault in found if fault is not None}.values())

    def tree(self, content: Content) -> Path:
        """A folder with the content's files, hard-linked to objects that must be sound; made or mended in place."""
        root = self._layout.tree(content.digest)
        expected = {entry.path: entry for entry in content.files}
        for stranger in _strangers(root, expected):
            stranger.unlink(missing_ok=True)
        for path, entry in expected.items():
            self._link(self._layout.object(entry.digest), root / path)
        return root

    def copy_out(self, content: Content, folder: Path) -> list[Fault]:
        """Copies the content into `folder`, hashing what is written, and syncs it; the answer is what was wrong."""
        faults = []
        folders = {folder}
        for entry in content.files:
            destination = folder / entry.path
            destination.parent.mkdir(parents=True, exist_ok=True)
            folders.update(p for p in destination.parents if p.is_relative_to(folder))
            if not self._copied(entry, destination):
                fault = self.fault(entry.digest, entry.size, thorough=True)
                faults.append(fault or Fault("object", entry.digest, "changed while it was read"))
        for made in folders:
            sync_folder(made)
        return faults

    def _copied(self, entry: FileEntry, destination: Path) -> bool:
        source = self._layout.object(entry.digest)
        if not source.exists():
            return False
        if _cloned(source, destination):
            return destination.stat().st_size == entry.size and hash_file(destination) == entry.digest
        return copy_hashed(source, destination) == (entry.size, entry.digest)

    def _link(self, source: Path, link: Path) -> None:
        try:
            if os.path.samestat(source.stat(), link.lstat()):
                return
            link.unlink()  # the object was replaced since: the link may hold what was wrong with it
        except FileNotFoundError:
            link.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, link)
        except FileExistsError:
            self._link(source, link)  # another process makes the same tree

    def _put_aside(self, path: Path, digest: Digest, inode: int) -> None:
        aside = self._layout.quarantine / f"{digest.hex}.{secrets.token_hex(4)}"
        try:
            path.rename(aside)
        except FileNotFoundError:
            return  # another process was quicker
        if aside.stat().st_ino != inode:
            # Another process had replaced it by sound bytes in between: put them back.
            with suppress(FileExistsError):
                os.link(aside, path)
            aside.unlink()

    def clear_tree(self, digest: Digest) -> None:
        """Removes the folder of links."""
        remove_tree(self._layout.tree(digest))


def _seal(path: Path) -> None:
    path.chmod(0o444)
    os.utime(path, ns=(SEALED_NS, SEALED_NS))


def _cloned(source: Path, destination: Path) -> bool:
    """Whether the file system could share the bytes (a reflink: a copy that costs nothing until one is written)."""
    with source.open("rb") as reader, destination.open("xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.EPERM):
                raise
        else:
            os.fsync(writer.fileno())
            return True
    destination.unlink()
    return False


def _strangers(root: Path, expected: Iterable[str]) -> list[Path]:
    wanted = set(expected)
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.relative_to(root).as_posix() not in wanted:
                found.append(path)
    return found
