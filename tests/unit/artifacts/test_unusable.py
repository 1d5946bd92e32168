"""A store that cannot be used: one clear error with the path and the mend, and nothing half written."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.artifacts import ArtifactStore
from tasks.errors import StoreUnusable

# Fills a store until it is refused, and shows that what was there is whole. Run in a child, with limits of its own.
FILL = """
import resource
import sys
from pathlib import Path
from tasks.artifacts import ArtifactStore, StageKey
from tasks.errors import StoreUnusable

root, limit = Path(sys.argv[1]), int(sys.argv[2])
store = ArtifactStore.open(root)
key = lambda number: StageKey(stage="train", version=1, config={"number": number})

def build(number, size):
    with store.claim(key(number), pipeline="digits") as claim:
        for part in range(4):
            (claim.product / f"{part}").write_bytes(b"%d" % (number * 10 + part) * (size // 2))
        allow(limit)
        return claim.commit()

def allow(size):
    if size:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

small = build(1, 1000)
allow(resource.RLIM_INFINITY)
try:
    build(2, 150_000)
except StoreUnusable as error:
    print("StoreUnusable", error)
allow(resource.RLIM_INFINITY)
assert list((root / "tmp").iterdir()) == [], list((root / "tmp").iterdir())
assert store.verify() == ()
assert len([p for p in (root / "objects").rglob("*") if p.is_file()]) == 4
assert store.lookup(key(2), pipeline="digits") is None
assert store.lookup(key(1), pipeline="digits") == small
"""


@pytest.mark.parametrize("where", ["here/store", "here/deeper/store", "store"])
def test_a_store_is_made_with_the_folders_that_lead_to_it(tmp_path, where):
    with ArtifactStore.open(tmp_path / where) as store:
        assert store.list() == ()
    with ArtifactStore.open(tmp_path / where) as store:
        assert store.verify() == ()


def test_a_relative_root_stays_what_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = ArtifactStore.open(Path("store"))
    monkeypatch.chdir("/")
    assert store.root == tmp_path / "store"
    assert store.verify() == ()


@pytest.mark.parametrize("where", ["file", "file/store", "file/deeper/store"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, where):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreUnusable, match=rf"(?s){tmp_path}/file.*a file lies where a folder is expected"):
        ArtifactStore.open(tmp_path / where)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_system_that_takes_no_files_is_named():
    with pytest.raises(StoreUnusable, match=r"(?s)/proc/enginehouse.*takes new files"):
        ArtifactStore.open(Path("/proc/enginehouse/store"))


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreUnusable, match=r"(?s)is no artifact store.*notes.txt.*a folder of its own"):
        ArtifactStore.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format":2,"kind":"enginehouse artifact store"}', "has format 2, and this enginehouse reads 1"),
        ('{"format":"1","kind":"enginehouse artifact store"}', "has format 1, and this enginehouse reads 1"),
        ('{"format":1,"kind":"other"}', "is not what an artifact store begins with"),
        ("", "is not what an artifact store begins with"),
        ("[]", "is not what an artifact store begins with"),
    ],
)
def test_another_format_is_refused_and_left_alone(workshop, text, message):
    marker = workshop.root / "store.json"
    marker.chmod(0o644)
    marker.write_text(text)
    with pytest.raises(StoreUnusable, match=message):
        workshop.open()
    assert marker.read_text() == text


@pytest.mark.parametrize("kind", ["contents", "records"])
def test_a_document_of_a_newer_format_is_refused_not_taken_for_damage(workshop, kind):
    """As if a newer version had written into the same store."""
    ref = workshop.build(workshop.key())
    digest = ref.content if kind == "contents" else ref.record
    path = workshop.root / kind / digest.hex[:2] / f"{digest.hex[2:]}.json"
    data = (
        path.read_bytes().replace(b'"format":1,"key"', b'"format":2,"key"').replace(b'}],"format":1', b'}],"format":2')
    )
    digits = hashlib.sha256(data).hexdigest()
    (path.parent.parent / digits[:2]).mkdir(exist_ok=True)
    (path.parent.parent / digits[:2] / f"{digits[2:]}.json").write_bytes(data)
    pointer = workshop.root / "keys" / workshop.key().digest.hex[:2] / f"{workshop.key().digest.hex[2:]}.json"
    text = pointer.read_text().replace(digest.hex, digits)
    pointer.chmod(0o644)
    pointer.write_text(text)
    with pytest.raises(StoreUnusable, match=r"has format 2.*reads 1\ninstall the version"):
        workshop.store.lookup(workshop.key(), pipeline="digits")


def fill(root, limit=0, wrap=()):
    return subprocess.run(
        [*wrap, sys.executable, "-c", FILL, str(root), str(limit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_write_that_fails_half_way_leaves_nothing_half(tmp_path):
    """A limit on the size of files stands in for a full disk: a write fails in the middle of a file."""
    done = fill(tmp_path / "store", limit=50_000)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout


def test_a_full_disk_leaves_nothing_half_and_says_how_to_free_some(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    wrap = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=1m none {disk} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    done = fill(disk / "store", wrap=wrap)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"StoreUnusable the artifact store {disk}/store cannot be used: No space left on device"
    )
    assert "enginehouse artifacts gc --dry-run" in done.stdout


def test_a_read_only_file_system_is_named(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    wrap = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o ro none {disk} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a read-only file system")
    program = (
        "import sys; from pathlib import Path; from tasks.artifacts import *; ArtifactStore.open(Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [*wrap, sys.executable, "-c", program, str(disk / "store")], capture_output=True, text=True, check=False
    )
    assert "Read-only file system" in done.stderr
    assert "mount it for writing, or place the store elsewhere" in done.stderr


def test_a_folder_that_this_user_may_not_write_is_named(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    program = (
        "import os, sys; from pathlib import Path; from tasks.artifacts import *\n"
        "os.geteuid() == 0 and os.setuid(65534)\n"
        "ArtifactStore.open(Path(sys.argv[1]))"
    )
    if os.geteuid() != 0:
        folder.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder / "store")], capture_output=True, text=True, check=False
    )
    assert "StoreUnusable" in done.stderr
    assert "give this user the right to write there, or place the store elsewhere" in done.stderr
