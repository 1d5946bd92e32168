"""A process that builds in a store, for tests that race, kill and watch it: `builder.py MODE ROOT …`."""

import itertools
import json
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tasks.artifacts import ArtifactStore, Digest, StageKey


def key(number, stage="train"):
    return StageKey(stage=stage, version=1, config={"number": number})


def barrier(folder, name, count):
    """Waits until `count` processes are here."""
    (folder / f"here-{name}").touch()
    while len(list(folder.glob("here-*"))) < count:
        time.sleep(0.002)


def race(root, folder, name):
    store = ArtifactStore.open(root)
    barrier(folder, name, 4)
    waited = []
    with store.claim(key(0), pipeline="digits", on_wait=waited.append) as claim:
        built = claim.built is None
        if built:
            (folder / f"built-{name}").touch()
            time.sleep(0.3)
            (claim.product / "model.bin").write_text(f"built by {name}")
            ref = claim.commit()
        else:
            ref = claim.built
    report = {"ref": str(ref), "record": str(ref.record), "built": built, "waited": "".join(waited), "pid": os.getpid()}
    print(json.dumps(report))


def name(root, folder, who):
    store = ArtifactStore.open(root)
    barrier(folder, who, 4)
    print(store.lookup(key(0), pipeline="digits"))


def hold(root):
    with ArtifactStore.open(root).claim(key(0), pipeline="digits") as claim:
        (claim.work / "checkpoint").write_text("epoch 5")
        (claim.product / "half").write_text("written")
        print("held", flush=True)
        time.sleep(60)


def loop(root, start):
    """Commits, rebuilds, moves an alias, makes releases and cleans up until it is killed."""
    store = ArtifactStore.open(root)
    print("ready", flush=True)
    for number in range(int(start), 10**9):
        with store.claim(key(number), pipeline="digits", rebuild=number % 5 == 4) as claim:
            if claim.built is None:
                for file in range(3):
                    (claim.product / f"{file}.bin").write_bytes(b"%d" % (number * (file % 2)) * 50_000)
                (claim.work / "checkpoint").write_text(str(number))
                ref = claim.commit()
            else:
                ref = claim.built
        store.alias("digits", "champion", ref)
        if number % 3 == 0:
            store.record(pipeline="digits", stage="release", content=ref.content, materials={"train": ref})
        if number % 7 == 0:
            store.close()
            store.gc(dry_run=False)
        print(ref, flush=True)


def build(root, first, count):
    """Commits `count` products that share most of their bytes, and reads each one back."""
    for number in range(int(first), int(first) + int(count)):
        with ArtifactStore.open(root) as store:
            with store.claim(key(number % 5, f"s{number % 3}"), pipeline=f"p{number % 2}") as claim:
                if claim.built is None:
                    (claim.product / "shared.bin").write_bytes(b"shared" * 1000)
                    (claim.product / "own.bin").write_bytes(b"%d" % (number % 5) * 1000)
                    ref = claim.commit()
                else:
                    ref = claim.built
            assert (store.path(ref) / "shared.bin").read_bytes() == b"shared" * 1000
            assert (store.path(ref) / "own.bin").stat().st_size == 1000
            assert store.get_record(ref).content == ref.content
    print("built")


def golden(root):
    """A small store with one of everything, the same bytes each time; tests/golden/store-format-1 was made by it."""
    moment = itertools.count()
    start = datetime(2025, 1, 31, 12, tzinfo=UTC)
    store = ArtifactStore.open(
        root, actor="ann@workshop", clock=lambda: start + timedelta(seconds=next(moment)), warn=print
    )

    def made(stage, files, *, pipeline="digits", materials=None, number=1, **options):
        contents = {name: ref.content for name, ref in (materials or {}).items()}
        wanted = StageKey(
            stage=stage,
            version=2,
            materials=contents,
            config={"number": number, "rate": 0.5, "layers": [64, 10], "name": "é", "none": None, "on": True},
            code={"recipe.py": str(Digest.of(b"recipe")), "distributions": {"numpy": "2.0.0"}},
            data={"digits": {"distribution": "scikit-learn", "version": "1.5.0"}},
            environment={"torch": "2.9.0"},
        )
        with store.claim(wanted, pipeline=pipeline, **options) as claim:
            if claim.built is not None:
                return claim.built
            for name, text in files.items():
                (claim.product / name).parent.mkdir(parents=True, exist_ok=True)
                (claim.product / name).write_text(text)
            claim.log.write_text(f"{stage} was built\n")
            return claim.commit(
                materials=materials,
                environment={"python": "3.11.9", "gpus": []},
                commands=[["python", "-m", stage, "--rate", "0.5"]],
                metrics={"accuracy": 0.9875, "loss": 1e-07},
                details={"epochs": 20},
            )

    shared = {"labels.txt": "zero\none\n"}
    old = made("train", {"model.safetensors": "first weights"} | shared)
    train = made("train", {"model.safetensors": "weights"} | shared, number=2)
    export = made(
        "export", {"model.onnx": "graph", "data/model.onnx.data": "weights"} | shared, materials={"train": train}
    )
    made(
        "export",
        {"model.onnx": "graph", "data/model.onnx.data": "weights"} | shared,
        materials={"train": train},
        rebuild=True,
    )
    made("engine", {"model.plan": "first plan"}, materials={"export": export})
    engine = made(
        "engine", {"model.plan": "second plan"}, materials={"export": export}, rebuild=True, reproducible=False
    )
    made("train", {}, pipeline="mnist", number=2)
    release = store.record(
        pipeline="digits", stage="release", content=engine.content, materials={"engine": engine}, details={"version": 7}
    )
    store.alias("digits", "champion", release)
    store.close()
    assert old in store.gc(dry_run=False).names
    store.close()


if __name__ == "__main__":
    mode, root, *rest = sys.argv[1:]
    arguments = [Path(text) if "/" in text else text for text in rest]
    {"race": race, "name": name, "hold": hold, "loop": loop, "build": build, "golden": golden}[mode](
        Path(root), *arguments
    )
