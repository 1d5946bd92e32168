"""What `enginehouse plan` shows of a GPU run on a machine without any, whole, against reviewed files.

One release with TensorRT 10 and one with 11: what runs where, in which image, and what the server will be told.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tasks.toolchain import probe

pytestmark = pytest.mark.skipif(
    bool(probe.gpus() or shutil.which("trtexec")), reason="the files are those of a machine without a GPU and trtexec"
)

GOLDEN = Path(__file__).parents[1] / "golden" / "trtexec" / "plans"
UPDATE = "ENGINEHOUSE_UPDATE_GOLDEN"  # set it to write the files anew, then review what git shows
ROOT = Path(__file__).parents[2]

GPU_STAGES = ("precision", "preflight", "engine", "triton_config")

SETTINGS = {
    "fp16": ["engine.precision=fp16"],
    "int8": ["engine.precision=int8", "engine.keep_fp32=auto", "engine.preflight=tensorrt-rtx"],
    "launcher": [
        "engine.compute_capability=9.0",
        "engine.builder={kind: local, trtexec: /usr/src/tensorrt/bin/trtexec, launcher: [srun, --gres=gpu:1]}",
    ],
}


def shown(workspace, *given: str) -> str:
    """The plan of the stages that the GPU is about, with this machine's own places replaced."""
    settings = [part for value in ("engine.kind=tensorrt", *given) for part in ("--set", value)]
    report = workspace.report("plan", workspace.pipeline("mnist"), *settings)
    lines = []
    for stage in report["stages"]:
        if stage["stage"] in GPU_STAGES:
            lines.append(stage["stage"])
            lines += [f"    $ {' '.join(command)}" for command in stage["commands"]]
            lines += [f"    {action}" for action in stage["actions"]]
    text = "\n".join(lines) + "\n"
    for place, name in (
        (str(workspace.home), "HOME"),
        (str(workspace.root), "FOLDER"),
        (sys.prefix, "ENVIRONMENT"),
        (str(ROOT), "ENGINEHOUSE"),
    ):
        text = text.replace(place, name)
    return re.sub(r"--user=\d+:\d+", "--user=UID:GID", re.sub(r"bin/python3?(\.\d+)?\b", "bin/python", text))


@pytest.mark.parametrize("target", ["26.05", "26.08"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_plan_is_to_the_letter_the_one_that_was_reviewed(planner, name, target):
    text = shown(planner, f"engine.target={target}", *SETTINGS[name])
    golden = GOLDEN / f"{name}.{target}.txt"
    if os.environ.get(UPDATE):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_a_release_of_unknown_tensorrt_is_planned_with_how_to_find_out(planner):
    text = shown(planner, "engine.target=26.09")
    assert "with a TensorRT that our table does not know" in text
    assert "docker run --rm nvcr.io/nvidia/tritonserver:26.09-py3 /usr/src/tensorrt/bin/trtexec --help" in text


@pytest.fixture(scope="module")
def planner(workspaces):
    return workspaces("plans")
