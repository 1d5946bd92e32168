"""gc: what it keeps, that a dry run says the truth, and that builds beside it lose nothing."""

import json
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tasks.artifacts.owner import Owner
from tasks.errors import ArtifactCorrupt, ConfigError, Refused

BUILDER = Path(__file__).with_name("builder.py")


def collected(workshop, **options):
    """What a gc removes once nothing is in anyone's hands; the dry run must have said the same."""
    workshop.store.close()
    foreseen = workshop.store.gc(dry_run=True, **options)
    before = sorted(path for path in workshop.root.rglob("*") if path.is_file())
    assert sorted(path for path in workshop.root.rglob("*") if path.is_file()) == before
    garbage = workshop.store.gc(dry_run=False, **options)
    assert garbage == foreseen
    assert not workshop.store.gc(dry_run=False, **options)
    assert workshop.store.verify() == ()
    return garbage


def build(workshop, number, stage="train", **options):
    return workshop.build(workshop.key(number, stage), {"own": b"%d" % number * 1000, "shared": b"shared"}, **options)


def names(workshop):
    return [str(ref) for ref, _ in workshop.store.list()]


def test_the_last_ones_of_each_pipelines_stage_are_kept(workshop):
    for number in (1, 2, 3):
        build(workshop, number)
        build(workshop, number, "engine")
    workshop.store.lookup(workshop.key(1), pipeline="mnist")
    garbage = collected(workshop, keep=2)
    assert [str(name) for name in garbage.names] == ["digits/engine@1"]  # train@1 is the last of mnist
    garbage = collected(workshop)
    assert [str(name) for name in garbage.names] == ["digits/engine@2", "digits/train@2"]
    assert len(garbage.records) == 2
    assert garbage.bytes == 1000  # what is shared with others stays
    assert names(workshop) == ["digits/engine@3", "digits/train@1", "digits/train@3", "mnist/train@1"]


def test_what_was_removed_is_gone_and_its_name_says_so_and_its_number_stays_taken(workshop):
    one = build(workshop, 1)
    build(workshop, 2)
    collected(workshop)
    with pytest.raises(ConfigError, match="digits/train@1 was removed at 20"):
        workshop.store.resolve("digits/train@1")
    with pytest.raises(ArtifactCorrupt):
        workshop.store.path(one)
    assert workshop.store.lookup(workshop.key(1), pipeline="digits") is None
    assert workshop.warnings == []
    assert build(workshop, 1).number == 3


@pytest.mark.parametrize("keeper", ["alias", "release"])
def test_what_an_alias_or_a_release_needs_is_kept_with_all_its_materials(workshop, keeper):
    data = build(workshop, 0, "data", log="log")
    train = build(workshop, 0, "train", materials={"data": data})
    engine = build(workshop, 0, "engine", materials={"train": train})
    if keeper == "alias":
        workshop.store.alias("digits", "champion", engine)
    else:
        workshop.store.record(pipeline="digits", stage="release", content=engine.content, materials={"engine": engine})
        workshop.store.record(pipeline="digits", stage="release", content=engine.content)
    for stage in ("data", "train", "engine"):
        build(workshop, 1, stage)
        build(workshop, 2, stage)
    garbage = collected(workshop)
    assert [str(name) for name in garbage.names] == ["digits/data@2", "digits/engine@2", "digits/train@2"]
    for ref in (data, train, engine):
        assert workshop.read(workshop.store.path(ref)) == {"own": b"0" * 1000, "shared": b"shared"}
    assert workshop.store.byproduct(data, "build.log").read_text() == "log"
    if keeper == "alias":
        workshop.store.unalias("digits", "champion")
        garbage = collected(workshop)
        assert [str(name) for name in garbage.names] == ["digits/data@1", "digits/engine@1", "digits/train@1"]


def test_the_materials_of_the_last_ones_are_kept(workshop):
    old = build(workshop, 1)
    build(workshop, 1, "engine", materials={"train": old})
    build(workshop, 2)
    assert not collected(workshop).names


def test_what_a_running_process_was_handed_is_kept_until_it_lets_go(workshop):
    old = build(workshop, 1)
    build(workshop, 2)
    workshop.store.close()
    other = workshop.open()
    assert other.lookup(workshop.key(1), pipeline="digits") == old
    assert not workshop.store.gc(dry_run=False)
    other.close()
    assert [str(name) for name in collected(workshop).names] == ["digits/train@1"]


