"""Damage: found, named with all that depends on it, put aside, and mended by the next build."""

import os
import shutil

import pytest

from tasks.artifacts import Digest
from tasks.errors import ArtifactCorrupt

WEIGHTS = b"weights " * 1000
FILES = {"model.bin": WEIGHTS, "config.json": b"{}\n"}


def writable(path):
    path.chmod(0o644)
    return path


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    writable(path).write_bytes(data)


def flip_a_byte_and_hide_it(path):
    before = path.stat()
    flip_a_byte(path)
    path.chmod(0o444)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut_it(path):
    os.truncate(writable(path), 100)


DAMAGE = {
    "a flipped byte": (flip_a_byte, "holds other bytes than were stored"),
    "a flipped byte with the old time": (flip_a_byte_and_hide_it, "holds other bytes than were stored"),
    "a cut": (cut_it, "has 100 bytes instead of 8000"),
    "a deletion": (lambda path: path.unlink(), "is missing"),
}
SEEN_BY_A_LOOKUP = [name for name in DAMAGE if name != "a flipped byte with the old time"]


@pytest.fixture
def chain(workshop):
    """train -> engine -> release and an alias; the same training under another pipeline's name; a bystander."""
    build = workshop.build
    train = build(workshop.key(1), FILES)
    engine = build(workshop.key(1, "engine", train=train.content), {"model.plan": b"plan"}, materials={"train": train})
    release = workshop.store.record(
        pipeline="digits", stage="release", content=engine.content, materials={"engine": engine}
    )
    workshop.store.alias("digits", "champion", engine)
    workshop.store.lookup(workshop.key(1), pipeline="mnist")
    build(workshop.key(2, "bystander"), {"other": b"other"})
    return {"train": train, "engine": engine, "release": release}


DEPENDENTS = ("digits/engine@1", "digits/release@1", "digits/train@1", "digits@champion", "mnist/train@1")


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_finds_damage_and_names_all_that_depends_on_it(workshop, chain, damage):
    assert workshop.store.verify() == ()
    do, problem = DAMAGE[damage]
    do(workshop.object(Digest.of(WEIGHTS)))
    (corrupt,) = workshop.store.verify()
    assert corrupt.what == f"object {Digest.of(WEIGHTS)}"
    assert corrupt.problem == problem
    assert corrupt.dependents == DEPENDENTS
    # Put aside, it is missing, and is said to be until it is built anew.
    (corrupt,) = workshop.store.verify()
    assert (corrupt.problem, corrupt.dependents) == ("is missing", DEPENDENTS)


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_verify_found_is_missed_by_a_lookup_and_mended_by_a_build(workshop, chain, damage, tmp_path):
    workshop.store.path(chain["train"])
    DAMAGE[damage][0](workshop.object(Digest.of(WEIGHTS)))
    workshop.store.verify()
    assert workshop.store.lookup(workshop.key(1), pipeline="digits") is None
    with pytest.raises(ArtifactCorrupt, match="needed by: digits/engine@1, digits/release@1"):
        workshop.store.path(chain["train"])
    assert workshop.build(workshop.key(1), FILES) == chain["train"]
    assert workshop.store.verify() == ()
    assert workshop.store.lookup(workshop.key(1), pipeline="digits") == chain["train"]
    assert workshop.read(workshop.store.path(chain["train"])) == FILES
    workshop.store.materialise(chain["train"], tmp_path / "out")
    assert workshop.read(tmp_path / "out") == FILES


