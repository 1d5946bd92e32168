"""The store's everyday life: build, find, name, read, and where it came from."""

import stat

import pytest

from tasks.artifacts import RELEASE_STAGE, Digest
from tasks.artifacts.content import scan
from tasks.errors import ArtifactCorrupt, ConfigError, Refused

MODEL = {"model.bin": b"weights " * 100, "meta/config.json": b"{}\n"}


def test_what_was_built_is_found_and_read(workshop):
    key = workshop.key()
    assert workshop.store.lookup(key, pipeline="digits") is None
    ref = workshop.build(key, MODEL)
    assert str(ref) == "digits/train@1"
    assert workshop.store.lookup(key, pipeline="digits") == ref
    assert workshop.open().lookup(key, pipeline="digits") == ref
    assert workshop.read(workshop.store.path(ref)) == MODEL
    assert workshop.store.content(ref) == scan(workshop.store.path(ref))


def test_the_record_says_how_it_came_to_be(workshop):
    base = workshop.build(workshop.key(0))
    key = workshop.key(1, "export", train=base.content)
    with workshop.store.claim(key, pipeline="digits") as claim:
        workshop.write(claim.product, {"model.onnx": b"graph"})
        claim.log.write_text("line\n")
        extra = workshop.write(claim.work, {"profile.txt": b"profile"}) / "profile.txt"
        ref = claim.commit(
            materials={"train": base},
            environment={"torch": "2.9.0", "gpus": ["none"]},
            commands=[["python", "-m", "exporter"]],
            metrics={"difference": 1e-7},
            details={"opset": 18},
            byproducts={"profile.txt": extra},
        )
    record = workshop.store.get_record(ref)
    assert record.key == key
    assert record.content == ref.content
    assert (record.pipeline, record.stage) == ("digits", "export")
    assert (record.materials["train"].content, record.materials["train"].record) == (base.content, base.record)
    assert record.environment == {"torch": "2.9.0", "gpus": ["none"]}
    assert record.commands == (("python", "-m", "exporter"),)
    assert (record.metrics, record.details) == ({"difference": 1e-7}, {"opset": 18})
    assert record.started < record.finished
    assert "@" in record.actor
    assert workshop.store.byproduct(ref, "build.log").read_text() == "line\n"
    assert workshop.store.byproduct(ref, "profile.txt").read_bytes() == b"profile"
    with pytest.raises(ConfigError, match=r"no byproduct 'x'.*there is: build.log, profile.txt"):
        workshop.store.byproduct(ref, "x")
    assert "build.log" not in workshop.read(workshop.store.path(ref))


def test_equal_bytes_are_stored_once(workshop):
    shared = b"the same " * 1000
    one = workshop.build(workshop.key(1), {"a.bin": shared, "deep/b.bin": shared, "one": b"1"})
    two = workshop.build(workshop.key(2), {"c.bin": shared, "two": b"2"})
    assert len(workshop.objects()) == 3
    inodes = {(workshop.store.path(ref) / name).stat().st_ino for ref, name in [(one, "a.bin"), (two, "c.bin")]}
    assert inodes == {workshop.object(Digest.of(shared)).stat().st_ino}


def test_equal_products_of_different_keys_have_one_content(workshop):
    one, two = workshop.build(workshop.key(1)), workshop.build(workshop.key(2))
    assert one.content == two.content
    assert one.record != two.record
    assert (one.number, two.number) == (1, 2)


def test_objects_are_read_only_and_the_work_folder_is_gone(workshop):
    workshop.build(workshop.key())
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o444 for path in workshop.objects())
    assert [path for path in (workshop.root / "claims").rglob("*") if path.is_file()] == []
    assert list((workshop.root / "tmp").iterdir()) == []


def test_another_pipeline_finds_it_under_a_name_of_its_own(workshop):
    workshop.build(workshop.key(1))
    ref = workshop.build(workshop.key(2))
    other = workshop.store.lookup(workshop.key(2), pipeline="mnist")
    assert (str(ref), str(other)) == ("digits/train@2", "mnist/train@1")
    assert other.record == ref.record
    assert workshop.store.lookup(workshop.key(2), pipeline="mnist") == other
    assert workshop.store.get_record(other).pipeline == "digits"