@pytest.mark.parametrize("use", [lambda s: s.resolve("digits/train@1"), lambda s: s.path(s.list()[0][0])])
def test_what_was_resolved_or_read_is_kept(workshop, use):
    build(workshop, 1)
    build(workshop, 2)
    workshop.store.close()
    use(workshop.store)
    garbage = workshop.store.gc(dry_run=False)
    assert garbage.objects == ()


def test_what_a_live_claim_builds_from_is_kept(workshop):
    old = build(workshop, 1)
    build(workshop, 2)
    with workshop.store.claim(workshop.key(1, "engine", train=old.content), pipeline="digits") as claim:
        (claim.work / "checkpoint").write_text("epoch 5")
        workshop.store.close()
        garbage = workshop.store.gc(dry_run=False, abandoned_after=timedelta(0))
        assert garbage.works == ()
        assert garbage.objects == ()
        assert workshop.read(workshop.store.path(old))["shared"] == b"shared"
        workshop.write(claim.product, {"model.plan": b"plan"})
        claim.commit()
    assert workshop.store.verify() == ()


def test_a_working_folder_is_kept_until_nobody_has_worked_on_it_for_long(workshop):
    with workshop.store.claim(workshop.key(1), pipeline="digits") as claim:
        (claim.work / "checkpoint").write_text("epoch 5")
        folder = claim.work.parent
    assert not collected(workshop)
    garbage = collected(workshop, abandoned_after=timedelta(0))
    assert garbage.works == (folder,)
    assert garbage.bytes > len("epoch 5")
    assert not folder.exists()


def test_the_working_folder_of_a_key_that_is_built_goes_at_once(workshop):
    build(workshop, 1)
    with pytest.raises(KeyError), workshop.store.claim(workshop.key(1), pipeline="digits", rebuild=True) as claim:
        raise KeyError
    assert collected(workshop).works == (claim.work.parent,)


def test_what_dead_processes_left_goes_and_what_living_ones_write_stays(workshop):
    child = subprocess.Popen([sys.executable, str(BUILDER), "hold", str(workshop.root)], stdout=subprocess.PIPE)
    child.stdout.readline()
    living = Owner.current().token
    dead = living.rpartition("-")[0] + "-1"  # this pid, started at another time
    elsewhere = "0" * 32 + "-1-1-1"
    for token in (living, dead, elsewhere):
        (workshop.root / "tmp" / f"{token}.abc").write_bytes(b"12345")
        (workshop.root / "pins" / f"{token}.aa.content-{'0' * 64}").touch()
    garbage = workshop.store.gc(dry_run=False)
    assert sorted(path.name.split(".")[0] for path in garbage.leftovers) == [dead, dead]
    assert garbage.bytes == 5
    child.kill()
    child.communicate()
    (workshop.root / "tmp" / f"{living}.abc").unlink()


def test_quarantined_bytes_go(workshop):
    ref = build(workshop, 1)
    path = workshop.object(workshop.store.content(ref).files[0].digest)
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    assert len(workshop.store.verify()) == 1
    assert build(workshop, 1) == ref
    garbage = collected(workshop)
    assert [path.parent.name for path in garbage.leftovers] == ["quarantine"]


def test_an_artifact_whose_commit_ended_before_its_name_is_kept(workshop):
    ref = build(workshop, 1)
    workshop.store.close()
    (workshop.root / "names/digits/train/1.json").unlink()
    assert not workshop.store.gc(dry_run=False).records
    assert workshop.store.lookup(workshop.key(1), pipeline="digits") == ref


@pytest.mark.parametrize("lost", ["records", "contents"])
def test_nothing_is_removed_while_it_cannot_be_known_what_a_release_needs(workshop, lost):
    train = build(workshop, 1)
    release = workshop.store.record(pipeline="digits", stage="release", content=train.content, materials={"t": train})
    build(workshop, 2)
    build(workshop, 3)
    workshop.store.close()
    digest = release.record if lost == "records" else release.content
    path = workshop.root / lost / digest.hex[:2] / f"{digest.hex[2:]}.json"
    data = path.read_bytes()
    path.unlink()
    before = sorted(workshop.root.rglob("*"))
    for dry_run in (True, False):
        with pytest.raises(ArtifactCorrupt, match=r"(?s)is missing.*nothing was removed") as error:
            workshop.store.gc(dry_run=dry_run)
        assert "digits/release@1" in error.value.dependents
    assert sorted(p for p in workshop.root.rglob("*") if p.name != "gc") == [p for p in before if p.name != "gc"]
    path.write_bytes(data)
    assert [str(name) for name in collected(workshop).names] == ["digits/train@2"]


