"""What the tests of the artifact store share: a store, keys that differ by one number, and small products."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tasks.artifacts import ArtifactRef, ArtifactStore, Digest, StageKey

Files = Mapping[str, bytes]
MODEL: Files = {"model.bin": b"weights " * 100, "meta/config.json": b"{}\n"}


class Workshop:
    """A store under test, and how to build small things in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.warnings: list[str] = []
        self.store = self.open()

    def open(self) -> ArtifactStore:
        return ArtifactStore.open(self.root, warn=self.warnings.append)

    @staticmethod
    def key(number: int = 0, stage: str = "train", **materials: Digest) -> StageKey:
        return StageKey(stage=stage, version=1, materials=materials, config={"number": number})

    @staticmethod
    def write(folder: Path, files: Files) -> Path:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder

    @staticmethod
    def read(folder: Path) -> dict[str, bytes]:
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    def build(
        self,
        key: StageKey,
        files: Files = MODEL,
        *,
        pipeline: str = "digits",
        rebuild: bool = False,
        reproducible: bool = True,
        materials: Mapping[str, ArtifactRef] | None = None,
        log: str | None = None,
    ) -> ArtifactRef:
        """Builds `key`, which must be built (or looked up when it is not a rebuild and exists)."""
        with self.store.claim(key, pipeline=pipeline, rebuild=rebuild, reproducible=reproducible) as claim:
            if claim.built is not None:
                return claim.built
            self.write(claim.product, files)
            if log is not None:
                claim.log.write_text(log)
            return claim.commit(materials=materials, metrics={"accuracy": 0.9}, commands=[["trainer", "--fast"]])

    def object(self, digest: Digest) -> Path:
        return self.root / "objects" / digest.hex[:2] / digest.hex[2:]

    def objects(self) -> list[Path]:
        return sorted(path for path in (self.root / "objects").rglob("*") if path.is_file())


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: nothing that is tested here needs a disk, and a sync costs nothing."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path / "memory"
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="enginehouse-test-") as folder:
        yield Path(folder)


@pytest.fixture
def workshop(in_memory: Path) -> Iterator[Workshop]:
    workshop = Workshop(in_memory / "store")
    yield workshop
    workshop.store.close()
