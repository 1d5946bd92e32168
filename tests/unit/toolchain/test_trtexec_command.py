"""Command lines of trtexec, whole, against reviewed files: one per request and version."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.config import AxisRange
from tasks.errors import ConfigError
from tasks.toolchain.trtexec import (
    BuildRequest,
    OptimizationProfile,
    carried_by_graph,
    flag_problem,
    profile_of,
    trtexec_command,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "trtexec" / "commands"
UPDATE = "ENGINEHOUSE_UPDATE_GOLDEN"  # set it to write the files anew, then review what git shows

V10, V11 = (10, 13, 3), (11, 2, 1)
VERSIONS = {"10": V10, "11": V11}
BATCH = AxisRange(min=1, opt=8, max=32)
IMAGE = profile_of({"image": ["batch", 1, 28, 28]}, {"batch": BATCH})
TEXT = {"tokens": ["batch", "length"], "mask": ["batch", "length"], "scale": [1]}
SHORT = profile_of(TEXT, {"batch": BATCH, "length": AxisRange(min=1, opt=16, max=64)})
LONG = profile_of(TEXT, {"batch": AxisRange(min=1, opt=1, max=4), "length": AxisRange(min=64, opt=256, max=512)})


def request(version, **fields) -> BuildRequest:
    return BuildRequest(version=version, onnx=Path("/store/export/model.onnx"), plan=Path("/work/model.plan"), **fields)


CASES = {
    "fp32": {"profiles": [IMAGE]},
    "tf32": {"profiles": [IMAGE], "precision": "tf32"},
    "fp16": {"profiles": [IMAGE], "precision": "fp16"},
    "fp16_in_the_graph": {"profiles": [IMAGE], "precision": "fp16", "strongly_typed": True},
    "bf16": {"profiles": [IMAGE], "precision": "bf16"},
    "int8": {"profiles": [IMAGE], "precision": "int8", "strongly_typed": True},
    "fp8": {"profiles": [IMAGE], "precision": "fp8", "strongly_typed": True},
    "static": {"profiles": [profile_of({"x": [4, 3]}, {})]},
    "several_inputs": {"profiles": [SHORT]},
    "several_profiles": {"profiles": [SHORT, LONG]},
    "everything": {
        "profiles": [IMAGE],
        "precision": "fp16",
        "memory_pools": {"workspace": 4096, "tacticSharedMem": 100},
        "builder_optimization_level": 5,
        "hardware_compatibility": "ampere+",
        "version_compatible": True,
        "sparsity": "enable",
        "plugins": [Path("/p/libone.so"), Path("/p/libtwo.so")],
        "timing_cache": Path("/home/timing/tensorrt.cache"),
        "layer_info": Path("/work/layers.json"),
        "extra_flags": ["--avgTiming=16", "--maxAuxStreams=0"],
    },
    "without_weights": {"profiles": [IMAGE], "strip_weights": True},
    "without_measuring": {"profiles": [IMAGE], "measure": False},
}


@pytest.mark.parametrize("generation", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_a_command_line_is_to_the_letter_the_one_that_was_reviewed(name, generation):
    command = trtexec_command("trtexec", request(VERSIONS[generation], **CASES[name]))
    text = " \\\n    ".join(map(shlex.quote, command)) + "\n"
    golden = GOLDEN / f"{name}.{generation}.txt"
    if os.environ.get(UPDATE):
        golden.write_text(text)
    assert text == golden.read_text()


def test_every_golden_file_belongs_to_a_case():
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.{v}.txt" for name in CASES for v in VERSIONS}


@given(
    st.sampled_from([(10, 0, 1), V10, (11, 0, 0), V11, (11, 5, 0)]),
    st.sampled_from(["fp32", "tf32", "fp16", "bf16", "int8", "fp8"]),
    st.booleans(),
    st.sampled_from(sorted(CASES)),
)
def test_no_version_is_ever_given_an_option_that_it_lacks(version, precision, typed, name):
    fields = CASES[name] | {"precision": precision, "strongly_typed": typed}
    for argument in trtexec_command("trtexec", request(version, **fields))[1:]:
        assert flag_problem(argument, version) is None


@pytest.mark.parametrize(
    ("precision", "on_10", "on_11"),
    [
        ("fp32", False, False),
        ("tf32", False, False),
        ("fp16", False, True),
        ("bf16", False, True),
        ("int8", True, True),
        ("fp8", True, True),
    ],
)
def test_the_graph_carries_the_precision_wherever_no_flag_can(precision, on_10, on_11):
    assert carried_by_graph(precision, V10) is on_10
    assert carried_by_graph(precision, V11) is on_11
    assert carried_by_graph(precision, V10, asked=True) is (on_10 or precision in ("fp16", "bf16"))


@pytest.mark.parametrize(
    ("flags", "version", "told"),
    [
        (["--fp16"], V11, "engine.extra_flags.0: --fp16 is gone since TensorRT 11.0.0"),
        (["--useCudaGraph"], V11, "does nothing since TensorRT 11.0.0"),
        (["--verbose", "--frob"], V10, "engine.extra_flags.1: trtexec has no option --frob"),
        (["--saveEngine=/elsewhere"], V10, "--saveEngine is given by the stage itself"),
        (
            ["--memPoolSize=workspace:1"],
            V11,
            "has a field of its own: expected engine.memory_pools",
        ),
        (["--weightless"], V10, "expected engine.strip_weights instead"),
        (["--int4"], V10, "expected engine.precision instead"),
        (["--help"], V11, "with --help trtexec builds no engine"),
        (["--avgTiming=8", "--avgTiming=16"], V11, "engine.extra_flags.1: --avgTiming is given twice"),
        (["--avgTiming=8 --verbose"], V11, "expected one argument of trtexec per entry of the list"),
        (["rm"], V10, "is no option"),
    ],
)
def test_the_escape_hatch_is_checked(flags, version, told):
    with pytest.raises(ConfigError, match=r"engine\.extra_flags") as refused:
        trtexec_command("trtexec", request(version, profiles=[IMAGE], extra_flags=flags))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("profile", "told"),
    [
        (
            OptimizationProfile(min={"x": (8, 3)}, opt={"x": (1, 3)}, max={"x": (32, 3)}),
            "x: expected min <= opt <= max on every axis, got 8x3 / 1x3 / 32x3",
        ),
        (
            OptimizationProfile(min={"x": (1,)}, opt={"x": (1, 3)}, max={"x": (1, 3)}),
            "x: min, opt and max have different numbers of axes",
        ),
        (OptimizationProfile(min={}, opt={"x": (1, 3)}, max={"x": (1, 3)}), "min, opt and max name different inputs"),
    ],
)
def test_a_profile_that_tensorrt_would_refuse_is_refused_first(profile, told):
    with pytest.raises(ConfigError, match=r"engine\.profiles\.0") as refused:
        trtexec_command("trtexec", request(V10, profiles=[profile]))
    assert told in str(refused.value)