def test_a_release_that_is_given_up_goes_and_so_does_what_only_it_needed(workshop):
    train = build(workshop, 1)
    release = workshop.store.record(pipeline="digits", stage="release", content=train.content, materials={"t": train})
    build(workshop, 2)
    workshop.store.record(pipeline="digits", stage="release", content=train.content)
    workshop.store.alias("digits", "previous", release)
    with pytest.raises(Refused, match=r"digits@previous points at digits/release@1"):
        workshop.store.retire("digits/release@1")
    workshop.store.unalias("digits", "previous")
    workshop.store.retire("digits/release@1")
    with pytest.raises(ConfigError, match=r"digits/release@1 was removed"):
        workshop.store.retire("digits/release@1")
    with pytest.raises(ConfigError, match=r"pipeline/stage@number is expected"):
        workshop.store.retire("digits/release")
    garbage = collected(workshop)
    assert set(garbage.records) == {release.record, train.record}
    assert workshop.store.record(pipeline="digits", stage="release", content=train.content).number == 3


def test_a_release_whose_record_is_lost_can_be_given_up(workshop):
    release = workshop.store.record(pipeline="digits", stage="release", content=build(workshop, 1).content)
    (workshop.root / "records" / release.record.hex[:2] / f"{release.record.hex[2:]}.json").unlink()
    assert workshop.store.latest("digits", "release") is None
    assert "is missing" in workshop.warnings[-1]
    workshop.store.retire("digits/release@1")
    collected(workshop)


def test_a_lost_record_that_nothing_needs_does_not_stop_gc(workshop):
    one = build(workshop, 1)
    (workshop.root / "records" / one.record.hex[:2] / f"{one.record.hex[2:]}.json").unlink()
    two = build(workshop, 1)
    assert two.number == 2
    workshop.store.close()
    garbage = workshop.store.gc(dry_run=False)
    assert garbage.names == (one,)
    assert workshop.store.verify() == ()


def test_two_gcs_do_not_run_at_once(workshop):
    (workshop.root / "gc").mkdir(exist_ok=True)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lease = workshop.root / "gc" / "lease.1.json"
    owner = Owner.current().to_json() | {"pid": child.pid, "start": start_of(child.pid)}
    lease.write_bytes(lease_of(owner))
    try:
        with pytest.raises(Refused, match=f"another gc is at work: process {child.pid} on"):
            workshop.store.gc(dry_run=False)
    finally:
        child.communicate(b"\n")
    assert not workshop.store.gc(dry_run=False)  # the one that held it has ended


def test_a_build_waits_for_a_gc_that_runs(workshop):
    old = build(workshop, 1)
    build(workshop, 2)
    workshop.store.close()
    lease = workshop.root / "gc" / "lease.1.json"
    lease.parent.mkdir(exist_ok=True)
    owner = Owner.current().to_json()
    lease.write_bytes(lease_of(owner))
    began = time.monotonic()
    threading.Timer(1, lease.unlink).start()
    assert workshop.store.lookup(workshop.key(1), pipeline="digits") == old
    assert time.monotonic() - began > 1
    (warning,) = workshop.warnings
    assert warning.startswith("waiting for the store's gc, run by process ")


def start_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def lease_of(owner):
    value = {"format": 1, "nonce": "n", "owner": owner, "since": "2025-01-01", "released": False}
    return json.dumps(value).encode()


def test_builds_beside_a_gc_lose_nothing(workshop):
    """Two processes commit, look up and read while this one collects all the time; each checks what it was handed."""
    builders = [
        subprocess.Popen(
            [sys.executable, str(BUILDER), "build", str(workshop.root), str(start), "60"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for start in (0, 1)
    ]
    collections = removed = 0
    while any(builder.poll() is None for builder in builders):
        garbage = workshop.store.gc(dry_run=False)
        collections += 1
        removed += len(garbage.records)
        time.sleep(0.01)
    for builder in builders:
        out, err = builder.communicate()
        assert (out, builder.returncode) == ("built\n", 0), err
    assert collections > 5
    assert removed > 5
    assert workshop.store.verify() == ()


def test_keep_is_at_least_one(workshop):
    with pytest.raises(ValueError, match="keep is 1 or more"):
        workshop.store.gc(dry_run=True, keep=0)
