"""The claim: the right of one builder at a time to build a key, with a working folder that survives a crash."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tasks.artifacts.content import Content, differing_files
from tasks.artifacts.digest import JSON, canonical_json
from tasks.artifacts.durable import make_folder, remove_tree, replace, reported
from tasks.artifacts.find import Found, find, usable
from tasks.artifacts.intake import Intake, put_record
from tasks.artifacts.key import StageKey
from tasks.artifacts.lease import Contender, Lease
from tasks.artifacts.ledger import Lost, Pointer
from tasks.artifacts.record import ArtifactRef, BuildRecord, Material
from tasks.artifacts.vault import Vault
from tasks.errors import ConfigError, NotReproducible, Problem, Refused

WORK = "work"
"""The working folder's name inside a claim's."""
_FIRST_POLL_S, _LAST_POLL_S = 0.02, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a builder asks for."""

    key: StageKey
    pipeline: str
    rebuild: bool
    """Build although it was built, and compare."""
    reproducible: bool
    """Whether a rebuild must give equal bytes."""


class Claim:
    """What a builder holds. With `built` set there is nothing to do; otherwise: fill `product`, then `commit`."""

    def __init__(self, vault: Vault, request: Request, *, built: ArtifactRef | None, lease: Lease | None) -> None:
        self.key = request.key
        self.built = built
        """The artifact, when it was built before or by another while this one waited."""
        self._vault = vault
        self._request = request
        self._lease = lease
        self._started = vault.now()
        self._committed = False

    @property
    def work(self) -> Path:
        """The working folder: survives errors and crashes, for checkpoints; only a commit or gc removes it."""
        return self._held().folder / WORK

    @property
    def product(self) -> Path:
        """What the commit takes; empty when the claim begins."""
        return self.work / "product"

    @property
    def log(self) -> Path:
        """Where the build's log goes; the commit keeps it as a byproduct of the same name if it is there."""
        return self.work / "build.log"

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
        """Stores the product and how it came to be, and names it. Of several commits for a key the first one wins.

        Raises ConfigError for a product that can be no content or a metric that is no number, NotReproducible when a
        rebuild differs and must not, Refused when another builder took this one's place, StoreUnusable (disk full).
        After an error nothing was committed, and the working folder is as it was.
        """
        lease = self._held()
        if self._committed:
            raise RuntimeError("a claim is committed once")
        logs = ({self.log.name: self.log} if self.log.is_file() else {}) | dict(byproducts or {})
        check_metrics(metrics or {})
        with reported(self._vault.layout.root), Intake(self._vault) as intake:
            if not lease.held():
                raise Refused(
                    f"another builder took over {self.key.stage} ({self.key.digest.short}): this one seemed dead\n"
                    "run again: what the other one builds is used"
                )
            content = intake.take(self.product)
            taken = intake.take_byproducts(logs)
            before = usable(self._vault, self.key) if self._request.rebuild else self._lost()
            notes = self._compare(before, content)
            intake.keep(content)
            record = BuildRecord(
                pipeline=self._request.pipeline,
                stage=self.key.stage,
                key=self.key,
                content=content.digest,
                materials={name: Material.of(ref) for name, ref in (materials or {}).items()},
                environment=environment or {},
                commands=tuple(tuple(command) for command in commands),
                metrics=metrics or {},
                details={**(details or {}), **notes},
                byproducts=taken,
                started=self._started,
                finished=self._vault.now(),
                actor=self._vault.actor,
            )
            ref = self._publish(record)
            self._committed = True
            return ref

    def _publish(self, record: BuildRecord) -> ArtifactRef:
        vault, pointer = self._vault, Pointer(record.id, record.content)
        # When lost objects are here again with the same bytes, what was built first is whole again, and stays.
        if not self._request.rebuild and (first := find(vault, self.key, self._request.pipeline)) is not None:
            return first
        put_record(vault, record)
        if not vault.ledger.point_key(self.key.digest, pointer, move=self._request.rebuild):
            if (first := find(vault, self.key, self._request.pipeline)) is not None:
                return first
            vault.ledger.point_key(self.key.digest, pointer, move=True)
        return vault.names.give(self._request.pipeline, self.key.stage, pointer)

    def _lost(self) -> Found | None:
        """What the key points to though it cannot be used, as far as its content list says what it was."""
        ledger = self._vault.ledger
        try:
            pointer = ledger.keyed(self.key.digest)
            if pointer is None:
                return None
            return Found(pointer, ledger.record(pointer.record), ledger.content(pointer.content))
        except Lost:
            return None

    def _compare(self, before: Found | None, content: Content) -> dict[str, JSON]:
        """What a record says about a content that is not the one that the key had; nothing when it is the same."""
        if before is None or before.content.digest == content.digest:
            return {}
        differing = differing_files(before.content, content)
        text = f"{', '.join(differing[:10])}{', …' if len(differing) > 10 else ''}"
        if self._request.rebuild and self._request.reproducible:
            raise NotReproducible(
                f"{self.key.stage} promises equal bytes, and the rebuild gave others: "
                f"{content.digest} instead of {before.content.digest}\n"
                f"differing files: {text}\n"
                f"stored: {self._vault.objects.tree(before.content)}\nrebuilt: {self.product}",
            )
        self._vault.warn(f"{self.key.stage} was built again and differs from what it was: {text}")
        return {"replaces": {"record": str(before.pointer.record), "differing_files": list(differing)}}

    def _begin(self) -> None:
        folder = self._held().folder
        replace(folder / "key.json", canonical_json(self.key.to_json()), self._vault.scratch, durable=False)
        for material in self.key.materials.values():
            self._vault.pins.pin("content", material)
        remove_tree(self.product)
        make_folder(self.product)

    def _end(self) -> None:
        lease = self._held()
        if self._committed:
            clear(lease)
        else:
            lease.release()

    def _held(self) -> Lease:
        if self._lease is None:
            raise RuntimeError("what is built already has no working folder and is not committed")
        return self._lease


