"""The header of a plan, on files made here; one of a real TensorRT-RTX is read in the integration tests."""

from __future__ import annotations

import struct

import pytest

from tasks.toolchain.trtexec import read_plan_header


def plan(magic: bytes = b"ftrt", version: bytes = bytes((10, 16, 1, 11)), size: int = 4096) -> bytes:
    head = magic + struct.pack("<I", 239) + bytes(16) + version
    return head + bytes(max(0, size - len(head)))


def test_the_header_tells_which_tensorrt_wrote_the_plan(tmp_path):
    (tmp_path / "model.plan").write_bytes(plan())
    header = read_plan_header(tmp_path / "model.plan")
    assert (header.kind, header.tensorrt, header.build, header.size) == ("tensorrt", (10, 16, 1), 11, 4096)
    assert header.to_json()["tensorrt"] == "10.16.1.11"
    assert header.serialization_version == 239


def test_a_plan_of_tensorrt_rtx_is_told_apart(tmp_path):
    (tmp_path / "model.plan").write_bytes(plan(b"vtrt", bytes((1, 7, 1, 116))))
    assert read_plan_header(tmp_path / "model.plan").kind == "tensorrt-rtx"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "there is no plan"),
        (b"", "the plan is empty"),
        (b"\x08\x0a\x12\x07pytorch" + bytes(4096), "it is no TensorRT plan: it begins with"),
        (plan(size=64), "the plan is cut off: 64 bytes"),
        (b"ftrt", "the plan is cut off: 4 bytes"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_reason(tmp_path, content, told):
    if content is not None:
        (tmp_path / "model.plan").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        read_plan_header(tmp_path / "model.plan")