@pytest.mark.parametrize("damage", SEEN_BY_A_LOOKUP)
def test_a_lookup_sees_damage_by_size_and_time_says_so_once_and_misses(workshop, chain, damage):
    DAMAGE[damage][0](workshop.object(Digest.of(WEIGHTS)))
    assert workshop.store.peek(workshop.key(1), pipeline="digits") is None
    assert workshop.open().lookup(workshop.key(1), pipeline="digits") is None
    (warning,) = workshop.warnings
    assert warning.startswith(f"train is built anew: object {Digest.of(WEIGHTS)} ")
    assert f"needed by {', '.join(DEPENDENTS)}" in warning
    assert workshop.build(workshop.key(1), FILES) == chain["train"]
    assert workshop.store.lookup(workshop.key(1), pipeline="digits") == chain["train"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_bytes_never_leave_the_store(workshop, chain, damage, tmp_path):
    DAMAGE[damage][0](workshop.object(Digest.of(WEIGHTS)))
    with pytest.raises(ArtifactCorrupt, match=rf"object {Digest.of(WEIGHTS)}") as error:
        workshop.store.materialise(chain["train"], tmp_path / "out")
    assert error.value.dependents == DEPENDENTS
    assert list(tmp_path.iterdir()) == []


def test_a_write_through_a_folder_to_read_is_noticed(workshop, chain):
    flip_a_byte(workshop.store.path(chain["train"]) / "model.bin")
    assert workshop.store.lookup(workshop.key(1), pipeline="digits") is None
    assert workshop.build(workshop.key(1), FILES) == chain["train"]
    assert workshop.read(workshop.store.path(chain["train"])) == FILES


def test_an_object_that_lost_only_its_time_is_hashed_once_and_sound(workshop, chain, tmp_path):
    elsewhere = shutil.copytree(workshop.root, tmp_path / "copy", copy_function=shutil.copyfile)
    workshop.root = elsewhere
    store = workshop.open()
    assert store.lookup(workshop.key(1), pipeline="digits") == chain["train"]
    sealed = workshop.object(Digest.of(WEIGHTS)).stat()
    assert sealed.st_mtime == 946_684_800
    assert store.verify() == ()
    assert workshop.read(store.path(chain["engine"])) == {"model.plan": b"plan"}


def test_a_rebuild_that_gives_other_bytes_than_were_lost_gets_a_new_name(workshop, chain):
    cut_it(workshop.object(Digest.of(WEIGHTS)))
    ref = workshop.build(workshop.key(1), {"model.bin": b"others", "config.json": b"{}\n"})
    assert str(ref) == "digits/train@2"
    assert workshop.store.lookup(workshop.key(1), pipeline="digits") == ref
    assert workshop.store.get_record(ref).details["replaces"]["differing_files"] == ["model.bin"]
    assert workshop.warnings[-1] == "train was built again and differs from what it was: model.bin"


def document(workshop, kind, digest):
    return workshop.root / kind / digest.hex[:2] / f"{digest.hex[2:]}.json"


@pytest.mark.parametrize("damage", ["a flipped byte", "a deletion"])
def test_a_damaged_content_list_is_found_and_mended(workshop, chain, damage):
    DAMAGE[damage][0](document(workshop, "contents", chain["train"].content))
    (corrupt,) = workshop.store.verify()
    assert corrupt.what == f"content list {chain['train'].content}"
    assert corrupt.dependents == DEPENDENTS
    for read in (workshop.store.path, workshop.store.content):
        with pytest.raises(ArtifactCorrupt, match="content list"):
            read(chain["train"])
    assert workshop.store.lookup(workshop.key(1), pipeline="digits") is None
    assert workshop.build(workshop.key(1), FILES) == chain["train"]
    assert workshop.store.verify() == ()


@pytest.mark.parametrize("damage", ["a flipped byte", "a deletion"])
def test_a_damaged_record_is_found_and_a_build_has_a_new_one(workshop, chain, damage):
    DAMAGE[damage][0](document(workshop, "records", chain["train"].record))
    (corrupt,) = workshop.store.verify()
    assert corrupt.what == f"build record {chain['train'].record}"
    assert corrupt.dependents == DEPENDENTS
    for read in (workshop.store.get_record, lambda ref: workshop.store.resolve(str(ref))):
        with pytest.raises(ArtifactCorrupt, match="needed by: digits/engine@1"):
            read(chain["train"])
    assert [str(ref) for ref, _ in workshop.store.list(stage="train")] == []
    assert workshop.store.lookup(workshop.key(1), pipeline="digits") is None
    ref = workshop.build(workshop.key(1), FILES)
    assert (ref.number, ref.content) == (2, chain["train"].content)


@pytest.mark.parametrize("kind", ["key pointer", "name", "alias"])
def test_a_damaged_pointer_is_found(workshop, chain, kind):
    key = workshop.key(1)
    path, what = {
        "key pointer": (document(workshop, "keys", key.digest), f"key pointer {key.digest}"),
        "name": (workshop.root / "names/digits/train/1.json", "name digits/train@1"),
        "alias": (workshop.root / "aliases/digits/champion.json", "alias digits@champion"),
    }[kind]
    path.chmod(0o644)
    path.write_text('{"format":1,"record":"sha256:00')
    (corrupt,) = workshop.store.verify()
    assert (corrupt.what, corrupt.problem) == (what, "cannot be read")
    if kind == "key pointer":
        assert workshop.store.lookup(key, pipeline="digits") is None
        assert workshop.build(key, FILES).content == chain["train"].content
        assert workshop.store.verify() == ()
    elif kind == "name":
        assert workshop.build(key, FILES).number == 2  # the first number stays taken
    else:
        with pytest.raises(ArtifactCorrupt, match="alias digits@champion cannot be read"):
            workshop.store.aliases("digits")
        workshop.store.alias("digits", "champion", chain["engine"])
        assert workshop.store.verify() == ()


def test_a_lost_log_makes_nothing_unusable(workshop):
    ref = workshop.build(
        workshop.key(1), FILES, log="a log long enough to have a byte to flip, and then some more " * 3
    )
    flip_a_byte(workshop.object(workshop.store.get_record(ref).byproducts["build.log"]))
    (corrupt,) = workshop.store.verify()
    assert corrupt.dependents == ()
    assert corrupt.problem.endswith("a byproduct of digits/train@1")
    assert workshop.store.verify() == ()
    assert workshop.store.lookup(workshop.key(1), pipeline="digits") == ref
    with pytest.raises(ArtifactCorrupt, match="is missing"):
        workshop.store.byproduct(ref, "build.log")


def test_verify_can_be_narrowed_and_tells_how_far_it_is(workshop, chain):
    cut_it(workshop.object(Digest.of(WEIGHTS)))
    progress = []
    assert workshop.store.verify([chain["engine"]], lambda done, total: progress.append((done, total))) == ()
    assert progress == [(4, 4)]
    (corrupt,) = workshop.store.verify([chain["train"], chain["engine"]])
    assert corrupt.what == f"object {Digest.of(WEIGHTS)}"
    progress.clear()
    workshop.store.verify(on_progress=lambda done, total: progress.append((done, total)))
    assert progress[-1][0] == progress[-1][1] > 0
    assert progress == sorted(progress)
