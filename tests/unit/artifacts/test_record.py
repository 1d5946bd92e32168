"""Build records: the laws, and the format."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.artifacts.digest import Digest
from tasks.artifacts.key import StageKey
from tasks.artifacts.record import ArtifactRef, BuildRecord, Material
from tasks.errors import StoreUnusable

LAW = settings(deadline=None, max_examples=50)
DIGESTS = st.binary(max_size=3).map(Digest.of)
JSON_OBJECTS = st.dictionaries(st.text("abc"), st.none() | st.integers() | st.text("xyz") | st.lists(st.booleans()))
RECORDS = st.builds(
    BuildRecord,
    pipeline=st.sampled_from(["digits", "mnist"]),
    stage=st.just("train"),
    key=st.none() | st.builds(StageKey, stage=st.just("train"), version=st.integers(1, 3), config=JSON_OBJECTS),
    content=DIGESTS,
    materials=st.dictionaries(st.text("abc"), st.builds(Material, content=DIGESTS, record=DIGESTS), max_size=2),
    environment=JSON_OBJECTS,
    commands=st.lists(st.lists(st.text("ab "), max_size=3).map(tuple), max_size=2).map(tuple),
    metrics=st.dictionaries(st.text("abc"), st.floats(allow_nan=False, allow_infinity=False)),
    details=JSON_OBJECTS,
    byproducts=st.dictionaries(st.text("abc"), DIGESTS),
    started=st.just("2025-01-31T12:00:00.000000+00:00"),
    finished=st.just("2025-01-31T12:30:00.000000+00:00"),
    actor=st.just("ann@host"),
)


@LAW
@given(RECORDS)
def test_a_record_reads_back_from_its_bytes(record):
    again = BuildRecord.from_json(json.loads(record.to_bytes()))
    assert again == record
    assert again.id == record.id == Digest.of(record.to_bytes())
    assert again.to_bytes() == record.to_bytes()


@LAW
@given(RECORDS)
def test_a_record_of_another_format_is_refused(record):
    with pytest.raises(StoreUnusable, match=r"has format 7.*reads 1.*\n.*newer"):
        BuildRecord.from_json(record.to_json() | {"format": 7})


def test_an_artifact_is_called_by_pipeline_stage_and_number():
    ref = ArtifactRef(pipeline="digits", stage="engine", number=3, record=Digest.of(b"r"), content=Digest.of(b"c"))
    assert str(ref) == "digits/engine@3"