def test_a_name_without_its_index_is_found_all_the_same(workshop):
    refs = [workshop.build(workshop.key(n)) for n in range(3)]
    index = workshop.root / "names/digits/train/by-record"
    for number, path in enumerate(sorted(index.iterdir())):
        path.unlink() if number else path.chmod(0o644)
    next(index.iterdir()).write_text("")
    assert [workshop.store.lookup(workshop.key(n), pipeline="digits") for n in range(3)] == refs


def test_a_peek_leaves_no_trace(workshop):
    workshop.build(workshop.key())
    workshop.store.close()
    before = sorted(workshop.root.rglob("*"))
    peeked = workshop.store.peek(workshop.key(), pipeline="mnist")
    assert (peeked.pipeline, peeked.number) == ("mnist", 0)
    assert workshop.store.peek(workshop.key(), pipeline="digits").number == 1
    assert workshop.store.peek(workshop.key(9), pipeline="digits") is None
    assert sorted(workshop.root.rglob("*")) == before


def test_an_artifact_without_a_key_is_recorded_and_named(workshop, tmp_path):
    engine = workshop.build(workshop.key(1, "engine"))
    folder = workshop.write(tmp_path / "release", {"config.pbtxt": b"name: 'digits'"})
    release = workshop.store.record(
        pipeline="digits", stage=RELEASE_STAGE, content=folder, materials={"engine": engine}, details={"version": 1}
    )
    again = workshop.store.record(pipeline="digits", stage=RELEASE_STAGE, content=engine.content)
    assert (str(release), str(again)) == ("digits/release@1", "digits/release@2")
    assert again.content == engine.content
    assert workshop.store.get_record(release).key is None
    assert workshop.read(workshop.store.path(release)) == {"config.pbtxt": b"name: 'digits'"}
    with pytest.raises(ArtifactCorrupt, match=r"content list sha256:.* is missing"):
        workshop.store.record(pipeline="digits", stage="x", content=Digest.of(b"nothing"))


def test_latest_is_the_highest_number(workshop):
    assert workshop.store.latest("digits", "train") is None
    for number in range(11):
        ref = workshop.build(workshop.key(number))
    assert ref.number == 11
    assert workshop.store.latest("digits", "train").id == ref.record


def test_the_list_is_in_order_and_can_be_narrowed(workshop):
    for number in range(10):
        workshop.build(workshop.key(number))
    engine = workshop.build(workshop.key(1, "engine"))
    workshop.build(workshop.key(1), pipeline="mnist")
    names = [str(ref) for ref, _ in workshop.store.list()]
    assert names == ["digits/engine@1", *(f"digits/train@{n}" for n in range(1, 11)), "mnist/train@1"]
    assert [str(ref) for ref, _ in workshop.store.list("mnist")] == ["mnist/train@1"]
    assert workshop.store.list("digits", "engine") == ((engine, workshop.store.get_record(engine)),)


def test_an_alias_can_be_moved_and_removed(workshop):
    one, two = workshop.build(workshop.key(1)), workshop.build(workshop.key(2))
    workshop.store.alias("digits", "champion", one)
    workshop.store.alias("digits", "previous", one)
    workshop.store.alias("digits", "champion", two)
    assert workshop.store.aliases("digits") == {"champion": two, "previous": one}
    assert workshop.store.resolve("digits@champion") == two
    workshop.store.unalias("digits", "previous")
    assert workshop.store.aliases("digits") == {"champion": two}
    with pytest.raises(ConfigError, match=r"no alias digits@previous.*there is: champion"):
        workshop.store.unalias("digits", "previous")


@pytest.fixture
def named(workshop):
    refs = [workshop.build(workshop.key(number), {"file": b"%d" % number}) for number in (1, 2)]
    workshop.store.alias("digits", "champion", refs[0])
    return refs


