"""What `enginehouse doctor` says of environments that are made up, and of this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows import doctor
from tasks.errors import ToolMissing
from tasks.pipeline_file import load
from tasks.toolchain import probe
from tasks.toolchain.probe import Gpu

HERE = {
    "torch": "2.13.0+cpu",
    "onnx": "1.23.2",
    "onnxscript": "0.7.2",
    "prefect": "3.9.1",
    "tritonclient": "2.73.0",
    "numpy": "2.4.6",
    "onnxruntime": "1.32.0",
}
H200 = Gpu(name="NVIDIA H200", compute_capability="9.0", memory_mib=143771, driver="595.58.03")
PIPELINE = """\
name: digits
recipe: recipe.py:Digits
data: {digits: {version: "1"}}
shapes: {batch: {min: 1, opt: 8, max: 32}}
inputs: {image: {dtype: float32, shape: [batch, 1, 8, 8]}}
"""


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """An environment of these distributions and GPUs, without a Triton server."""

    def make(distributions=HERE, gpus=()) -> None:
        monkeypatch.setattr(probe, "distribution_version", dict(distributions).get)
        monkeypatch.setattr(probe, "gpus", lambda: tuple(gpus))
        monkeypatch.setenv("PATH", str(tmp_path))

        def missing():
            raise ToolMissing("Triton", why="there is none", mend="enginehouse serve setup")

        monkeypatch.setattr(doctor, "find_installation", missing)

    return make


@pytest.fixture
def pipeline(tmp_path):
    def make(engine: dict, **export):
        (tmp_path / "recipe.py").write_text("class Digits:\n    outputs = ('logits',)\n")
        text = PIPELINE + f"engine: {json.dumps(engine)}\nexport: {json.dumps(export)}\n"
        (tmp_path / "pipeline.yaml").write_text(text)
        return load(tmp_path / "pipeline.yaml")

    return make


def told(findings, subject):
    return [(f.state, f.found, f.mend) for f in findings if f.subject == subject]


def test_what_is_there_is_told_with_its_version(environment):
    environment()
    findings = doctor.examine()
    assert told(findings, "torch") == [("ok", "2.13.0+cpu, a CPU build", "")]
    assert told(findings, "onnxruntime") == [("ok", "1.32.0", "")]
    assert told(findings, "GPU")[0][0] == "note"
    assert told(findings, "Triton") == [("error", "there is none", "enginehouse serve setup")]


def test_a_distribution_that_is_missing_is_an_error_with_the_way_to_get_it(environment):
    environment({name: version for name, version in HERE.items() if name != "onnxscript"})
    assert told(doctor.examine(), "onnxscript") == [("error", "not installed", "pip install onnxscript")]


def test_both_builds_of_onnxruntime_are_an_error_since_they_share_a_module(environment):
    environment(HERE | {"onnxruntime-gpu": "1.32.0"})
    ((state, found, mend),) = told(doctor.examine(), "onnxruntime")
    assert state == "error"
    assert "they install the same module over each other" in found
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in mend


def test_the_gpu_build_without_a_gpu_is_a_warning_since_it_falls_back_silently(environment):
    gpu_build = {name: version for name, version in HERE.items() if name != "onnxruntime"} | {
        "onnxruntime-gpu": "1.32.0"
    }
    environment(gpu_build)
    assert told(doctor.examine(), "onnxruntime")[0][0] == "warning"
    environment(gpu_build, [H200])
    assert told(doctor.examine(), "onnxruntime")[0][0] == "ok"


def test_no_onnxruntime_at_all_is_an_error(environment):
    environment({name: version for name, version in HERE.items() if name != "onnxruntime"})
    assert told(doctor.examine(), "onnxruntime")[0][0] == "error"


@pytest.mark.parametrize(
    ("version", "said"),
    [("2.13.0+cpu", "a CPU build"), ("2.13.0+cu130", "for CUDA 13.0"), ("2.13.0", "its build says no more")],
)
def test_a_build_of_torch_is_told_by_its_version(environment, version, said):
    environment(HERE | {"torch": version})
    assert said in told(doctor.examine(), "torch")[0][1]


def test_an_old_gpu_is_an_error(environment):
    environment(gpus=[Gpu(name="Tesla P4", compute_capability="6.1", memory_mib=8000, driver="535.86")])
    assert told(doctor.examine(), "GPU")[0][0] == "error"


def test_a_driver_older_than_the_targets_cuda_is_a_warning_that_names_both(environment, pipeline):
    environment(gpus=[H200])
    findings = doctor.examine(pipeline({"kind": "onnxruntime", "target": "26.08"}))
    ((state, found, mend),) = told(findings, "driver")
    assert state == "warning"
    assert "595.58.03; CUDA 13.4.1 came with 615.61" in found
    assert "forward compatibility" in mend
    fits = doctor.examine(pipeline({"kind": "onnxruntime", "target": "26.05"}))
    assert told(fits, "driver")[0][0] == "ok"


@pytest.mark.parametrize(
    ("engine", "opset", "said"),
    [
        ({"kind": "onnxruntime", "target": "25.11"}, 24, "its ONNX Runtime 1.23.2 loads up to 23"),
        ({"kind": "tensorrt", "target": "26.08"}, 25, "newer than TensorRT 11.2.1 reads, which is 24"),
    ],
)
def test_an_opset_that_the_target_does_not_read_is_an_error(environment, pipeline, engine, opset, said):
    environment()
    findings = doctor.examine(pipeline(engine, opset_version=opset))
    ((state, found, mend),) = told(findings, "export.opset_version")
    assert state == "error"
    assert said in found
    assert "choose a later engine.target" in mend


def test_what_a_pipelines_engine_needs_is_told_in_the_words_of_a_run(environment, pipeline, monkeypatch, tmp_path):
    environment()
    monkeypatch.setenv("ENGINEHOUSE_MODELOPT", str(tmp_path / "never_made"))
    findings = doctor.examine(pipeline({"kind": "tensorrt", "target": "26.08", "precision": "fp16"}))
    assert "modelopt" in told(findings, "precision")[0][1]
    assert told(findings, "precision")[0][2] == "Make it with `enginehouse engine setup modelopt`."
    assert told(findings, "engine")[0][0] == "error"
    assert doctor.worst(findings) == "error"


def test_a_trtexec_of_another_version_than_the_targets_is_an_error(environment, pipeline, tmp_path):
    """A small program stands in for trtexec: it prints the first line of its help."""
    environment(gpus=[H200])
    program = tmp_path / "trtexec"
    program.write_text("#!/bin/sh\necho '&&&& RUNNING TensorRT.trtexec [TensorRT v101601] [b11] # trtexec --help'\n")
    program.chmod(0o755)
    (tmp_path / "flock").write_text("#!/bin/sh\n")
    (tmp_path / "flock").chmod(0o755)
    same = doctor.examine(pipeline({"kind": "tensorrt", "target": "26.05"}))
    assert told(same, "engine") == [("ok", "has what it needs", "")]
    ((state, found, mend),) = told(doctor.examine(pipeline({"kind": "tensorrt", "target": "26.08"})), "engine")
    assert (state, "engine.target: TensorRT 11.2.1 shall build" in found) == ("error", True)
    assert "engine.builder.kind: docker" in mend


def test_without_a_target_there_is_a_note_how_to_name_one(environment, pipeline):
    environment()
    assert told(doctor.examine(pipeline({"kind": "onnxruntime"})), "target")[0][0] == "note"


def test_findings_become_flat_json(environment):
    environment()
    assert all(set(f.to_json()) == {"subject", "found", "state", "mend"} for f in doctor.examine())


def test_the_page_on_tensorrt_holds_the_tables_of_today():
    from tasks.toolchain.trtexec.reference import with_tables

    page = Path(__file__).parents[3] / "docs" / "tensorrt.md"
    text = page.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run: python -m tasks.toolchain.trtexec.reference docs/tensorrt.md"
