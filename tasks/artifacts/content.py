"""Content: which files there are and the digest of each; equal bytes give an equal digest wherever they lie.

    Content.from_json(c.to_json()) == c
    scan(a).digest == scan(b).digest   for every two folders with the same files, whatever their names, times and modes

The digest is that of the canonical JSON of `to_json()`. Empty folders, permissions and times are no content.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tasks.artifacts.digest import Digest, canonical_json, hash_file
from tasks.errors import ConfigError, Problem, StoreUnusable

CONTENT_FORMAT = 1


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a content."""

    path: str
    """Relative POSIX path; no empty, `.` or `..` part, no backslash, no control character."""
    size: int
    """In bytes."""
    digest: Digest

    def __post_init__(self) -> None:
        if problem := path_problem(self.path):
            raise ValueError(f"{self.path!r}: {problem}")
        if self.size < 0:
            raise ValueError(f"{self.path}: size {self.size} is negative")


@dataclass(frozen=True)
class Content:
    """A content list: at least one file, sorted by path, no path twice, no file where another has a folder."""

    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        paths = [entry.path for entry in self.files]
        if not paths:
            raise ValueError("a content has at least one file")
        if paths != sorted(set(paths)):
            raise ValueError("a content list is sorted by path and has no path twice")
        folders = {parent for path in paths for parent in _parents(path)}
        if both := folders.intersection(paths):
            raise ValueError(f"{sorted(both)[0]!r} is both a file and a folder")

    @classmethod
    def of(cls, files: Iterable[FileEntry]) -> Content:
        """The content of these files, in any order."""
        return cls(tuple(sorted(files, key=lambda entry: entry.path)))

    @cached_property
    def digest(self) -> Digest:
        """What names the content: the digest of `to_json()` as canonical JSON."""
        return Digest.of(self.to_bytes())

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files)

    def to_json(self) -> dict[str, Any]:
        """`{"files": [{"digest", "path", "size"}…], "format": 1}`."""
        files = [{"path": entry.path, "size": entry.size, "digest": str(entry.digest)} for entry in self.files]
        return {"format": CONTENT_FORMAT, "files": files}

    def to_bytes(self) -> bytes:
        """What is stored: the canonical JSON."""
        return canonical_json(self.to_json())

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Content:
        """The inverse of `to_json`. Raises StoreUnusable for another format, ValueError or KeyError for nonsense."""
        if value["format"] != CONTENT_FORMAT:
            raise StoreUnusable(
                f"a content list has format {value['format']}, this version of enginehouse reads {CONTENT_FORMAT}\n"
                "install the version of enginehouse that wrote the store, or a newer one"
            )
        return cls(tuple(FileEntry(f["path"], f["size"], Digest.parse(f["digest"])) for f in value["files"]))


def differing_files(one: Content, other: Content) -> tuple[str, ...]:
    """The paths whose bytes differ or that only one of the two has, sorted."""
    a = {entry.path: entry.digest for entry in one.files}
    b = {entry.path: entry.digest for entry in other.files}
    return tuple(sorted(path for path in a.keys() | b.keys() if a.get(path) != b.get(path)))


def scan(folder: Path) -> Content:
    """The content of a folder; reads every file. Raises ConfigError for what can be no content (see `files_in`)."""
    entries = []
    for path, file in files_in(folder):
        entries.append(FileEntry(path, file.stat().st_size, hash_file(file)))
    return Content.of(entries)


def files_in(folder: Path) -> list[tuple[str, Path]]:
    """The files below `folder`: their relative POSIX paths, sorted, and where to read them.

    A symbolic link to a file inside the folder counts as that file. Raises ConfigError naming every entry that can be
    no content: other links, devices, sockets, pipes, names that are no portable text, and a folder without any file.
    """
    if not folder.is_dir():
        raise ConfigError(Problem("no such folder", file=folder))
    problems: list[Problem] = []
    found = sorted(_walk(folder, folder.resolve(), problems))
    if not problems and not found:
        problems.append(Problem("the folder has no files", file=folder, hint="a product has at least one file"))
    if problems:
        raise ConfigError(*problems)
    return found


def path_problem(path: str) -> str | None:
    """Why `path` can be no path of a content list, or None when it can."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a relative path without empty, '.' and '..' parts is expected"
    if "\\" in path or any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "a file name holds no backslash and no control character"
    try:
        path.encode()
    except UnicodeEncodeError:
        return "a file name is valid UTF-8"
    return None


def _walk(folder: Path, root: Path, problems: list[Problem]) -> Iterator[tuple[str, Path]]:
    base = len(os.fspath(root)) + 1
    pending = [root]
    while pending:
        for entry in os.scandir(pending.pop()):
            relative = entry.path[base:]
            shown = folder / os.fsencode(relative).decode(errors="backslashreplace")
            if problem := path_problem(relative):
                problems.append(Problem(problem, file=shown, hint="rename it"))
            elif entry.is_symlink():
                if problem := _link_problem(Path(entry.path), root):
                    problems.append(Problem(problem, file=shown, hint="put a copy of the file there"))
                else:
                    yield relative, Path(entry.path)
            elif entry.is_dir():
                pending.append(Path(entry.path))
            elif entry.is_file():
                yield relative, Path(entry.path)
            else:
                problems.append(Problem(f"{_kind(entry)} can be no content", file=shown, hint="remove it"))


def _link_problem(link: Path, root: Path) -> str | None:
    target = Path(os.path.realpath(link))
    if not target.is_relative_to(root):
        return f"the symbolic link leads out of the folder, to {target}"
    if not target.exists():
        return f"the symbolic link leads nowhere, to {target}"
    if not target.is_file():
        return f"the symbolic link leads to {target}, which is no regular file"
    return None


def _kind(entry: os.DirEntry[str]) -> str:
    mode = entry.stat(follow_symlinks=False).st_mode
    kinds = {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "this")


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
