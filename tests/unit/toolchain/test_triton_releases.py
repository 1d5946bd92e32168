"""The table of Triton's releases: consistent in itself, and asked as people write releases."""

from __future__ import annotations

import re
from datetime import date

import pytest

from tasks.toolchain.triton_releases import (
    RELEASES,
    find_release,
    highest_tensorrt_opset,
    onnxruntime_limits,
    release_name,
    release_of_server,
    release_text,
)


def test_the_table_holds_at_least_the_last_twelve_months_without_a_gap_oldest_first():
    months = [date(2000 + int(r.name[:2]), int(r.name[3:]), 1) for r in RELEASES]
    assert len(months) >= 12
    assert [(m.year * 12 + m.month) for m in months] == list(
        range(months[0].year * 12 + months[0].month, months[-1].year * 12 + months[-1].month + 1)
    )


def test_versions_only_grow_and_every_release_names_its_source():
    for field in ("tensorrt", "server", "onnxruntime", "cuda", "minimum_driver"):
        known = [getattr(r, field) for r in RELEASES if getattr(r, field) is not None]
        numbers = [v if isinstance(v, tuple) else tuple(map(int, re.findall(r"\d+", v))) for v in known]
        assert numbers == sorted(numbers), field
    assert all(r.source for r in RELEASES)


def test_the_table_holds_releases_of_both_generations():
    generations = {r.tensorrt[0] for r in RELEASES if r.tensorrt}
    assert generations == {10, 11}


@pytest.mark.parametrize(
    "text", ["26.08", "26.08-py3", "r26.08", "nvcr.io/nvidia/tritonserver:26.08-py3", "26.08-vllm-python-py3"]
)
def test_a_release_is_found_however_it_is_written(text):
    release = find_release(text)
    assert (release.name, release.tensorrt, release.image) == (
        "26.08",
        (11, 2, 1),
        "nvcr.io/nvidia/tritonserver:26.08-py3",
    )


def test_a_number_from_yaml_is_the_release_that_was_written():
    assert release_text(26.08) == "26.08"
    assert release_text(26.1) == "26.10"
    assert release_text("26.05-py3") == "26.05"
    assert release_text(["26.08"]) == ["26.08"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("26.80", "not in our table, which has 25.09 to 26.10"),
        ("latest", "expected a Triton release such as"),
        ("2.72.0", "expected a Triton release such as"),
    ],
)
def test_an_unknown_release_is_refused_with_what_is_known(text, told):
    with pytest.raises(ValueError, match=told):
        find_release(text)


def test_a_name_alone_need_not_be_in_the_table():
    assert release_name("31.01-py3") == "31.01"


def test_a_running_server_is_found_by_its_own_version():
    assert release_of_server("2.69.0").name == "26.05"
    assert release_of_server("2.51.0") is None


@pytest.mark.parametrize(
    ("version", "limits"),
    [
        ("1.21.0", None),
        ("1.22.0", (22, 10)),
        ("1.23.2", (23, 11)),
        ("1.24.4", (25, 13)),
        ("1.28.0", (26, 13)),
        ("1.40", (26, 13)),
    ],
)
def test_what_an_onnx_runtime_reads_is_what_was_measured(version, limits):
    assert onnxruntime_limits(version) == limits


@pytest.mark.parametrize(
    ("version", "opset"), [((10, 13, 3), None), ((10, 15, 1), 24), ((11, 4, 1), 24), ((11, 5, 0), 25)]
)
def test_what_tensorrt_parses_is_known_from_10_15_on(version, opset):
    assert highest_tensorrt_opset(version) == opset
