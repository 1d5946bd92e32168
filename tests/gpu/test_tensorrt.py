"""TensorRT itself: build, load, run, compare, serve. For a machine with an NVIDIA GPU; never run without one so far.

    ENGINEHOUSE_GPU_TARGET=26.08 pytest tests/gpu -m gpu

The target is the Triton release whose TensorRT builds and whose server serves: by Docker, or with `trtexec` and
`tritonserver` on the PATH (inside NVIDIA's image, say). The fp16 tests on TensorRT 11 need `enginehouse engine setup
modelopt`.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tasks.engines.tensorrt_version import installed_version
from tasks.toolchain import builder_environment, probe
from tasks.toolchain.triton_releases import find_release
from tasks.toolchain.trtexec import read_plan_header, version_text
from tasks.toolchain.trtexec.place import Place

TARGET = os.environ.get("ENGINEHOUSE_GPU_TARGET", "26.08")
EXAMPLES = ["digits", "mnist", "code_or_prose"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not probe.gpus(), reason="nvidia-smi names no GPU here"),
]

needs_server = pytest.mark.skipif(shutil.which("tritonserver") is None, reason="tritonserver is not on the PATH")


def settings(**fields) -> list[str]:
    given = {"engine.kind": "tensorrt", "engine.target": TARGET} | {f"engine.{k}": v for k, v in fields.items()}
    return [part for name, value in given.items() for part in ("--set", f"{name}={value}")]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_engine_is_built_by_the_targets_tensorrt_for_this_gpu(workspaces, example):
    workspace = workspaces(example)
    report = workspace.report("run", workspace.pipeline(example), "--until", "engine", *settings(), timeout=3600)
    built = next(stage for stage in report["stages"] if stage["stage"] == "engine")
    assert built["state"] == "built"
    assert built["metrics"]["throughput_qps"] > 0
    shown = workspace.report("artifacts", "show", built["artifact"])
    passport = shown["record"]["details"]["passport"]
    assert passport["tensorrt"] == version_text(find_release(TARGET).tensorrt)
    assert passport["compute_capability"] == probe.gpus()[0].compute_capability
    assert passport["layers"]["count"] > 0
    again = workspace.report("run", workspace.pipeline(example), "--until", "engine", *settings())
    assert next(s for s in again["stages"] if s["stage"] == "engine")["state"] == "reused"


def test_the_plans_header_is_laid_out_as_we_read_it(workspaces, tmp_path):
    workspace = workspaces("digits")
    report = workspace.report("run", workspace.pipeline("digits"), "--until", "engine", *settings(), timeout=3600)
    artifact = next(s["artifact"] for s in report["stages"] if s["stage"] == "engine")
    plans = list(workspace.home.rglob("model.plan"))
    assert plans, artifact
    header = read_plan_header(plans[0])
    assert header.kind == "tensorrt"
    assert header.tensorrt == find_release(TARGET).tensorrt


def test_the_script_builds_the_engine_again(workspaces, tmp_path):
    workspace = workspaces("digits")
    workspace.report("run", workspace.pipeline("digits"), "--until", "engine", *settings(), timeout=3600)
    script = tmp_path / "reproduce.sh"
    script.write_text(workspace.enginehouse("artifacts", "show", "digits/engine", "--reproduce").stdout)
    graph = next(workspace.home.rglob("model.onnx"))
    subprocess.run(["sh", script, graph, tmp_path / "model.plan"], check=True, timeout=3600)
    assert read_plan_header(tmp_path / "model.plan").kind == "tensorrt"


PRECISIONS = ["fp32", "tf32", "fp16", "bf16", "int8"]


@needs_server
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("example", ["digits", "mnist"])
def test_the_engine_answers_as_pytorch_does_and_triton_serves_it(workspaces, example, precision):
    if precision != "fp32" and not builder_environment.find_environment("modelopt").is_ready:
        pytest.skip("make it with `enginehouse engine setup modelopt`")
    workspace = workspaces(f"{example}-{precision}")
    fields = {"precision": precision} | ({"keep_fp32": "auto"} if precision not in ("fp32", "tf32") else {})
    report = workspace.report(
        "run",
        workspace.pipeline(example),
        *settings(**fields),
        timeout=3600,
    )
    assert all(gate["passed"] for gate in report["gates"])
    assert report["release"]["version"] == 1
    workspace.enginehouse("serve", "stop")


@pytest.mark.skipif(shutil.which("trtexec") is None, reason="trtexec is not on the PATH")
def test_the_trtexec_here_tells_the_version_that_the_table_has_for_the_target():
    found = installed_version(Place(trtexec="trtexec"))
    assert found == find_release(TARGET).tensorrt


@needs_server
def test_an_engine_for_another_tensorrt_is_refused_before_anything_is_copied(workspaces):
    other = "26.05" if find_release(TARGET).tensorrt >= (11, 0, 0) else "26.08"
    workspace = workspaces("digits")
    # A launcher, so that only what serves here speaks against it, and not the trtexec here.
    elsewhere = {"builder": "{kind: local, launcher: [env]}", "compute_capability": probe.gpus()[0].compute_capability}
    given = [
        part if not part.startswith("engine.target=") else f"engine.target={other}" for part in settings(**elsewhere)
    ]
    refused = workspace.enginehouse("run", workspace.pipeline("digits"), *given, status=9, timeout=3600)
    assert version_text(find_release(other).tensorrt) in refused.stderr
    assert not list(workspace.repository.glob("*/*"))


def test_what_trtexec_refuses_is_told_in_its_own_words(workspaces):
    workspace = workspaces("digits")
    bad = ["--set", "engine.extra_flags=[--tacticSources=nonsense]"]
    failed = workspace.enginehouse(
        "run", workspace.pipeline("digits"), "--until", "engine", *settings(), *bad, status=4
    )
    assert "nonsense" in failed.stderr.partition("last lines:")[2]
