"""A Triton model repository in a local folder: what lies there.

    <repository>/<model>/config.pbtxt               replaced whole; replacing it is what commits a release
    <repository>/<model>/<version>/                 renamed into place whole; never changed, its number never used again
    <repository>/<model>/<version>/provenance.json  ours; a version without it was made by somebody else
    <repository>/<model>/.staging-<pid>-<random>/   being written, or left behind by a writer that died

Everything else in a model's folder was made by somebody else and is left as it is. This module only looks;
`model_writing` writes, and `tasks.publish` plans.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tasks.artifacts.digest import hash_file
from tasks.config.names import check_name
from tasks.errors import ConfigError, Problem, Refused, StoreUnusable
from tasks.toolchain.config_pbtxt import is_ours, listed_versions
from tasks.toolchain.model_writing import (
    CONFIG,
    clear_leftovers,
    commit_config,
    is_leftover,
    is_staging,
    read_config,
)
from tasks.toolchain.provenance import PROVENANCE, Provenance

__all__ = [
    "CONFIG",
    "ModelFolder",
    "Provenance",
    "Published",
    "Repository",
    "clear_leftovers",
    "commit_config",
    "models_of",
    "observe",
]

_VERSION = re.compile(r"0|[1-9][0-9]*")  # Triton ignores `01` and `v1`


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A whole version, in its place."""

    model: str
    version: int
    folder: Path
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class Repository:
    """A local model repository; it need not exist yet."""

    path: Path

    def folder(self, model: str) -> Path:
        """Where the model lies or would lie.

        Raises:
            ConfigError: `model` is no plain name, so that it could lead out of the repository.
            Refused: the model's folder is a symbolic link.
        """
        try:
            check_name(model)
        except ValueError as error:
            raise ConfigError(Problem(str(error), field="model")) from error
        folder = self.path / model
        if folder.is_symlink():
            raise Refused(
                f"{folder} is a symbolic link, and what it points to may be anybody's\n"
                "replace it by a folder, or publish under another `model` name"
            )
        return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What was found of one model."""

    repository: Repository
    model: str
    folder: Path
    config: str | None = None
    """The text of config.pbtxt."""
    listed: tuple[int, ...] = ()
    """The versions that our config lists, ascending; empty for a config that is not ours."""
    versions: Mapping[int, Published] = field(default_factory=dict)
    """Those that we placed and that are whole."""
    damaged: Mapping[int, str] = field(default_factory=dict)
    """Those that we placed and whose files have changed since, and how."""
    pipelines: Mapping[int, str] = field(default_factory=dict)
    """Of the versions that enginehouse placed, whole or damaged, the pipeline that each is of."""
    foreign: Mapping[str, str] = field(default_factory=dict)
    """Names of what others put there, and how we know."""
    taken: frozenset[int] = frozenset()
    """Every number that something there, or our config, uses."""
    leftovers: tuple[str, ...] = ()
    """Staging folders of writers that died."""

    @property
    def there(self) -> frozenset[int]:
        """The numbers for which a version folder is there, whoever made it."""
        foreign = (int(name) for name in self.foreign if _VERSION.fullmatch(name))
        return frozenset([*self.versions, *self.damaged, *foreign])

    @property
    def champion(self) -> int | None:
        """The version that a request without a version reaches: the highest that is listed and there."""
        return max(self.there.intersection(self.listed), default=None)

    @property
    def owner(self) -> str | None:
        """The pipeline whose model this is: that of the champion, or else of the newest version; `None` without one."""
        listed = [version for version in self.pipelines if version in self.listed]
        newest = max(listed or self.pipelines, default=None)
        return None if newest is None else self.pipelines[newest]

    @property
    def made_by_hand(self) -> str | None:
        """Why this is a model that somebody else serves, so that it must be left as it is; `None` if it is not."""
        if self.config is not None and (CONFIG in self.foreign or not is_ours(self.config)):
            return f"its {CONFIG} was not written by enginehouse"
        others = [name for name in self.foreign if _VERSION.fullmatch(name)]
        if self.config is None and others:
            return f"version {others[0]} {self.foreign[others[0]]}"
        return None


@dataclass(frozen=True, slots=True)
class _Damaged:
    why: str
    pipeline: str


@dataclass(frozen=True, slots=True)
class _Foreign:
    why: str


def observe(repository: Repository, model: str) -> ModelFolder:
    """What lies there now. Reads only; a model or a repository that does not exist is an empty one.

    Raises:
        ConfigError, Refused: see `Repository.folder`.
        Refused: our own config.pbtxt was changed by hand so that it cannot be read.
        StoreUnusable: the file system does not let us read.
    """
    folder = repository.folder(model)
    with _reading():
        if not folder.exists():
            return ModelFolder(repository=repository, model=model, folder=folder)
        entries = sorted(folder.iterdir())
        config = read_config(folder)
        found = {entry.name: _read_version(model, entry) for entry in entries if _VERSION.fullmatch(entry.name)}
        leftovers = tuple(entry.name for entry in entries if is_leftover(entry))
    foreign = {name: version.why for name, version in found.items() if isinstance(version, _Foreign)}
    for entry in entries:
        if entry.name == CONFIG:
            if entry.is_symlink():
                foreign[CONFIG] = "is a symbolic link"
        elif entry.name not in found and not is_staging(entry.name):
            foreign[entry.name] = "is nothing that enginehouse made"
    taken = {int(name) for name in found}
    listed = _listed(folder, config, taken)
    return ModelFolder(
        repository=repository,
        model=model,
        folder=folder,
        config=config,
        listed=listed,
        versions={version.version: version for version in found.values() if isinstance(version, Published)},
        damaged={int(name): version.why for name, version in found.items() if isinstance(version, _Damaged)},
        pipelines={
            int(name): version.pipeline if isinstance(version, _Damaged) else version.provenance.pipeline
            for name, version in found.items()
            if not isinstance(version, _Foreign)
        },
        foreign=foreign,
        taken=frozenset(taken.union(listed)),
        leftovers=leftovers,
    )


def models_of(repository: Repository) -> tuple[str, ...]:
    """The names of the models that were released here: those with a config.pbtxt of ours. Sorted; cheap.

    Raises:
        StoreUnusable: the file system does not let us read.
    """
    with _reading():
        if not repository.path.exists():
            return ()
        folders = sorted(path for path in repository.path.iterdir() if path.is_dir() and not path.is_symlink())
        return tuple(folder.name for folder in folders if is_ours(read_config(folder) or ""))


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnusable(
            f"the model repository cannot be read: {error.strerror}: {error.filename}\n"
            "make it readable, or name another `publish.repository`"
        ) from error


def _listed(folder: Path, config: str | None, taken: set[int]) -> tuple[int, ...]:
    if config is None or not is_ours(config):
        return ()
    try:
        listed = listed_versions(config)
    except ConfigError as error:
        where = ConfigError(*(replace(problem, file=folder / CONFIG) for problem in error.problems))
        raise Refused(f"{where}\nit has been changed by hand: mend it, or remove it and publish again") from error
    if listed is None:  # then Triton serves the latest one
        return tuple(sorted(taken)[-1:])
    return listed


def _read_version(model: str, folder: Path) -> Published | _Damaged | _Foreign:
    if folder.is_symlink() or not folder.is_dir():
        return _Foreign("is no folder")
    provenance = _read_provenance(folder)
    if isinstance(provenance, _Foreign):
        return provenance
    if (provenance.model, str(provenance.version)) != (model, folder.name):
        return _Foreign(f"has the {PROVENANCE} of {provenance.model} {provenance.version}")
    if why := _damage(folder, provenance):
        return _Damaged(why, provenance.pipeline)
    return Published(model=model, version=provenance.version, folder=folder, provenance=provenance)


def _read_provenance(folder: Path) -> Provenance | _Foreign:
    try:
        return Provenance.from_json(json.loads((folder / PROVENANCE).read_bytes()))
    except FileNotFoundError:
        return _Foreign(f"has no {PROVENANCE}")
    except KeyError as error:
        return _Foreign(f"has a {PROVENANCE} without {error}")
    except (ValueError, TypeError) as error:
        return _Foreign(f"has a {PROVENANCE} that cannot be read: {error}")


def _damage(folder: Path, provenance: Provenance) -> str | None:
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()} - {PROVENANCE}
    if differing := there ^ {file.path for file in provenance.files}:
        return f"has had files added or removed: {', '.join(sorted(differing))}"
    for file in provenance.files:
        path = folder / file.path
        stat = path.lstat()
        # A copy of a whole repository has other times and is still right; only then are bytes read.
        same_time = stat.st_mtime_ns == file.mtime_ns
        if stat.st_size != file.size or not (same_time or hash_file(path) == file.digest):
            return f"has another {file.path} than was placed"
    return None
