"""A lease: one holder at a time, by create-if-absent alone; a dead holder is told at once, a silent one in a minute.

A folder holds `lease.<epoch>.json`; who created the highest epoch holds it. Epochs only grow while the folder is
there, so that a holder who was believed dead finds out (`check`) before it changes anything. On the same machine a
holder is dead when its process is; one that cannot be seen (another machine, container or boot) must renew the
file's time, and is dead when it has not for EXPIRY_S seconds of the watcher's own clock.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tasks.artifacts.digest import canonical_json
from tasks.artifacts.durable import Scratch, create, make_folder, names_in, replace
from tasks.artifacts.owner import Owner

RENEWAL_S = 10.0
"""How often a holder renews its lease."""
EXPIRY_S = 60.0
"""A holder that cannot be seen, and whose lease does not change for so long while it is watched, is dead."""
WALL_EXPIRY_S = 600.0
"""The same by the file's time, for who does not stay to watch; longer, because the machines' clocks differ."""
LEASE_FORMAT = 1
_LEASE = re.compile(r"lease\.(\d+)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who has, or had, a lease."""

    epoch: int
    owner: Owner
    nonce: str
    """Random, so that two leases with the same epoch (before and after the folder was removed) are two."""
    since: str
    released: bool
    renewed_ns: int
    """The file's time of change, in nanoseconds since 1970 by the file system's clock."""

    def __str__(self) -> str:
        return f"{self.owner} since {self.since}"


class Contender:
    """Asks for the lease of one folder, as often as need be; remembers what it saw, to tell dead from slow."""

    def __init__(self, folder: Path, scratch: Scratch) -> None:
        self.folder = folder
        self._scratch = scratch
        self._seen: tuple[str, int] | None = None
        self._seen_at = 0.0

    def attempt(self) -> Lease | Holder:
        """The lease, or who has it."""
        while True:
            make_folder(self.folder)
            last = last_holder(self.folder)
            if last is not None and not self.gone(last):
                return last
            epoch = 1 if last is None else last.epoch + 1
            lease = Lease(self.folder, epoch, self._scratch)
            try:
                created = lease.create()
            except FileNotFoundError:
                continue  # whoever held it last removed the folder between the two steps
            if created and lease.held():
                lease.keep()
                return lease
            # Someone was quicker, or the folder was removed and made anew since it was read.
            if created:
                lease.withdraw()

    def gone(self, holder: Holder) -> bool:
        """Whether the holder has released the lease or is dead."""
        if holder.released:
            return True
        alive = holder.owner.alive()
        if alive is not None:
            return not alive
        if time.time() - holder.renewed_ns / 1e9 > WALL_EXPIRY_S:
            return True
        seen = (holder.nonce, holder.renewed_ns)
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at > EXPIRY_S


class Lease:
    """A held lease, renewed by a thread until it is released, removed, or the process ends."""

    def __init__(self, folder: Path, epoch: int, scratch: Scratch) -> None:
        self.folder = folder
        self.epoch = epoch
        self._nonce = secrets.token_hex(8)
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        self._scratch = scratch
        self._ended = threading.Event()

    @property
    def path(self) -> Path:
        """The lease's file."""
        return self.folder / f"lease.{self.epoch}.json"

    def create(self) -> bool:
        """Creates the file; False when the epoch is taken. Not synced: after a power cut its process is dead anyway."""
        return create(self.path, self._document(released=False), self._scratch, durable=False)

    def keep(self) -> None:
        """Removes the leases before this one, and renews it from now on."""
        for epoch, path in _leases(self.folder).items():
            if epoch < self.epoch:
                path.unlink(missing_ok=True)
        threading.Thread(target=self._renew, name=f"renew {self.path.name}", daemon=True).start()

    def held(self) -> bool:
        """Whether no one has taken it over."""
        holder = last_holder(self.folder)
        return holder is not None and holder.nonce == self._nonce

    def release(self) -> None:
        """Lets another one take it; the folder stays, and so does the epoch."""
        self._ended.set()
        if self.held():
            try:
                replace(self.path, self._document(released=True), self._scratch, durable=False)
            except OSError:
                self.withdraw()  # a full disk must not make the next one wait for a process that holds nothing
                raise

    def remove(self) -> None:
        """Removes the lease, and the folder if nothing else is in it."""
        self._ended.set()
        if self.held():
            self.withdraw()
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                pass  # the next one has taken, finished and removed it
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:  # the next one is here already
                    raise

    def withdraw(self) -> None:
        """Removes the file only."""
        self.path.unlink(missing_ok=True)

    def _document(self, *, released: bool) -> bytes:
        return canonical_json(
            {
                "format": LEASE_FORMAT,
                "nonce": self._nonce,
                "owner": Owner.current().to_json(),
                "since": self._since,
                "released": released,
            }
        )

    def _renew(self) -> None:
        while not self._ended.wait(RENEWAL_S):
            try:
                os.utime(self.path)
            except FileNotFoundError:
                return  # taken over: `held` says so to who asks


def last_holder(folder: Path) -> Holder | None:
    """Who has the folder's lease, or had it last; None when no one ever had."""
    while True:
        leases = _leases(folder)
        if not leases:
            return None
        epoch = max(leases)
        try:
            with leases[epoch].open("rb") as file:
                renewed_ns = os.fstat(file.fileno()).st_mtime_ns
                value = json.load(file)
        except FileNotFoundError:
            continue  # removed since it was listed
        except ValueError:
            # Appears whole or not at all, unless the power went before it reached the disk: its process went too.
            nobody = Owner(boot="", pid_namespace=0, pid=0, start=0)
            return Holder(epoch=epoch, owner=nobody, nonce="", since="", released=True, renewed_ns=renewed_ns)
        return Holder(
            epoch=epoch,
            owner=Owner.from_json(value["owner"]),
            nonce=value["nonce"],
            since=value["since"],
            released=value["released"],
            renewed_ns=renewed_ns,
        )


def _leases(folder: Path) -> dict[int, Path]:
    matches = (_LEASE.fullmatch(name) for name in names_in(folder))
    return {int(match[1]): folder / match[0] for match in matches if match}
