"""What identifies the data sets of a pipeline, found without importing anything."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from tasks.config import DataSource, Pipeline
from tasks.errors import ConfigError, Problem

HashFile = Callable[[Path], object]
"""Gives a file's digest, whose `str` is `sha256:…`; the store's remembers files that have not changed."""


def data_identity(pipeline: Pipeline, hash_file: HashFile) -> dict[str, dict[str, Any]]:
    """Per name of `data`, what identifies the bytes, as JSON; no absolute path and no time is in it.

        {distribution: …}  ->  {"distribution": "scikit-learn", "version": "1.7.2"}
        {path: FILE}       ->  {"content": "sha256:…", "files": 1}
        {path: FOLDER}     ->  {"content": "sha256:…", "files": 5000}, over the sorted relative paths and their digests
        {version: …}       ->  {"version": "2026-11"}

    Raises `ConfigError` for every distribution that is not installed and every path that cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    for name, source in pipeline.data.items():
        try:
            found[name] = _identity(source, pipeline.folder, hash_file)
        except _Unknown as unknown:
            field = f"data.{name}.{unknown.field}"
            problems.append(Problem(unknown.message, file=pipeline.source, field=field, hint=unknown.mend))
    if problems:
        raise ConfigError(*problems)
    return found


class _Unknown(Exception):
    def __init__(self, field: str, message: str, mend: str | None) -> None:
        self.field, self.message, self.mend = field, message, mend
        super().__init__(message)


def _identity(source: DataSource, folder: Path, hash_file: HashFile) -> dict[str, Any]:
    if source.distribution is not None:
        return _of_distribution(source.distribution)
    if source.path is not None:
        return _of_path(folder / source.path, hash_file)
    return {"version": source.version}


def _of_distribution(name: str) -> dict[str, Any]:
    try:
        return {"distribution": name, "version": metadata.version(name)}
    except (metadata.PackageNotFoundError, ValueError):
        installed = {str(d.metadata["Name"]) for d in metadata.distributions()}
        near = difflib.get_close_matches(name, sorted(installed), n=1, cutoff=0.7)
        mend = f"did you mean {near[0]}?" if near else f"install it with: pip install {name}"
        raise _Unknown("distribution", f"the distribution {name} is not installed", mend) from None


def _of_path(path: Path, hash_file: HashFile) -> dict[str, Any]:
    try:
        if path.is_file():
            return {"content": str(hash_file(path)), "files": 1}
        if not path.exists():
            raise _Unknown("path", f"{path} is not there", _near(path))
        if not path.is_dir():
            raise _Unknown("path", f"{path} is neither a file nor a folder", None)
        digests = [[relative, str(hash_file(path / relative))] for relative in sorted(_files(path))]
    except OSError as error:
        raise _Unknown("path", f"{error.filename or path} cannot be read: {error.strerror}", None) from error
    if not digests:
        raise _Unknown("path", f"{path} holds no files", None)
    listed = json.dumps(digests, separators=(",", ":")).encode()
    return {"content": f"sha256:{hashlib.sha256(listed).hexdigest()}", "files": len(digests)}


def _files(folder: Path, inside: str = "", seen: frozenset[tuple[int, int]] = frozenset()) -> Iterator[str]:
    """Relative POSIX paths of all files below, links followed (data sets are often links), each loop once."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in seen:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files(Path(entry.path), f"{inside}{entry.name}/", seen | {here})
            elif entry.is_file():
                yield f"{inside}{entry.name}"
            else:
                raise _Unknown("path", f"{entry.path} is no regular file, or a link to nothing", None)


def _near(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"the folder {path.parent} is not there either"
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else None
