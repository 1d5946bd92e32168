"""Whether an engine goes to a server at all is decided before anything is copied: by the record, and by the target."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flows.release import refuse_unfit
from tasks.artifacts.digest import Digest
from tasks.artifacts.record import ArtifactRef
from tasks.engines.passport import ServerFacts
from tasks.errors import Refused
from tasks.pipeline_file import load

ENGINE = ArtifactRef(pipeline="digits", stage="engine", number=3, record=Digest.of(b"r"), content=Digest.of(b"c"))
PASSPORT = {
    "tensorrt": "11.2.1",
    "compute_capability": "9.0",
    "gpu": "NVIDIA H200",
    "hardware_compatibility": "none",
    "version_compatible": False,
}


def job(tmp_path, engine):
    (tmp_path / "recipe.py").write_text("class Digits:\n    outputs = ('logits',)\n")
    (tmp_path / "pipeline.yaml").write_text(
        'name: digits\nrecipe: recipe.py:Digits\ndata: {d: {version: "1"}}\n'
        f"inputs: {{x: {{dtype: float32, shape: [4]}}}}\nengine: {engine}\n"
    )
    record = SimpleNamespace(details={"passport": PASSPORT})
    return SimpleNamespace(
        pipeline=load(tmp_path / "pipeline.yaml"), store=SimpleNamespace(get_record=lambda ref: record)
    )


def target(server_version, gpus):
    facts = ServerFacts.of("the server here", server_version=server_version, compute_capabilities=gpus)
    return SimpleNamespace(facts=lambda: facts)


def test_a_server_with_another_tensorrt_or_gpu_is_refused_with_both_sides_named(tmp_path):
    with pytest.raises(Refused) as refused:
        refuse_unfit(job(tmp_path, "{kind: tensorrt}"), ENGINE, target("2.69.0", ["8.0"]))
    text = str(refused.value)
    for part in ("digits/engine@3", "TensorRT 11.2.1", "carries 10.16.1", "compute capability 9.0", "has 8.0"):
        assert part in text
    assert "nothing was copied" in text


def test_a_server_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(Refused, match="has no GPU"):
        refuse_unfit(job(tmp_path, "{kind: tensorrt}"), ENGINE, target("2.72.0", []))


def test_a_server_that_fits_is_taken(tmp_path):
    refuse_unfit(job(tmp_path, "{kind: tensorrt}"), ENGINE, target("2.72.0", ["9.0"]))


def test_a_graph_that_is_served_as_it_is_fits_everywhere(tmp_path):
    refuse_unfit(job(tmp_path, "{kind: onnxruntime}"), ENGINE, target("2.51.0", []))
