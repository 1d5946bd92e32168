"""The artifact store: find, claim, commit, name, read, check and clean up. docs/artifacts.md holds the format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

from tasks.artifacts.content import Content
from tasks.artifacts.digest import JSON, Digest
from tasks.artifacts.key import StageKey
from tasks.artifacts.record import ArtifactRef, BuildRecord


class ArtifactStore:
    """SIGNATURES FIRST: bodies are being filled in. Safe to share between threads and processes.

    Other types to come: claim.Claim, lineage.Lineage, verify.Corrupt, garbage.Garbage (see the end of this file).
    """

    root: Path
    warn: Callable[[str], None]
    """Told about what was mended on the way, such as a corrupt object that makes a lookup miss. Default: logging."""

    @classmethod
    def open(cls, root: Path, *, warn: Callable[[str], None] | None = None) -> ArtifactStore:
        """Opens the store at `root`, creating it if need be. StoreUnusable if unwritable, foreign, or another format."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of what this process pinned against gc. Also a context manager; also done at exit."""

    # -- find and build
    def lookup(self, key: StageKey, *, pipeline: str) -> ArtifactRef | None:
        """The artifact built for `key`, whole, named under `pipeline`, and pinned against gc until close; or None."""
        raise NotImplementedError

    def peek(self, key: StageKey, *, pipeline: str) -> ArtifactRef | None:
        """As `lookup`, but writes nothing at all: number is 0 when the pipeline has no name for it yet."""
        raise NotImplementedError

    def claim(
        self,
        key: StageKey,
        *,
        pipeline: str,
        rebuild: bool = False,
        reproducible: bool = True,
        on_wait: Callable[[str], None] | None = None,
    ) -> AbstractContextManager[Claim]:
        """The right to build `key`; waits for another builder (on_wait is told once by whom), takes a dead one's place."""
        raise NotImplementedError

    def record(
        self,
        *,
        pipeline: str,
        stage: str,
        content: Path | Digest,
        materials: Mapping[str, ArtifactRef] | None = None,
        environment: Mapping[str, JSON] | None = None,
        commands: Iterable[Sequence[str]] = (),
        metrics: Mapping[str, float] | None = None,
        details: Mapping[str, JSON] | None = None,
        byproducts: Mapping[str, Path] | None = None,
        started: str | None = None,
    ) -> ArtifactRef:
        """Stores a folder (or names a content that is stored) without a key: releases, reports."""
        raise NotImplementedError

    # -- read
    def path(self, what: ArtifactRef | Digest) -> Path:
        """A folder to READ the content from (hard links to the objects). ArtifactCorrupt (with dependents) if damaged."""
        raise NotImplementedError

    def materialise(self, what: ArtifactRef | Digest, destination: Path) -> None:
        """Copies (or reflinks) the content to `destination`, verifying each byte. Refused if it exists; never half."""
        raise NotImplementedError

    def content(self, what: ArtifactRef | Digest) -> Content:
        """The content list (paths, sizes, digests) of an artifact or a content digest."""
        raise NotImplementedError

    def byproduct(self, what: ArtifactRef | Digest, name: str) -> Path:
        """Where to read a byproduct (such as `build.log`) of a record. ConfigError if there is none of that name."""
        raise NotImplementedError

    def get_record(self, what: ArtifactRef | Digest) -> BuildRecord:
        """The build record of an artifact or of a record id."""
        raise NotImplementedError

    def latest(self, pipeline: str, stage: str) -> BuildRecord | None:
        """The record with the highest number (for "what changed since")."""
        raise NotImplementedError

    def resolve(self, text: str) -> ArtifactRef:
        """`p/stage@3`, `p/stage` (latest), `p@alias`, `sha256:…` (record or content; prefix of >= 8 digits). ConfigError."""
        raise NotImplementedError

    def list(self, pipeline: str | None = None, stage: str | None = None) -> tuple[tuple[ArtifactRef, BuildRecord], ...]:
        """Every named artifact, by pipeline, stage and number."""
        raise NotImplementedError

    # -- aliases
    def alias(self, pipeline: str, name: str, ref: ArtifactRef) -> None:
        """Points an alias (`champion`) at an artifact; one atomic write."""

    def unalias(self, pipeline: str, name: str) -> None:
        """Removes an alias. ConfigError if there is none."""

    def aliases(self, pipeline: str) -> dict[str, ArtifactRef]:
        """The pipeline's aliases by name."""
        raise NotImplementedError

    # -- look after
    def lineage(self, ref: ArtifactRef) -> Lineage:
        """What it was made of, up to the first materials, and what was made of it."""
        raise NotImplementedError

    def verify(
        self,
        refs: Iterable[ArtifactRef] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> tuple[Corrupt, ...]:
        """Re-hashes everything (or what `refs` consist of), quarantines what is corrupt. on_progress(bytes done, all)."""
        raise NotImplementedError

    def gc(self, *, dry_run: bool, keep: int = 1, abandoned_after: timedelta = timedelta(days=7)) -> Garbage:
        """Removes (or lists) what nothing needs; `abandoned_after`: age at which an unbuilt key's work folder goes."""
        raise NotImplementedError

    def data_digest(self, path: Path) -> Digest:
        """The digest of a data set's file or folder; re-reads only what changed (was: file_digest_cached)."""
        raise NotImplementedError


class Claim:
    built: ArtifactRef | None
    """Set: use it, there is nothing to build. None: build into `product`, then `commit`."""
    work: Path
    """Survives crashes and errors: checkpoints live here. Removed by the commit."""
    product: Path
    """work/product, empty when the claim begins."""
    log: Path
    """work/build.log; kept as a byproduct by the commit if it exists."""

    def commit(
        self,
        *,
        materials: Mapping[str, ArtifactRef] | None = None,
        environment: Mapping[str, JSON] | None = None,
        commands: Iterable[Sequence[str]] = (),
        metrics: Mapping[str, float] | None = None,
        details: Mapping[str, JSON] | None = None,
        byproducts: Mapping[str, Path] | None = None,
    ) -> ArtifactRef:
        raise NotImplementedError


class Lineage:
    ref: ArtifactRef
    record: BuildRecord
    materials: Mapping[str, Lineage]
    dependents: tuple[Lineage, ...]


class Corrupt:
    what: str
    """Such as `object sha256:…`."""
    problem: str
    dependents: tuple[str, ...]


class Garbage:
    names: tuple[str, ...]
    records: tuple[Digest, ...]
    objects: tuple[Digest, ...]
    works: tuple[Path, ...]
    bytes: int
