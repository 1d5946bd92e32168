"""The artifact store: find, claim, commit, name, read, check and clean up. docs/artifacts.md holds the format.

Everything here may be called from several threads and processes at once, on one machine or on several that share
the store's folder. What this process was handed (looked up, built, resolved) gc leaves alone until `close`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from tasks.artifacts import claim as claims
from tasks.artifacts import datadigest, find, garbage, lineage, resolve, verify
from tasks.artifacts.claim import Claim, Request, check_metrics
from tasks.artifacts.content import Content
from tasks.artifacts.digest import JSON, Digest
from tasks.artifacts.durable import make_folder, remove_tree, reported
from tasks.artifacts.graph import Graph, corruption
from tasks.artifacts.intake import Intake, put_record
from tasks.artifacts.key import StageKey
from tasks.artifacts.ledger import Lost, Pointer
from tasks.artifacts.record import ArtifactRef, BuildRecord, Material
from tasks.artifacts.vault import Vault
from tasks.errors import ConfigError, Problem, Refused, StoreUnusable


class ArtifactStore:
    """An open store. Raises StoreUnusable, with the path and the mend, when its folder cannot be used."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self.root = vault.layout.root

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        warn: Callable[[str], None] | None = None,
        actor: str | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> Self:
        """Opens the store at `root`, or creates it there.

        `warn` is told, once each, what was found on the way, such as a damaged object that is built anew (default:
        logging). `actor` (default: user@host) and `clock` (default: UTC now) go into records.
        Raises StoreUnusable for a folder that cannot be written, that holds something else, or another format.
        """
        root = root.absolute()
        with reported(root):
            try:
                return cls(Vault.open(root, warn=warn, actor=actor, clock=clock))
            except FileNotFoundError as error:  # what /proc and its like say to every new name
                raise StoreUnusable(
                    f"the artifact store {root} cannot be made: {error.strerror} ({error.filename})\n"
                    "place the store on a file system that takes new files"
                ) from error

    def close(self) -> None:
        """Lets go of what gc had to leave alone for this store; happens by itself when the process ends."""
        self._vault.pins.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def lookup(self, key: StageKey, *, pipeline: str) -> ArtifactRef | None:
        """The artifact that was built for `key`, all of it there, named under `pipeline`; None when it must be built.

        Damage is told to `warn`, put aside, and makes the answer None: the next build mends it.
        """
        with reported(self.root):
            return find.find(self._vault, key, pipeline)

    def peek(self, key: StageKey, *, pipeline: str) -> ArtifactRef | None:
        """As `lookup`, but names and pins nothing: the number is 0 where the pipeline has no name for it yet."""
        with reported(self.root):
            return find.peek(self._vault, key, pipeline)

    def work_folder(self, key: StageKey) -> Path:
        """Where a builder of `key` works or would work; for plans, which show the command lines."""
        return self._vault.layout.claim(key.digest) / claims.WORK

    @contextmanager
    def claim(
        self,
        key: StageKey,
        *,
        pipeline: str,
        rebuild: bool = False,
        reproducible: bool = True,
        on_wait: Callable[[str], None] | None = None,
    ) -> Iterator[Claim]:
        """The right to build `key`, or what was built for it.

        Waits while another process (or thread) builds the key; `on_wait` is told once who. A dead builder's place is
        taken at once, with its working folder. With `rebuild` it is built although it was built, and compared:
        see `Claim.commit`. An error inside the block gives the claim back and keeps the working folder.
        """
        request = Request(key=key, pipeline=pipeline, rebuild=rebuild, reproducible=reproducible)
        with claims.claim(self._vault, request, on_wait) as claim:
            yield claim

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
        """Stores a folder, or takes a content that is stored, and records and names it without a key.

        For what is no keyed build, such as a release (`RELEASE_STAGE`, which gc keeps). Raises as `Claim.commit`.
        """
        check_metrics(metrics or {})
        vault = self._vault
        began = vault.now()
        with reported(self.root), Intake(vault) as intake:
            files = intake.take(content) if isinstance(content, Path) else find.whole(vault, content)
            taken = intake.take_byproducts(byproducts or {})
            intake.keep(files)
            record = BuildRecord(
                pipeline=pipeline,
                stage=stage,
                key=None,
                content=files.digest,
                materials={name: Material.of(ref) for name, ref in (materials or {}).items()},
                environment=environment or {},
                commands=tuple(tuple(command) for command in commands),
                metrics=metrics or {},
                details=details or {},
                byproducts=taken,
                started=started or began,
                finished=vault.now(),
                actor=vault.actor,
            )
            put_record(vault, record)
            return vault.names.give(pipeline, stage, Pointer(record.id, files.digest))

    def path(self, what: ArtifactRef | Digest) -> Path:
        """A folder to *read* the content of an artifact (or with a content digest) from.

        It is the store's own, of hard links: never write there, and copy out with `materialise` what leaves the store.
        Raises ArtifactCorrupt with all that depends on it when something is damaged or missing.
        """
        with reported(self.root):
            return self._vault.objects.tree(find.whole(self._vault, _content_digest(what)))

    def content(self, what: ArtifactRef | Digest) -> Content:
        """The content list of an artifact (or with a content digest). Raises ArtifactCorrupt when it is lost."""
        with reported(self.root), self._lost_is_corrupt():
            return self._vault.ledger.content(_content_digest(what))

    def materialise(self, what: ArtifactRef | Digest, destination: Path) -> None:
        """Copies a content to the new folder `destination` (as reflinks where the file system can), and syncs it.

        Every byte is verified. Raises Refused when `destination` exists, ArtifactCorrupt with all that depends on it
        for damage; then nothing is there. Killed on the way, it leaves `.<name>.<random>.partial` beside it.
        """
        destination = destination.absolute()
        with reported(self.root):
            content = find.whole(self._vault, _content_digest(what))
        partial = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.partial")
        with reported(destination, "the folder"):
            if destination.exists() or destination.is_symlink():
                raise Refused(
                    f"{destination} exists already, and is not overwritten\nremove it, or name another folder"
                )
            make_folder(partial)
            try:
                if faults := self._vault.objects.copy_out(content, partial):
                    raise corruption(self._vault, faults)
                partial.rename(destination)
            except BaseException:
                remove_tree(partial)
                raise

    def byproduct(self, what: ArtifactRef | Digest, name: str) -> Path:
        """Where to read a byproduct, such as `build.log`, of an artifact (or of a record by its id).

        Raises ConfigError when there is none of that name, ArtifactCorrupt when its bytes are lost.
        """
        record = self.get_record(what)
        if name not in record.byproducts:
            there = ", ".join(sorted(record.byproducts)) or "none"
            raise ConfigError(Problem(f"{what} has no byproduct {name!r}", hint=f"there is: {there}"))
        digest = record.byproducts[name]
        with reported(self.root):
            self._vault.pins.pin("record", record.id)
            if (fault := self._vault.objects.fault(digest)) is not None:
                raise corruption(self._vault, [fault])
            return self._vault.layout.object(digest)

    def get_record(self, what: ArtifactRef | Digest) -> BuildRecord:
        """The build record of an artifact (or with a record id). Raises ArtifactCorrupt when it is lost."""
        with reported(self.root), self._lost_is_corrupt():
            return self._vault.ledger.record(what.record if isinstance(what, ArtifactRef) else what)

    def latest(self, pipeline: str, stage: str) -> BuildRecord | None:
        """The record with the highest number, None when there is none: to say what changed since.

        A record that is lost is told to `warn` and passed over: it must not keep a run from building it anew.
        """
        with reported(self.root):
            for number in reversed(self._vault.names.numbers(pipeline, stage)):
                try:
                    name = self._vault.names.read(pipeline, stage, number)
                    if name is not None and name.retired is None:
                        return self._vault.ledger.record(name.ref.record)
                except Lost as lost:
                    self._vault.warn(f"{lost.fault}; enginehouse artifacts verify says what needs it")
        return None

    def resolve(self, text: str) -> ArtifactRef:
        """The artifact that a person names.

        `digits/engine@3`, `digits/engine` (the last one), `digits@champion`, or `sha256:…` (a record's or a content's
        digest, or its first 8 digits or more). Raises ConfigError with the nearest name when there is none.
        """
        with reported(self.root):
            return resolve.resolve(self._vault, text)

    def list(
        self, pipeline: str | None = None, stage: str | None = None
    ) -> tuple[tuple[ArtifactRef, BuildRecord], ...]:
        """Every named artifact by pipeline, stage and number. What is lost is told to `warn` and left out."""
        vault = self._vault
        with reported(self.root):
            names, faults = vault.names.all(pipeline, stage)
            found = []
            for name in names:
                if name.retired is None:
                    try:
                        found.append((name.ref, vault.ledger.record(name.ref.record)))
                    except Lost as lost:
                        faults.append(lost.fault)
            for fault in faults:
                vault.warn(f"{fault}; enginehouse artifacts verify says what needs it")
            return tuple(found)

    def alias(self, pipeline: str, name: str, ref: ArtifactRef) -> None:
        """Points an alias such as `champion` at an artifact, in one write, from now on or anew."""
        with reported(self.root), self._lost_is_corrupt():
            self._vault.pins.pin("record", ref.record)
            self._vault.ledger.record(ref.record)
            self._vault.names.point_alias(pipeline, name, ref)

    def unalias(self, pipeline: str, name: str) -> None:
        """Removes an alias. Raises ConfigError when there is none."""
        with reported(self.root):
            if not self._vault.names.drop_alias(pipeline, name):
                known = ", ".join(sorted(self.aliases(pipeline))) or "none"
                raise ConfigError(Problem(f"there is no alias {pipeline}@{name}", hint=f"there is: {known}"))

    def aliases(self, pipeline: str) -> dict[str, ArtifactRef]:
        """A pipeline's aliases by name, such as `champion`. Raises ArtifactCorrupt for one that cannot be read."""
        with reported(self.root):
            found, faults = self._vault.names.all_aliases(pipeline)
            if faults:
                raise corruption(self._vault, faults)
            return {name.removeprefix(f"{pipeline}@"): ref for name, ref in found.items()}

    def retire(self, name: str) -> None:
        """Gives up a name such as `digits/release@1`, also of something lost: what only it kept goes with the next gc.

        Its number stays taken. Raises Refused while an alias points at it, ConfigError when there is no such name.
        """
        with reported(self.root), self._lost_is_corrupt():
            ref = resolve.numbered(self._vault, name)
            aliases, _ = self._vault.names.all_aliases()
            pointing = [alias for alias, target in aliases.items() if target == ref]
            if pointing:
                raise Refused(f"{', '.join(pointing)} points at {ref}\nmove or remove the alias first")
            self._vault.names.retire(ref, self._vault.now())

    def lineage(self, ref: ArtifactRef) -> lineage.Lineage:
        """What an artifact was made of, up to the first materials, and what was made of it."""
        with reported(self.root):
            return lineage.lineage(Graph.read(self._vault), ref)

    def verify(
        self, refs: Iterable[ArtifactRef] | None = None, on_progress: verify.Progress | None = None
    ) -> tuple[verify.Corrupt, ...]:
        """Hashes every stored byte again, or those of `refs`; the answer names all damage and who needs it.

        What is damaged is put aside, so that it is missed by a lookup and built anew by the next run. `on_progress` is
        told the bytes read so far and the bytes to read.
        """
        with reported(self.root):
            return verify.verify(self._vault, refs, on_progress)

    def gc(self, *, dry_run: bool, keep: int = 1, abandoned_after: timedelta = timedelta(days=7)) -> garbage.Garbage:
        """Removes what nothing needs, or with `dry_run` only says what that is.

        Kept, each with all that it was made of: what aliases and releases name, the `keep` last of each pipeline's
        stage, what running processes use, what live claims are about. The working folder of a build that never ended
        (its checkpoints) is kept until nobody has worked on it for `abandoned_after`.
        """
        with reported(self.root):
            return garbage.collect(self._vault, dry_run=dry_run, keep=keep, abandoned_after=abandoned_after)

    def data_digest(self, path: Path) -> Digest:
        """The digest of a data set outside the store: a file's, or a folder's content digest; read once per change."""
        with reported(self.root):
            return datadigest.data_digest(self._vault, path)

    @contextmanager
    def _lost_is_corrupt(self) -> Iterator[None]:
        try:
            yield
        except Lost as lost:
            raise corruption(self._vault, [lost.fault]) from None


def _content_digest(what: ArtifactRef | Digest) -> Digest:
    return what.content if isinstance(what, ArtifactRef) else what
