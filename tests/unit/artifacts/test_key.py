"""Stage keys: the laws, and the words for what changed."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.artifacts.digest import Digest
from tasks.artifacts.key import StageKey, differences
from tasks.errors import StoreUnusable

LAW = settings(deadline=None, max_examples=50)
NAMES = st.sampled_from(["a", "b", "recipe.py", "seed"])
LEAVES = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, 0.5, "x", "1", "sha256:0", ""])
PARTS = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=3), lambda inner: st.dictionaries(NAMES, inner | LEAVES | st.lists(LEAVES))
)
KEYS = st.builds(
    StageKey,
    stage=st.sampled_from(["train", "export"]),
    version=st.integers(1, 2),
    materials=st.dictionaries(NAMES, st.integers(0, 3).map(lambda n: Digest.of(bytes(n))), max_size=2),
    config=PARTS,
    code=PARTS,
    data=PARTS,
    environment=PARTS,
)
KEY = StageKey(
    stage="train",
    version=1,
    materials={"base": Digest.of(b"base")},
    config={"max_epochs": 20, "seed": 0, "sizes": [1, 2]},
    code={"recipe.py": str(Digest.of(b"code")), "distributions": {"numpy": "2.0"}},
    data={"digits": "1"},
    environment={"torch": "2.9.0"},
)


@LAW
@given(KEYS)
def test_a_key_reads_back_from_its_json(key):
    again = StageKey.from_json(key.to_json())
    assert again == key
    assert again.digest == key.digest
    assert hash(again) == hash(key)


@LAW
@given(KEYS, KEYS)
def test_keys_differ_exactly_when_there_is_a_difference_to_tell(one, other):
    assert (differences(one, other) == []) == (one.digest == other.digest) == (one == other)


def changed(**changes):
    return StageKey.from_json(KEY.to_json() | changes)


@pytest.mark.parametrize(
    ("new", "lines"),
    [
        (KEY, []),
        (changed(version=2), ["stage version: 1 -> 2"]),
        (changed(stage="export"), ['stage: "train" -> "export"']),
        (changed(materials={"base": str(Digest.of(b"other"))}), ["materials.base changed"]),
        (changed(materials={}), ["materials.base: removed"]),
        (changed(config={"max_epochs": 30, "seed": 0, "sizes": [1, 2]}), ["config.max_epochs: 20 -> 30"]),
        (changed(config={"max_epochs": 20, "seed": 0, "sizes": [1]}), ["config.sizes: [1,2] -> [1]"]),
        (
            changed(config={"max_epochs": 20.0, "sizes": [1, 2], "amp": True}),
            ["config.amp: added true", "config.max_epochs: 20 -> 20.0", "config.seed: removed 0"],
        ),
        (
            changed(code={"recipe.py": str(Digest.of(b"new")), "distributions": {"numpy": "2.1"}}),
            ['code.distributions.numpy: "2.0" -> "2.1"', "code.recipe.py changed"],
        ),
        (
            changed(data={}, environment={"torch": "2.9.1"}),
            ['data.digits: removed "1"', 'environment.torch: "2.9.0" -> "2.9.1"'],
        ),
    ],
)
def test_what_changed_is_said_in_words(new, lines):
    assert differences(KEY, new) == lines


def test_a_long_value_is_shown_in_part():
    (line,) = differences(KEY, changed(data={"digits": "x" * 500}))
    assert line.endswith("xxx...")
    assert len(line) < 120


def test_a_key_does_not_change_with_what_it_was_made_of():
    config = {"layers": [1, {"size": 2}]}
    key = StageKey(stage="train", version=1, config=config)
    before = copy.deepcopy(key.to_json()), key.digest
    config["layers"][1]["size"] = 3
    assert (key.to_json(), StageKey.from_json(key.to_json()).digest) == before


def test_a_value_without_json_form_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"config\.train\.lr: nan"):
        StageKey(stage="train", version=1, config={"train": {"lr": float("nan")}})


def test_a_key_of_another_format_is_refused():
    with pytest.raises(StoreUnusable, match=r"has format 2.*reads 1"):
        changed(format=2)
