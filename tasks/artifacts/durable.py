"""Writes that are whole or not there: create-if-absent and one pointer write, each synced before it can be seen.

The two have an equal on every object store (PUT with If-None-Match: *, and PUT), which is why nothing else is used.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.artifacts.owner import Owner
from tasks.errors import StoreUnusable

_MENDS = {
    errno.EACCES: "give this user the right to write there, or place the store elsewhere",
    errno.EPERM: "give this user the right to write there, or place the store elsewhere",
    errno.EROFS: "the file system is read-only: mount it for writing, or place the store elsewhere",
    errno.ENOSPC: "the disk is full: free some space (enginehouse artifacts gc --dry-run says what it would remove)",
    errno.EDQUOT: "the quota is used up: free some (enginehouse artifacts gc --dry-run says what it would remove)",
    errno.EFBIG: "the file is larger than the limit (ulimit -f) or the file system allows",
    errno.EIO: "the device reports errors: look at the kernel's log",
    errno.ENOTDIR: "a file lies where a folder is expected: move it away, or place the store elsewhere",
    errno.EEXIST: "a file lies where a folder is expected: move it away, or place the store elsewhere",
    errno.ENAMETOOLONG: "place the store in a folder with a shorter path",
    errno.EMLINK: "the file system allows no more hard links to one file: run enginehouse artifacts gc",
    errno.ESTALE: "the network file system lost the file: mount it anew",
}


@contextmanager
def reported(root: Path, what: str = "the artifact store") -> Iterator[None]:
    """Turns what the operating system refuses into StoreUnusable with the path and the mend."""
    try:
        yield
    except OSError as error:
        mend = _MENDS.get(error.errno or 0)
        if mend is None:
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise StoreUnusable(f"{what} {root} cannot be used: {error.strerror}{where}\n{mend}") from error


class Scratch:
    """Temporary files, named after the process that writes them, so that gc knows whose are left over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self) -> Path:
        """A path of this process that nobody uses."""
        return self.folder / f"{Owner.current().token}.{secrets.token_hex(6)}"


def make_folder(folder: Path) -> None:
    """Makes a folder and what leads to it, so that they survive a crash."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes the folder's entries survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def names_in(folder: Path) -> list[str]:
    """The names of a folder's entries, sorted; none when it is not there."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)
    except FileNotFoundError:
        return []


def create(path: Path, data: bytes, scratch: Scratch, *, durable: bool = True) -> bool:
    """Creates `path` with all of `data`, unless it exists: then nothing changes and the answer is False."""
    make_folder(path.parent)
    with _written(data, scratch, durable) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    if durable:
        sync_folder(path.parent)
    return True


def replace(path: Path, data: bytes, scratch: Scratch, *, durable: bool = True) -> None:
    """Writes `path`: a reader sees the old bytes or the new ones."""
    make_folder(path.parent)
    with _written(data, scratch, durable) as temporary:
        temporary.replace(path)
    if durable:
        sync_folder(path.parent)


def remove_tree(folder: Path) -> None:
    """Removes a folder and all in it; it may be gone already."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        # Someone else removes it too, or it never was; what is left is theirs.
        if folder.exists():
            remove_tree(folder)


@contextmanager
def _written(data: bytes, scratch: Scratch, durable: bool) -> Iterator[Path]:
    temporary = scratch.file()
    try:
        with temporary.open("xb", buffering=0) as file:
            os.fchmod(file.fileno(), 0o444)
            file.write(data)
            if durable:
                os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
