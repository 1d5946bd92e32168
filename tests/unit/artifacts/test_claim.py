"""Claims: one builder at a time, a working folder that survives, and what a rebuild must give."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tasks.artifacts import lease as leases
from tasks.artifacts.owner import Owner
from tasks.errors import ConfigError, NotReproducible, Refused

BUILDER = Path(__file__).with_name("builder.py")
MODEL = {"model.bin": b"weights"}


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(BUILDER), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def folder_of(workshop, key):
    return workshop.root / "claims" / key.digest.hex[:2] / key.digest.hex[2:]


def test_a_claim_of_what_was_built_has_it_and_nothing_to_build(workshop):
    ref = workshop.build(workshop.key())
    with workshop.store.claim(workshop.key(), pipeline="digits") as claim:
        assert claim.built == ref
        with pytest.raises(RuntimeError):
            _ = claim.work


def test_the_work_folder_survives_an_error_and_the_product_does_not(workshop):
    key = workshop.key()

    def fail_half_way() -> None:
        with workshop.store.claim(key, pipeline="digits") as claim:
            workshop.write(claim.work, {"checkpoints/5.pt": b"five"})
            workshop.write(claim.product, {"half": b"written"})
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()
    assert workshop.store.lookup(key, pipeline="digits") is None
    with workshop.store.claim(key, pipeline="digits") as claim:
        assert claim.built is None
        assert (claim.work / "checkpoints/5.pt").read_bytes() == b"five"
        assert list(claim.product.iterdir()) == []
        workshop.write(claim.product, MODEL)
        ref = claim.commit()
    assert workshop.read(workshop.store.path(ref)) == MODEL
    assert not folder_of(workshop, key).exists()


def test_a_claim_that_is_not_committed_builds_nothing(workshop):
    with workshop.store.claim(workshop.key(), pipeline="digits") as claim:
        workshop.write(claim.product, MODEL)
    assert workshop.store.lookup(workshop.key(), pipeline="digits") is None
    assert workshop.objects() == []


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.joinpath("x").symlink_to("/etc/hostname")])
def test_a_product_that_can_be_no_content_is_refused_and_can_be_mended(workshop, make):
    with workshop.store.claim(workshop.key(), pipeline="digits") as claim:
        make(claim.product)
        with pytest.raises(ConfigError):
            claim.commit()
        assert workshop.objects() == []
        (claim.product / "x").unlink(missing_ok=True)
        workshop.write(claim.product, MODEL)
        assert claim.commit().number == 1
    assert list((workshop.root / "tmp").iterdir()) == []


def test_of_processes_that_race_for_a_key_one_builds_and_all_have_its_artifact(workshop, tmp_path):
    racers = [start("race", workshop.root, tmp_path, n) for n in range(4)]
    reports = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
    built = [report for report in reports if report["built"]]
    assert len(built) == 1
    assert {(report["ref"], report["record"]) for report in reports} == {("digits/train@1", built[0]["record"])}
    assert len(list(tmp_path.glob("built-*"))) == 1
    waited = [report for report in reports if not report["built"] and report["waited"]]
    assert all(f"process {built[0]['pid']} on" in report["waited"] for report in waited)
    assert workshop.store.verify() == ()


def test_threads_of_one_process_wait_for_each_other_too(workshop):
    key, refs, built = workshop.key(), [], []

    def build() -> None:
        with workshop.store.claim(key, pipeline="digits") as claim:
            if claim.built is None:
                built.append(threading.get_ident())
                time.sleep(0.1)
                workshop.write(claim.product, MODEL)
                refs.append(claim.commit())
            else:
                refs.append(claim.built)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(built) == 1
    assert len(refs) == 4
    assert len(set(refs)) == 1


def test_many_processes_that_name_the_same_record_give_it_one_number(workshop, tmp_path):
    workshop.build(workshop.key(0), pipeline="other")
    namers = [start("name", workshop.root, tmp_path, n) for n in range(4)]
    numbers = {namer.communicate(timeout=60)[0].strip() for namer in namers}
    assert numbers == {"digits/train@1"}


def test_the_place_of_a_killed_builder_is_taken_at_once_with_its_work(workshop):
    key = workshop.key(0)
    holder = start("hold", workshop.root)
    assert holder.stdout.readline() == "held\n"
    told = []

    def kill(text: str) -> None:
        told.append(text)
        holder.send_signal(signal.SIGKILL)

    began = time.monotonic()
    with workshop.store.claim(key, pipeline="digits", on_wait=kill) as claim:
        # The killed process is a zombie still (nobody has waited for it), and counts as dead.
        assert time.monotonic() - began < 5
        assert (claim.work / "checkpoint").read_text() == "epoch 5"
        workshop.write(claim.product, MODEL)
        claim.commit()
    holder.communicate()
    assert told == [told[0]]
    assert told[0].startswith(f"process {holder.pid} on ")


def plant_lease(workshop, key, *, seconds_ago=0.0, **changes):
    """A lease as another process would have left it."""
    folder = folder_of(workshop, key)
    folder.mkdir(parents=True)
    owner = Owner.current().to_json() | changes
    path = folder / "lease.7.json"
    lease = {"format": 1, "nonce": "n", "owner": owner, "since": "2025-01-01T00:00:00+00:00", "released": False}
    path.write_text(json.dumps(lease))
    os.utime(path, (time.time() - seconds_ago,) * 2)
    return path


def epoch(claim):
    return max(int(path.name.split(".")[1]) for path in claim.work.parent.glob("lease.*.json"))


def test_a_reused_pid_is_not_the_holder(workshop):
    plant_lease(workshop, workshop.key(), start=Owner.current().start - 1)
    with workshop.store.claim(workshop.key(), pipeline="digits") as claim:
        assert epoch(claim) == 8


def test_a_holder_on_another_machine_that_renews_is_waited_for(workshop, monkeypatch):
    monkeypatch.setattr(leases, "EXPIRY_S", 1.0)
    path = plant_lease(workshop, workshop.key(), boot="0" * 32, host="elsewhere")
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=renew)
    thread.start()
    threading.Timer(1.5, ended.set).start()
    began, told = time.monotonic(), []
    with workshop.store.claim(workshop.key(), pipeline="digits", on_wait=told.append) as claim:
        assert time.monotonic() - began > 2.0
        assert epoch(claim) == 8
    thread.join()
    assert "on elsewhere since" in told[0]


def test_a_holder_on_another_machine_that_was_silent_for_long_is_dead(workshop):
    plant_lease(workshop, workshop.key(), seconds_ago=leases.WALL_EXPIRY_S + 5, boot="0" * 32)
    began = time.monotonic()
    with workshop.store.claim(workshop.key(), pipeline="digits"):
        assert time.monotonic() - began < 1


def test_a_lease_that_a_power_cut_left_empty_is_nobodys(workshop):
    plant_lease(workshop, workshop.key()).write_text("")
    with workshop.store.claim(workshop.key(), pipeline="digits") as claim:
        assert epoch(claim) == 8


def test_a_builder_whose_place_was_taken_commits_nothing_and_leaves_the_other_alone(workshop):
    with workshop.store.claim(workshop.key(), pipeline="digits") as claim:
        workshop.write(claim.product, MODEL)
        usurper = folder_of(workshop, workshop.key()) / "lease.99.json"
        usurper.write_text((claim.work.parent / "lease.1.json").read_text().replace('"nonce":"', '"nonce":"x'))
        with pytest.raises(Refused, match="another builder took over train"):
            claim.commit()
    assert usurper.exists()
    assert claim.product.exists()
    assert workshop.objects() == []


def test_a_held_lease_is_renewed_until_it_is_given_back(workshop, monkeypatch):
    monkeypatch.setattr(leases, "RENEWAL_S", 0.05)
    with workshop.store.claim(workshop.key(), pipeline="digits") as claim:
        (path,) = claim.work.parent.glob("lease.*.json")
        before = path.stat().st_mtime_ns
        time.sleep(0.3)
        assert path.stat().st_mtime_ns > before
    assert json.loads(path.read_text())["released"]
    time.sleep(0.1)  # a renewal that had begun ends
    after = path.stat().st_mtime_ns
    time.sleep(0.2)
    assert path.stat().st_mtime_ns == after


def test_a_rebuild_that_gives_equal_bytes_is_a_new_record_of_the_same_content(workshop):
    first = workshop.build(workshop.key(), MODEL)
    second = workshop.build(workshop.key(), MODEL, rebuild=True)
    assert second.content == first.content
    assert (first.number, second.number) == (1, 2)
    assert workshop.store.get_record(second).details == {}
    assert workshop.store.lookup(workshop.key(), pipeline="digits") == second


def test_a_rebuild_that_differs_and_must_not_is_an_error_that_names_the_files(workshop):
    first = workshop.build(workshop.key(), {"same": b"s", "model.bin": b"one", "gone": b"g"})
    with pytest.raises(NotReproducible, match=r"differing files: gone, model\.bin, new\n") as error:
        workshop.build(workshop.key(), {"same": b"s", "model.bin": b"two", "new": b"n"}, rebuild=True)
    text = str(error.value)
    assert str(first.content) in text
    stored, rebuilt = (
        Path(line.split(": ")[1]) for line in text.splitlines() if line.startswith(("stored", "rebuilt"))
    )
    assert (stored / "model.bin").read_bytes() == b"one"
    assert (rebuilt / "model.bin").read_bytes() == b"two"
    assert workshop.store.lookup(workshop.key(), pipeline="digits") == first
    assert len(workshop.objects()) == 3


def test_a_rebuild_that_differs_and_may_becomes_the_keys_artifact_with_a_note(workshop):
    first = workshop.build(workshop.key(), {"model.plan": b"one"})
    second = workshop.build(workshop.key(), {"model.plan": b"two"}, rebuild=True, reproducible=False)
    assert workshop.store.lookup(workshop.key(), pipeline="digits") == second
    replaced = {"record": str(first.record), "differing_files": ["model.plan"]}
    assert workshop.store.get_record(second).details == {"replaces": replaced}
    assert workshop.read(workshop.store.path(first)) == {"model.plan": b"one"}
    assert workshop.warnings == ["train was built again and differs from what it was: model.plan"]


def test_a_rebuild_of_what_was_never_built_is_a_build(workshop):
    assert workshop.build(workshop.key(), rebuild=True).number == 1


def test_the_work_folder_is_known_before_it_is_claimed(workshop):
    foreseen = workshop.store.work_folder(workshop.key())
    assert not foreseen.exists()
    with workshop.store.claim(workshop.key(), pipeline="digits") as claim:
        assert claim.work == foreseen