@contextmanager
def claim(vault: Vault, request: Request, on_wait: Callable[[str], None] | None) -> Iterator[Claim]:
    """The claim of a key, once no other builder has it; see `ArtifactStore.claim`."""
    with reported(vault.layout.root):
        outcome = _await(vault, request, on_wait)
    if isinstance(outcome, ArtifactRef):
        yield Claim(vault, request, built=outcome, lease=None)
        return
    held = Claim(vault, request, built=None, lease=outcome)
    try:
        with reported(vault.layout.root):
            held._begin()
        yield held
    finally:
        with reported(vault.layout.root):
            held._end()


def clear(lease: Lease) -> None:
    """Removes a key's working folder, while nobody else can use it, and then the lease."""
    if lease.held():
        remove_tree(lease.folder / WORK)
        (lease.folder / "key.json").unlink(missing_ok=True)
    lease.remove()


def _await(vault: Vault, request: Request, on_wait: Callable[[str], None] | None) -> ArtifactRef | Lease:
    if not request.rebuild and (ref := find(vault, request.key, request.pipeline)) is not None:
        return ref
    contender = Contender(vault.layout.claim(request.key.digest), vault.scratch)
    pause = _FIRST_POLL_S
    told = False
    while not isinstance(outcome := contender.attempt(), Lease):
        if on_wait is not None and not told:
            on_wait(str(outcome))
            told = True
        time.sleep(pause)
        pause = min(pause * 1.5, _LAST_POLL_S)
    # Asked again: it may have been built between the first question and the lease.
    try:
        if not request.rebuild and (ref := find(vault, request.key, request.pipeline)) is not None:
            clear(outcome)
            return ref
    except BaseException:
        outcome.release()
        raise
    return outcome


def check_metrics(metrics: Mapping[str, float]) -> None:
    problems = [
        Problem(f"the metric {name!r} is {value}, which is no number", hint="look at the data and at the metric")
        for name, value in metrics.items()
        if not math.isfinite(value)
    ]
    if problems:
        raise ConfigError(*problems)
