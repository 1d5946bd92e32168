"""The table of trtexec's options: what each version has, and what a command line is told about the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.toolchain.trtexec.options import TABLE, find_option, flag_problem, options_of, parse_version, version_text

V10, V11 = (10, 13, 3), (11, 1, 0)

REMOVED_BY_11 = [
    *("fp16", "bf16", "int8", "fp8", "int4", "best", "calib", "calibProfile"),
    *("layerPrecisions", "layerOutputTypes", "precisionConstraints"),
    *("minShapesCalib", "optShapesCalib", "maxShapesCalib", "plugins", "streams"),
]
WITHOUT_EFFECT_ON_11 = ["useCudaGraph", "useSpinWait", "noDataTransfers", "separateProfileRun", "stronglyTyped"]
SAME_ON_BOTH = [
    *("onnx", "saveEngine", "minShapes", "optShapes", "maxShapes", "profile", "memPoolSize"),
    *("builderOptimizationLevel", "skipInference", "noTF32", "hardwareCompatibilityLevel", "versionCompatible"),
    *("stripWeights", "sparsity", "staticPlugins", "timingCacheFile", "exportLayerInfo"),
]


def written(name: str) -> str:
    option = find_option(f"--{name}")
    assert option is not None
    return option.name if option.value == "none" else f"{option.name}=1"


@pytest.mark.parametrize("name", REMOVED_BY_11)
def test_an_option_that_11_removed_is_taken_by_10_and_refused_for_11_with_its_replacement(name):
    assert flag_problem(written(name), V10) is None
    problem = flag_problem(written(name), V11)
    assert "is gone since TensorRT 11.0.0" in problem
    assert "target has TensorRT 11.1.0" in problem
    assert ": use " in problem


@pytest.mark.parametrize("name", WITHOUT_EFFECT_ON_11)
def test_an_option_that_11_ignores_is_refused_for_11_since_whoever_wrote_it_expects_something(name):
    assert flag_problem(written(name), V10) is None
    assert "does nothing since TensorRT 11.0.0" in flag_problem(written(name), V11)


@pytest.mark.parametrize("version", [(10, 0, 1), V10, V11, (11, 5, 0)])
@pytest.mark.parametrize("name", SAME_ON_BOTH)
def test_what_the_planner_emits_is_there_in_every_version(name, version):
    assert flag_problem(written(name), version) is None


@pytest.mark.parametrize("flag", ["--workspace=1024", "--buildOnly", "--minTiming=1", "--explicitBatch"])
@pytest.mark.parametrize("version", [V10, V11])
def test_what_scripts_for_8_still_hold_is_refused_everywhere(flag, version):
    assert "is gone since TensorRT 10.0.0" in flag_problem(flag, version)


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--fp61", "has no option --fp61: did you mean --fp16?"),
        ("--frobnicate", "has no option --frobnicate"),
        ("fp16", "expected --name or --name=value"),
        ("--fp16=true", "--fp16 takes no value, got 'true'"),
        ("--sparsity", "--sparsity needs a value: expected --sparsity=…"),
        ("--independentWeightLayouts", "came with TensorRT 11.5.0, and the target has TensorRT 10.13.3"),
    ],
)
def test_what_is_wrong_with_a_flag_is_said_in_one_line(flag, told):
    assert told in flag_problem(flag, V10)


def test_an_option_of_a_later_release_is_taken_from_then_on():
    assert flag_problem("--independentWeightLayouts", (11, 5, 0)) is None


def test_every_option_stands_once_and_names_its_source():
    names = [option.name for option in TABLE]
    assert len(set(names)) == len(names)
    assert all(option.source for option in TABLE)


@given(st.sampled_from(TABLE), st.sampled_from([(10, 0, 0), V10, (11, 0, 0), V11, (11, 5, 0)]))
def test_a_version_has_an_option_exactly_if_nothing_is_wrong_with_giving_it(option, version):
    flag = option.name if option.value == "none" else f"{option.name}=x"
    assert (option in options_of(version)) == (flag_problem(flag, version) is None)


@given(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)))
def test_a_version_survives_being_written_and_read(version):
    assert parse_version(version_text(version)) == version


@pytest.mark.parametrize(
    ("text", "version"), [("10.13.3.9", (10, 13, 3)), ("11.2", (11, 2, 0)), ("10.14.1.48.post1", (10, 14, 1))]
)
def test_versions_are_read_as_nvidia_writes_them(text, version):
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["", "11", "v11.1", "11.1.x", "latest"])
def test_what_is_no_version_is_refused(text):
    with pytest.raises(ValueError, match=r"expected a version such as 10\.13\.3"):
        parse_version(text)
