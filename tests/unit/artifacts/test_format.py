"""The format on disk: an old store stays readable, and what is written today is what docs/artifacts.md says.

tests/golden/store-format-1 was written once, by `builder.py golden`. It is never written again: a new format is a new
folder beside it, and this one must stay readable.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.artifacts import ArtifactStore, Digest, StageKey

GOLDEN = Path(__file__).parents[2] / "golden" / "store-format-1"
BUILDER = Path(__file__).with_name("builder.py")


def files_of(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def old(tmp_path):
    """A copy of the golden store, as a checkout gives it: other times, other modes."""
    root = shutil.copytree(GOLDEN, tmp_path / "old", copy_function=shutil.copyfile)
    with ArtifactStore.open(root, warn=pytest.fail) as store:
        yield store


def test_a_store_of_format_1_is_whole(old):
    assert old.verify() == ()
    assert not old.gc(dry_run=True).records


def test_a_store_of_format_1_has_its_names(old):
    assert [str(ref) for ref, _ in old.list()] == [
        "digits/engine@2",
        "digits/export@1",
        "digits/export@2",
        "digits/release@1",
        "digits/train@2",
        "mnist/train@1",
    ]
    assert {name: str(ref) for name, ref in old.aliases("digits").items()} == {"champion": "digits/release@1"}
    with pytest.raises(Exception, match=r"digits/train@1 was removed at 2025-01-31T12:"):
        old.resolve("digits/train@1")


def test_a_store_of_format_1_has_its_bytes(old, tmp_path):
    export = old.resolve("digits/export@1")
    assert files_of(old.path(export)) == {
        "model.onnx": b"graph",
        "data/model.onnx.data": b"weights",
        "labels.txt": b"zero\none\n",
    }
    old.materialise(export, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(old.path(export))
    assert old.byproduct(export, "build.log").read_text() == "export was built\n"


def test_a_key_of_format_1_hits(old):
    key = StageKey(
        stage="train",
        version=2,
        config={"on": True, "none": None, "name": "é", "layers": [64, 10], "rate": 0.5, "number": 2},
        code={"distributions": {"numpy": "2.0.0"}, "recipe.py": str(Digest.of(b"recipe"))},
        data={"digits": {"distribution": "scikit-learn", "version": "1.5.0"}},
        environment={"torch": "2.9.0"},
    )
    assert key.digest == Digest("f4f4527b80fcdcaf68a3f17b2d2fc344bba41e4548c317a7b8c8740bf061ada5")
    assert str(old.lookup(key, pipeline="digits")) == "digits/train@2"
    assert str(old.lookup(key, pipeline="mnist")) == "mnist/train@1"


def test_a_record_of_format_1_says_how_it_came_to_be(old):
    engine = old.resolve("digits/engine@2")
    record = old.get_record(engine)
    assert record.commands == (("python", "-m", "engine", "--rate", "0.5"),)
    assert record.metrics == {"accuracy": 0.9875, "loss": 1e-07}
    assert record.details["replaces"]["differing_files"] == ["model.plan"]
    assert record.actor == "ann@workshop"
    assert record.started < record.finished
    tree = old.lineage(engine)
    assert tree.materials["export"].materials["train"].names == ("digits/train@2", "mnist/train@1")
    assert [node.names for node in tree.dependents] == [("digits/release@1",)]


def test_what_is_written_today_is_format_1(tmp_path):
    """When this fails, the format has changed: give it a new number, a new golden store, and keep reading this one."""
    root = tmp_path / "new"
    subprocess.run([sys.executable, str(BUILDER), "golden", str(root)], check=True)
    assert files_of(root) == files_of(GOLDEN)


def test_the_format_as_it_is_written_down(workshop):
    """The examples in docs/artifacts.md."""
    ref = workshop.build(workshop.key(), {"a.txt": b"hello\n"})
    assert (workshop.root / "store.json").read_bytes() == b'{"format":1,"kind":"enginehouse artifact store"}'
    hello = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
    assert (workshop.root / "objects" / hello[:2] / hello[2:]).read_bytes() == b"hello\n"
    content = workshop.root / "contents" / ref.content.hex[:2] / f"{ref.content.hex[2:]}.json"
    files = f'[{{"digest":"sha256:{hello}","path":"a.txt","size":6}}]'
    assert content.read_text() == f'{{"files":{files},"format":1}}'
    pointer = f'"content":"{ref.content}","format":1,"record":"{ref.record}"'
    key = workshop.key().digest.hex
    assert (workshop.root / "keys" / key[:2] / f"{key[2:]}.json").read_text() == f"{{{pointer}}}"
    assert (workshop.root / "names/digits/train/1.json").read_text() == f'{{{pointer},"retired":null}}'
    workshop.store.alias("digits", "champion", ref)
    target = f'"content":"{ref.content}","format":1,"number":1,"pipeline":"digits","record":"{ref.record}"'
    assert (workshop.root / "aliases/digits/champion.json").read_text() == f'{{{target},"stage":"train"}}'
