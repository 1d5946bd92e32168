"""Crashes: a process that dies between any two steps, or at any instant, leaves a whole store."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.artifacts import ArtifactStore, StageKey

BUILDER = Path(__file__).with_name("builder.py")
CHANGES = {"os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.utime", "os.chmod"}


def key(number, stage="train"):
    return StageKey(stage=stage, version=1, config={"number": number})


def build(store, number, data, **options):
    with store.claim(key(number), pipeline="digits", **options) as claim:
        if claim.built is None:
            for name, text in {"a.bin": "same", "deep/b.bin": data}.items():
                (claim.product / name).parent.mkdir(exist_ok=True)
                (claim.product / name).write_text(text)
            claim.log.write_text(data)
            return claim.commit(metrics={"accuracy": 0.5})
        return claim.built


def prepare(root):
    """A store with something for every operation: artifacts, a release, an alias, garbage, a left-over claim."""
    with ArtifactStore.open(root) as store:
        old, _, new = (build(store, number, f"data {number}") for number in range(3))
        store.record(pipeline="digits", stage="release", content=old.content, materials={"train": old})
        store.alias("digits", "champion", new)
        with store.claim(key(9), pipeline="digits") as claim:
            (claim.work / "checkpoint").write_text("epoch 5")


def damage(store):
    """One object of the alias's artifact loses its bytes."""
    entry = store.content(store.resolve("digits@champion")).files[1]
    (store.root / "objects" / entry.digest.hex[:2] / entry.digest.hex[2:]).unlink(missing_ok=True)


OPERATIONS = {
    "commit": lambda store: build(store, 9, "data 9"),
    "rebuild with equal bytes": lambda store: build(store, 2, "data 2", rebuild=True),
    "rebuild with other bytes": lambda store: build(store, 2, "other", rebuild=True, reproducible=False),
    "mend": lambda store: (damage(store), build(store, 2, "data 2")),
    "release and alias": lambda store: store.alias(
        "digits",
        "champion",
        store.record(pipeline="digits", stage="release", content=store.resolve("digits/train").content),
    ),
    "gc": lambda store: store.gc(dry_run=False),
}


def die_at(step):
    """Kills this process just before its `step`-th change to the file system."""
    count = 0

    def watch(event, arguments):
        nonlocal count
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or writes:
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def killed_at(root, operation, step):
    """Runs an operation in a child that dies at `step`; whether it came so far."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            store = ArtifactStore.open(root)
            die_at(step)
            OPERATIONS[operation](store)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def assert_written_in_order(root):
    """Whatever is there, what it points to is there too: names and keys, records, content lists, objects."""

    def there(kind, digest, suffix=".json"):
        return (root / kind / digest[7:9] / f"{digest[9:]}{suffix}").exists()

    for pointer in [*root.glob("keys/*/*.json"), *root.glob("names/*/*/*.json"), *root.glob("aliases/*/*.json")]:
        value = json.loads(pointer.read_text())
        assert value.get("retired") or there("records", value["record"]), pointer
    for record in root.glob("records/*/*.json"):
        value = json.loads(record.read_text())
        assert there("contents", value["content"]), record
        assert all(there("objects", digest, "") for digest in value["byproducts"].values()), record
        assert all(there("records", material["record"]) for material in value["materials"].values()), record
    for content in root.glob("contents/*/*.json"):
        assert all(there("objects", file["digest"], "") for file in json.loads(content.read_text())["files"]), content


def assert_whole(store):
    """Everything that has a name can be had, and nothing points to what is not there."""
    assert store.verify() == ()
    assert_written_in_order(store.root)
    for ref, record in store.list():
        assert store.content(ref).digest == record.content == ref.content
        assert (store.path(ref) / "a.bin").read_text() == "same"
    assert [str(ref) for ref, _ in store.list(stage="release")][:1] == ["digits/release@1"]
    assert store.aliases("digits")["champion"].record


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_process_that_dies_between_any_two_steps_leaves_a_whole_store(in_memory, operation):
    template = in_memory / "template"
    prepare(template)
    step, reached = 0, True
    while reached:
        step += 1
        root = in_memory / f"store-{step}"
        shutil.copytree(template, root)
        reached = killed_at(root, operation, step)
        warnings = []
        with ArtifactStore.open(root, warn=warnings.append) as store:
            if operation != "mend":
                assert_whole(store)
                assert warnings == []
            before = {str(ref): ref.record for ref, _ in store.list()}
            OPERATIONS[operation](store)
            assert_whole(store)
            after = {str(ref): ref.record for ref, _ in store.list()}
            assert all(after.get(name, record) == record for name, record in before.items()), "a name was given twice"
            assert store.lookup(key(2), pipeline="digits") is not None
        with ArtifactStore.open(root) as store:
            store.gc(dry_run=False)
            assert not store.gc(dry_run=True)
            assert_whole(store)
            assert list((root / "tmp").iterdir()) == []
        shutil.rmtree(root)
    assert step > 15, "the operation has fewer steps than it can have: is the hook still called?"


def test_a_store_whose_creation_was_interrupted_opens_the_next_time(in_memory):
    step, reached = 0, True
    while reached:
        step += 1
        root = in_memory / f"store-{step}"
        child = os.fork()
        if child == 0:
            die_at(step)
            ArtifactStore.open(root)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        reached = os.WIFSIGNALED(status)
        with ArtifactStore.open(root) as store:
            assert build(store, 1, "data").number == 1
    assert step > 10


def test_a_process_killed_at_random_instants_leaves_a_whole_store(in_memory):
    chance = random.Random(20)
    root = in_memory / "store"
    done, names = 0, {}
    for _ in range(24):
        child = subprocess.Popen([sys.executable, str(BUILDER), "loop", str(root), str(done)], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0, 0.12))
        child.kill()
        lines = child.communicate()[0].splitlines()
        done += len(lines)
        warnings = []
        with ArtifactStore.open(root, warn=warnings.append) as store:
            assert store.verify() == ()
            assert warnings == []
            assert_written_in_order(root)
            for ref, _ in store.list():
                assert names.setdefault(str(ref), ref.record) == ref.record
                assert len(store.content(ref).files) == 3
                store.path(ref)
            # The next claim of what the killed process was about works, with no wait.
            with store.claim(key(done), pipeline="digits") as claim:
                if claim.built is None:
                    checkpoint = claim.work / "checkpoint"
                    assert not checkpoint.exists() or checkpoint.read_text() in ("", str(done))
    assert done > 5
    with ArtifactStore.open(root) as store:
        assert store.gc(dry_run=True) == store.gc(dry_run=False)
        assert not store.gc(dry_run=True).leftovers
        assert store.verify() == ()
