"""Whether an engine goes to a server at all is decided before anything is copied: by the record, and by the target."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flows.releases import refuse_unfit, refuse_unfit_plan
from tasks.artifacts.digest import Digest
from tasks.engines.passport import ServerFacts
from tasks.errors import Refused
from tasks.pipeline_file import load

PASSPORT = {
    "tensorrt": "11.2.1",
    "compute_capability": "9.0",
    "gpu": "NVIDIA H200",
    "hardware_compatibility": "none",
    "version_compatible": False,
}


def pipeline(tmp_path, engine):
    (tmp_path / "recipe.py").write_text("class Digits:\n    outputs = ('logits',)\n")
    (tmp_path / "pipeline.yaml").write_text(
        'name: digits\nrecipe: recipe.py:Digits\ndata: {d: {version: "1"}}\n'
        f"inputs: {{x: {{dtype: float32, shape: [4]}}}}\nengine: {engine}\n"
    )
    return load(tmp_path / "pipeline.yaml")


def refuse(pipeline, target):
    record = SimpleNamespace(details={"passport": PASSPORT})
    store = SimpleNamespace(get_record=lambda digest: record)
    refuse_unfit(store, pipeline, "digits/engine@3", Digest.of(b"r"), target)


def target(server_version, gpus):
    facts = ServerFacts.of("the server here", server_version=server_version, compute_capabilities=gpus)
    return SimpleNamespace(facts=lambda: facts)


def test_a_server_with_another_tensorrt_or_gpu_is_refused_with_both_sides_named(tmp_path):
    with pytest.raises(Refused) as refused:
        refuse(pipeline(tmp_path, "{kind: tensorrt}"), target("2.69.0", ["8.0"]))
    text = str(refused.value)
    for part in ("digits/engine@3", "TensorRT 11.2.1", "carries 10.16.1", "compute capability 9.0", "has 8.0"):
        assert part in text
    assert "nothing was copied" in text


def test_a_server_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(Refused, match="has no GPU"):
        refuse(pipeline(tmp_path, "{kind: tensorrt}"), target("2.72.0", []))


def test_a_server_that_fits_is_taken(tmp_path):
    refuse(pipeline(tmp_path, "{kind: tensorrt}"), target("2.72.0", ["9.0"]))


def test_a_graph_that_is_served_as_it_is_fits_everywhere(tmp_path):
    refuse(pipeline(tmp_path, "{kind: onnxruntime}"), target("2.51.0", []))


@pytest.mark.parametrize(
    ("engine", "server", "part"),
    [
        ("{kind: tensorrt, target: 26.08, compute_capability: 9.0}", ("2.69.0", ["9.0"]), "carries 10.16.1"),
        ("{kind: tensorrt, target: 26.08, compute_capability: 9.0}", ("2.72.0", ["8.0"]), "has 8.0"),
        ("{kind: tensorrt, target: 26.08}", ("2.72.0", []), "needs a GPU, and the server here"),
    ],
)
def test_what_the_pipeline_file_promises_is_held_against_the_server_before_anything_runs(
    tmp_path, monkeypatch, engine, server, part
):
    monkeypatch.setattr("tasks.toolchain.probe.gpus", tuple)
    with pytest.raises(Refused, match="nothing was run") as refused:
        refuse_unfit_plan(pipeline(tmp_path, engine), target(*server))
    assert part in str(refused.value)


@pytest.mark.parametrize(
    ("engine", "server"),
    [
        ("{kind: tensorrt, target: 26.08, compute_capability: 9.0}", ("2.72.0", ["9.0"])),
        ("{kind: tensorrt}", ("2.72.0", ["9.0"])),
        (
            "{kind: tensorrt, target: 26.05, compute_capability: 8.6, hardware_compatibility: ampere+}",
            ("2.69.0", ["9.0"]),
        ),
        ("{kind: onnxruntime}", ("2.51.0", [])),
    ],
)
def test_what_is_not_known_before_the_build_is_held_against_nobody(tmp_path, monkeypatch, engine, server):
    monkeypatch.setattr("tasks.toolchain.probe.gpus", tuple)
    refuse_unfit_plan(pipeline(tmp_path, engine), target(*server))
