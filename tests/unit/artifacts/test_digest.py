"""Digests and canonical JSON: the laws, and what is refused."""

import enum
import hashlib
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.artifacts.digest import Digest, canonical_json, copy_hashed, digest_of, hash_file
from tasks.errors import Refused

LAW = settings(deadline=None, max_examples=50)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


@LAW
@given(st.binary())
def test_a_digest_reads_back_from_its_text(data):
    digest = Digest.of(data)
    assert Digest.parse(str(digest)) == digest
    assert digest.hex == hashlib.sha256(data).hexdigest()
    assert digest.hex.startswith(digest.short)
    assert len(digest.short) == 12


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:abc", "md5:" + "0" * 32, "0" * 64, "sha256:" + "A" * 64])
def test_what_is_no_digest_is_refused(text):
    with pytest.raises(ValueError, match="digest"):
        Digest.parse(text)


@LAW
@given(VALUES)
def test_canonical_json_is_its_own_canonical_form(value):
    data = canonical_json(value)
    assert canonical_json(json.loads(data)) == data
    assert json.loads(data) == value


@LAW
@given(st.dictionaries(TEXT, VALUES, min_size=2))
def test_the_order_of_keys_changes_nothing(value):
    assert digest_of(dict(reversed(value.items()))) == digest_of(value)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ({"b": 1, "a": [True, None, "é"]}, '{"a":[true,null,"é"],"b":1}'),
        ((1, 1.0, 1e-7, 10**20), "[1,1.0,1e-07,100000000000000000000]"),
        (enum.IntEnum("Size", {"SMALL": 3}).SMALL, "3"),
        (enum.StrEnum("Kind", {"A": "a"}).A, '"a"'),
    ],
)
def test_canonical_json_has_one_spelling(value, data):
    assert canonical_json(value) == data.encode()


@pytest.mark.parametrize(
    ("value", "error", "place"),
    [
        ({"lr": float("nan")}, ValueError, "lr: nan"),
        ({"train": {"lr": [0.1, float("inf")]}}, ValueError, r"train\.lr\[1\]: inf"),
        ({"path": Path("x")}, TypeError, "path: PosixPath"),
        ({1: "a"}, TypeError, "the key 1"),
        ({"names": {"a"}}, TypeError, "names: set"),
        (b"bytes", TypeError, "bytes"),
        ("\ud800", ValueError, "Unicode"),
        ({"a": {"\ud800": 1}}, ValueError, "Unicode"),
    ],
)
def test_what_json_cannot_say_is_refused_with_its_place(value, error, place):
    with pytest.raises(error, match=place):
        canonical_json(value)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_a_copy_is_hashed_on_the_way(tmp_path, size):
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    assert copy_hashed(source, tmp_path / "copy") == (size, hash_file(source))
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_a_copy_overwrites_nothing(tmp_path):
    (tmp_path / "source").write_text("new")
    (tmp_path / "copy").write_text("old")
    with pytest.raises(FileExistsError):
        copy_hashed(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "old"


def test_a_file_that_is_still_written_is_refused_and_leaves_no_copy(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"x" * 20_000_000)
    ended = threading.Event()

    def write() -> None:
        with source.open("r+b") as file:
            while not ended.wait(0.001):
                file.seek(0)
                file.write(b"y")
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(Refused, match="changed while it was being copied"):
            copy_hashed(source, tmp_path / "copy")
    finally:
        ended.set()
        writer.join()
    assert not (tmp_path / "copy").exists()
