"""The writes to a local Triton model repository, each of which is done whole or not at all, whenever we are killed.

A writer works in a staging folder inside the model's folder and renames out of it. It holds a `flock` on that folder
for as long as it lives; the kernel lets go of the lock when the writer dies, so a staging folder that nobody holds is
a leftover. Leftovers must go before a model is loaded: Triton reloads *every* version of a model whose folder shows a
newer entry that is no number.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.artifacts.content import FileEntry
from tasks.errors import ConfigError, Refused, StoreUnusable
from tasks.toolchain.config_pbtxt import check
from tasks.toolchain.provenance import PROVENANCE, PlacedFile, Provenance

CONFIG = "config.pbtxt"

_STAGING = re.compile(r"\.staging-[0-9]+-[0-9a-f]+")

_UNWRITABLE = "make it writable, or name another `publish.repository`; nothing has changed"
_FULL = "make room and run again; nothing that is served has changed"
_NO_LOCKS = "the file system there has no locks; name a `publish.repository` on a local one"
_MENDS = {
    errno.EACCES: _UNWRITABLE,
    errno.EPERM: _UNWRITABLE,
    errno.EROFS: _UNWRITABLE,
    errno.ENOTDIR: _UNWRITABLE,
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,
    errno.ENOLCK: _NO_LOCKS,
    errno.EBADF: _NO_LOCKS,  # NFS, for a lock on a folder
}


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A new folder inside the model's `folder`, removed at the end of the `with` together with what is still in it.

    Leftovers of dead writers go first. A model's folder that did not exist and stays empty is removed again.

    Raises:
        StoreUnusable: for an OSError in here or in the body: no room, no permission, read-only.
    """
    with _repository_errors(folder):
        is_new = not folder.exists()
        stage, lock = _new_staging(folder)
        try:
            clear_leftovers(folder)
            yield stage
        finally:
            # A second error while tidying would hide the first; what stays is a leftover, which the next writer clears.
            with suppress(OSError):
                shutil.rmtree(stage)
            os.close(lock)
            if is_new:
                with suppress(OSError):
                    folder.rmdir()


@contextmanager
def _repository_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnusable(
            f"the model repository cannot be written: {error.strerror or error}: {error.filename or folder}\n"
            + _MENDS.get(error.errno or 0, "nothing that is served has changed")
        ) from error


def _new_staging(folder: Path) -> tuple[Path, int]:
    """A staging folder, and the descriptor whose lock says that its writer lives."""
    while True:
        _make_durably(folder)
        stage = folder / f".staging-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            stage.mkdir()
        except FileNotFoundError:
            continue  # another writer removed the model's folder, which it had made for nothing
        # Until we hold it, it looks like a leftover to others; then they may clear it, and we make another one.
        lock = _hold(stage)
        if lock is not None:
            return stage, lock


def _hold(stage: Path) -> int | None:
    """A descriptor that holds the folder's lock; `None` if somebody else holds it, or it is gone."""
    try:
        lock = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stage.exists():
            return lock
    except BlockingIOError:
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def is_staging(name: str) -> bool:
    """Whether an entry of a model's folder is named as a staging folder is."""
    return _STAGING.fullmatch(name) is not None


def is_leftover(path: Path) -> bool:
    """Whether `path` is the staging folder of a writer that died."""
    if not is_staging(path.name) or path.is_symlink() or not path.is_dir():
        return False
    lock = _hold(path)
    if lock is None:
        return False
    os.close(lock)
    return True


def clear_leftovers(folder: Path) -> tuple[str, ...]:
    """Remove the staging folders of dead writers; returns their names. Another writer may do the same meanwhile.

    Raises:
        StoreUnusable: they cannot be removed.
    """
    cleared = []
    with _repository_errors(folder):
        for stage in sorted(folder.glob(".staging-*")):
            if not is_staging(stage.name) or stage.is_symlink() or not stage.is_dir():
                continue
            lock = _hold(stage)
            if lock is not None:
                try:
                    shutil.rmtree(stage)
                    cleared.append(stage.name)
                finally:
                    os.close(lock)
    return tuple(cleared)


def seal(content: Path, files: Sequence[FileEntry]) -> tuple[PlacedFile, ...]:
    """Find the files under `content` to be the wanted ones, and make them read-only and durable.

    Compares names and sizes: the digests were compared when the files were copied.

    Raises:
        Refused: names or sizes differ.
    """
    there = {path.relative_to(content).as_posix(): path for path in content.rglob("*") if not path.is_dir()}
    found = {name: path.lstat().st_size for name, path in there.items()}
    wanted = {file.path: file.size for file in files}
    if found != wanted:
        differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        lines = [f"  {name}: {found.get(name, 'no')} bytes, wanted {wanted.get(name, 'no')}" for name in differing]
        raise Refused("\n".join(["the copied files are not those of the artifact; nothing was published", *lines]))
    for path in there.values():
        path.chmod(path.stat().st_mode & ~0o222)
        _sync(path)
    for inner in (path for path in content.rglob("*") if path.is_dir()):
        _sync(inner)
    _sync(content)
    return tuple(
        PlacedFile(path=f.path, size=f.size, digest=f.digest, mtime_ns=there[f.path].stat().st_mtime_ns)
        for f in sorted(files, key=lambda f: f.path)
    )


def place(content: Path, folder: Path, provenance: Provenance) -> Path | None:
    """Move the sealed folder `content` to the place of its version, durably; `None` if the number is taken."""
    _write_durably(content / PROVENANCE, json.dumps(provenance.to_json(), indent=2) + "\n")
    target = folder / str(provenance.version)
    try:
        # An empty folder of that name is replaced without a word: it holds nothing, and no publisher makes one.
        content.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return None
        raise
    _sync(folder)
    return target


def commit_config(folder: Path, config_text: str, *, replacing: str | None) -> bool:
    """Put `config_text` in the place of the model's config.pbtxt, at one instant. This commits a release.

    `replacing` is the text that was observed when the release was planned (`None`: there was no config). Returns
    whether anything had to change: doing it twice is nothing the second time.

    Raises:
        ConfigError: the text is wrong (see `check`), or lists a version that is not there.
        Refused: the config is not the observed one any more: somebody else published, released or edited.
        StoreUnusable: it cannot be written; the old config stays as it was.
    """
    if read_config(folder) == config_text:
        clear_leftovers(folder)
        return False
    there = [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal() and path.is_dir()]
    if problems := check(config_text, versions=there):
        raise ConfigError(*problems)
    with staging(folder) as stage:
        _write_durably(stage / CONFIG, config_text)
        with _exclusive(folder):
            current = read_config(folder)
            if current == config_text:
                return False
            if current != replacing:
                raise Refused(
                    f"{folder / CONFIG} has changed since this release was planned: "
                    "somebody else published, released or edited\nrun again, to plan with what is there now"
                )
            (stage / CONFIG).rename(folder / CONFIG)
            _sync(folder)
    return True


def read_config(folder: Path) -> str | None:
    """The text of the model's config.pbtxt to the byte (no newline is translated); `None` if there is none."""
    try:
        return (folder / CONFIG).read_bytes().decode("utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return None


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Between a writer's look at the config and its replacement, no other writer's comes."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _make_durably(folder: Path) -> None:
    if not folder.exists():
        _make_durably(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
