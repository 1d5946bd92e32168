"""The digests of data sets, which stay where they are: read once, and again only when the file system says so."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tasks.artifacts.content import Content, FileEntry, files_in
from tasks.artifacts.digest import Digest, canonical_json, digest_of, hash_file
from tasks.artifacts.durable import create
from tasks.artifacts.vault import Vault
from tasks.errors import ConfigError, Problem

SETTLED_S = 2.0
"""A file that changed so lately is not remembered: another change might get the same time (the coarsest clocks that
file systems have tick every two seconds)."""


def data_digest(vault: Vault, path: Path) -> Digest:
    """A file's digest, or a folder's content digest. Raises ConfigError for what is not there or can be no content."""
    if path.is_dir():
        files = [(name, file, file.stat().st_size) for name, file in files_in(path)]
        return Content.of(FileEntry(name, size, _file_digest(vault, file)) for name, file, size in files).digest
    if not path.is_file():
        raise ConfigError(Problem("no such file or folder", file=path))
    return _file_digest(vault, path)


def _file_digest(vault: Vault, path: Path) -> Digest:
    before = path.stat()
    # The time of change of the inode too: programs that set a file's time cannot set that one.
    identity = [before.st_dev, before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns]
    remembered = vault.layout.data_digest(digest_of(identity))
    try:
        return Digest.parse(json.loads(remembered.read_bytes())["digest"])
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):
        remembered.unlink(missing_ok=True)  # damaged: it is only remembered, and is found out again
    digest = hash_file(path)
    settled = time.time() - max(before.st_mtime, before.st_ctime) > SETTLED_S
    if settled and path.stat() == before:
        create(remembered, canonical_json({"format": 1, "digest": str(digest)}), vault.scratch, durable=False)
    return digest
