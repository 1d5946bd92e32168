"""What TensorRT-RTX, compiling on this machine's CPU, says of graphs: the table of onnx_graphs.py, for real.

A graph that it refuses, TensorRT will most likely refuse; one that it takes is no proof. The environment is made by
`enginehouse engine setup tensorrt-rtx`; .ci/run does so.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.toolchain import builder_environment
from tasks.toolchain.trtexec import read_plan_header

# Beside this file; the tests are no package.
_spec = importlib.util.spec_from_file_location("onnx_graphs", Path(__file__).with_name("onnx_graphs.py"))
onnx_graphs = importlib.util.module_from_spec(_spec)
sys.modules["onnx_graphs"] = onnx_graphs
_spec.loader.exec_module(onnx_graphs)
CASES, NEG, X, Y, graph = onnx_graphs.CASES, onnx_graphs.NEG, onnx_graphs.X, onnx_graphs.Y, onnx_graphs.graph

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not builder_environment.find_environment("tensorrt-rtx").is_ready,
        reason="make it with `enginehouse engine setup tensorrt-rtx`",
    ),
]

BOOTSTRAP = Path(builder_environment.__file__).parents[1] / "programs" / "bootstrap.py"


def preflight(folder: Path, profiles: list[dict], capability: str | None = None) -> subprocess.CompletedProcess[str]:
    job = {
        "onnx": str(folder / "model.onnx"),
        "profiles": profiles,
        "compute_capability": capability,
        "output": str(folder / "output"),
        "work": str(folder / "work"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    python = builder_environment.find_environment("tensorrt-rtx").python
    return subprocess.run(
        [str(python), "-I", str(BOOTSTRAP), "preflight", str(folder / "job.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def profiles_of(case) -> list[dict]:
    ends = ("min", "opt", "max")
    made = {end: {name: list(sizes[i]) for name, sizes in case.profile.items()} for i, end in enumerate(ends)}
    return [made] if case.profile else []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_graph_is_refused_with_its_nodes_or_compiles(tmp_path, case):
    case.make(tmp_path / "model.onnx")
    done = preflight(tmp_path, profiles_of(case))
    if case.refused is None:
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads((tmp_path / "output" / "report.json").read_text())
        assert report["plan_bytes"] > 0
        assert report["does_not_prove"]
    else:
        assert done.returncode == 1, done.stderr
        error = json.loads((tmp_path / "output" / "error.json").read_text())
        assert error["kind"] == "gate failed"
        assert re.search(case.refused, error["message"]), error["message"]
        assert error["hint"]
        assert "/_src/" not in error["message"], "places in NVIDIA's sources help nobody"
        assert "cudaError" not in error["message"], "that there is no driver here is no news"


def test_the_table_has_at_least_twenty_five_cases():
    assert len(CASES) >= 25
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("asked", "compiled"),
    [(None, "SM89"), ("9.0", "SM89"), ("8.6", "SM86"), ("12.0", "SM120"), ("6.1", "SM75")],
)
def test_it_compiles_for_the_nearest_older_generation_that_it_knows(tmp_path, asked, compiled):
    graph([NEG], [X], [Y])(tmp_path / "model.onnx")
    profile = {"min": {"x": [1, 3]}, "opt": {"x": [4, 3]}, "max": {"x": [8, 3]}}
    assert preflight(tmp_path, [profile], asked).returncode == 0
    assert json.loads((tmp_path / "output" / "report.json").read_text())["compiled_for"] == compiled


COMPILE = """\
import sys, tensorrt_rtx as trt
log = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(log)
network = builder.create_network(0)
assert trt.OnnxParser(network, log).parse_from_file(sys.argv[1])
config = builder.create_builder_config()
config.num_compute_capabilities = 1
config.set_compute_capability(trt.ComputeCapability.SM89, 0)
profile = builder.create_optimization_profile()
profile.set_shape("x", (1, 3), (4, 3), (8, 3))
config.add_optimization_profile(profile)
open(sys.argv[2], "wb").write(bytes(builder.build_serialized_network(network, config)))
"""


def test_the_header_of_a_real_plan_is_read(tmp_path):
    """A plan of TensorRT-RTX: the nearest thing to TensorRT's own that this machine can make."""
    graph([NEG], [X], [Y])(tmp_path / "model.onnx")
    python = builder_environment.find_environment("tensorrt-rtx").python
    plan = tmp_path / "model.plan"
    subprocess.run([str(python), "-I", "-c", COMPILE, str(tmp_path / "model.onnx"), str(plan)], check=True, timeout=300)
    header = read_plan_header(plan)
    assert header.kind == "tensorrt-rtx"
    assert (header.tensorrt, header.build) == ((1, 7, 1), 116)
    assert header.size == plan.stat().st_size
