"""The digests of data sets outside the store: right after every change, and read once where nothing changed."""

import os
import shutil

import pytest

from tasks.artifacts import Digest, datadigest
from tasks.artifacts.content import scan
from tasks.artifacts.digest import hash_file
from tasks.errors import ConfigError


@pytest.fixture
def reads(monkeypatch):
    """The files that were hashed."""
    read = []

    def counted(path):
        read.append(path.name)
        return hash_file(path)

    monkeypatch.setattr(datadigest, "hash_file", counted)
    return read


@pytest.fixture
def settled(monkeypatch):
    """Files count as settled at once, so that the test need not wait."""
    monkeypatch.setattr(datadigest, "SETTLED_S", -1.0)


def test_a_files_digest_is_that_of_its_bytes_and_a_folders_that_of_its_content(workshop, tmp_path):
    workshop.write(tmp_path / "data", {"a.npy": b"a", "deep/b.npy": b"b"})
    assert workshop.store.data_digest(tmp_path / "data/a.npy") == Digest.of(b"a")
    assert workshop.store.data_digest(tmp_path / "data") == scan(tmp_path / "data").digest
    shutil.copytree(tmp_path / "data", tmp_path / "elsewhere")
    assert workshop.store.data_digest(tmp_path / "elsewhere") == scan(tmp_path / "data").digest


def test_what_did_not_change_is_read_once_also_by_another_process_store(workshop, tmp_path, reads, settled):
    folder = workshop.write(tmp_path / "data", {"a.npy": b"a", "b.npy": b"b"})
    first = workshop.store.data_digest(folder)
    assert workshop.open().data_digest(folder) == first
    assert sorted(reads) == ["a.npy", "b.npy"]
    (folder / "a.npy").write_bytes(b"c")
    assert workshop.store.data_digest(folder) == scan(folder).digest != first
    assert reads[2:] == ["a.npy"]


def test_a_change_that_hides_its_time_and_size_is_seen(workshop, tmp_path, settled):
    path = workshop.write(tmp_path / "data", {"a.npy": b"a"}) / "a.npy"
    workshop.store.data_digest(path)
    before = path.stat()
    path.write_bytes(b"b")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert workshop.store.data_digest(path) == Digest.of(b"b")


def test_a_file_that_changed_just_now_is_not_remembered(workshop, tmp_path, reads):
    path = workshop.write(tmp_path / "data", {"a.npy": b"a"}) / "a.npy"
    workshop.store.data_digest(path)
    workshop.store.data_digest(path)
    assert len(reads) == 2


def test_a_damaged_memory_is_found_out_again(workshop, tmp_path, settled):
    path = workshop.write(tmp_path / "data", {"a.npy": b"a"}) / "a.npy"
    workshop.store.data_digest(path)
    (remembered,) = (p for p in (workshop.root / "data-digests").rglob("*") if p.is_file())
    remembered.chmod(0o644)
    remembered.write_text("{")
    assert workshop.store.data_digest(path) == Digest.of(b"a")
    assert workshop.store.data_digest(path) == Digest.of(b"a")


def test_data_that_is_not_there_is_named(workshop, tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path}/missing: no such file or folder"):
        workshop.store.data_digest(tmp_path / "missing")