def test_every_way_to_name_an_artifact_resolves(workshop, named):
    one, two = named
    resolve = workshop.store.resolve
    assert resolve("digits/train@1") == one
    assert resolve("digits/train") == two
    assert resolve("digits@champion") == one
    assert resolve(str(one.record)) == resolve(str(one.content)) == one
    assert resolve(f"sha256:{two.record.hex[:10]}") == two


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("digits/trian@1", r"no digits/trian@1 in this store \(did you mean digits/train@1\?\)"),
        ("digits/train@9", r"did you mean digits/train@"),
        ("digits@champoin", r"did you mean digits@champion\?"),
        ("digit/train", r"did you mean digits/train\?"),
        ("xyzzy/qwert", "artifacts ls lists what there is"),
        ("digits", "is no artifact's name: pipeline/stage@number"),
        ("digits/train@two", "is no artifact's name"),
        ("digits/../../etc@1", "is no artifact's name"),
        ("../digits/train@1", "is no artifact's name"),
        ("digits/@1", "is no artifact's name"),
        ("", "is no artifact's name"),
        ("sha256:00000000", "no record and no content in this store begins with"),
        ("sha256:short", "is no artifact's name"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_is_near(workshop, named, text, message):
    with pytest.raises(ConfigError, match=message):
        workshop.store.resolve(text)


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "a b", "ä", "x" * 129, "-dash"])
def test_a_name_that_can_be_no_part_of_a_path_is_refused(workshop, named, name):
    with pytest.raises(ConfigError, match="can be no pipeline's name"):
        workshop.build(workshop.key(7), pipeline=name)
    with pytest.raises(ConfigError, match="can be no alias's name"):
        workshop.store.alias("digits", name, named[0])
    assert workshop.store.verify() == ()


def test_the_lineage_goes_up_to_the_materials_and_down_to_what_was_made(workshop):
    data = workshop.build(workshop.key(0, "data"))
    train = workshop.build(workshop.key(1, "train", data=data.content), {"w": b"1"}, materials={"data": data})
    export = workshop.build(workshop.key(1, "export", train=train.content), {"o": b"1"}, materials={"train": train})
    config = workshop.build(workshop.key(1, "config", export=export.content), {"c": b"1"}, materials={"export": export})
    engine = workshop.build(workshop.key(1, "engine", export=export.content), {"e": b"1"}, materials={"export": export})
    workshop.store.lookup(workshop.key(1, "export", train=train.content), pipeline="another")
    tree = workshop.store.lineage(export)
    assert tree.names == ("digits/export@1", "another/export@1")
    assert tree.label == "digits/export@1"
    assert tree.record == workshop.store.get_record(export)
    assert tree.materials["train"].materials["data"].names == (str(data),)
    assert [node.names for node in tree.dependents] == [(str(config),), (str(engine),)]
    assert tree.to_json()["materials"]["train"]["names"] == [str(train)]


def test_what_leaves_the_store_is_a_copy_of_its_own(workshop, tmp_path):
    ref = workshop.build(workshop.key(), MODEL)
    out = tmp_path / "new" / "out"
    workshop.store.materialise(ref, out)
    assert workshop.read(out) == MODEL
    assert all(path.stat().st_nlink == 1 for path in out.rglob("*") if path.is_file())
    (out / "model.bin").write_bytes(b"changed outside")
    assert workshop.store.verify() == ()
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_nothing_that_exists_is_overwritten(workshop, tmp_path, kind):
    ref = workshop.build(workshop.key(), MODEL)
    out = tmp_path / "out"
    make = {"file": out.touch, "folder": out.mkdir, "dangling link": lambda: out.symlink_to("nowhere")}
    make[kind]()
    with pytest.raises(Refused, match="exists already"):
        workshop.store.materialise(ref, out)


def test_what_someone_left_in_a_folder_to_read_is_gone_the_next_time(workshop):
    ref = workshop.build(workshop.key(), MODEL)
    folder = workshop.store.path(ref)
    (folder / "meta" / "timing.cache").write_text("left by a tool")
    (folder / "model.bin").unlink()
    assert workshop.read(workshop.store.path(ref)) == MODEL


def test_a_metric_that_is_no_number_is_refused_and_nothing_is_committed(workshop):
    with workshop.store.claim(workshop.key(), pipeline="digits") as claim:
        workshop.write(claim.product, MODEL)
        with pytest.raises(ConfigError, match="'loss' is nan"):
            claim.commit(metrics={"loss": float("nan")})
    assert workshop.store.lookup(workshop.key(), pipeline="digits") is None
    assert workshop.objects() == []
