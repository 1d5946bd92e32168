"""Logs of trtexec. Those in golden/trtexec/logs are written anew after NVIDIA's documented format and the sources of
its reporting; none was recorded from a build."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.errors import CommandFailed, ConfigError, ToolMissing
from tasks.toolchain.trtexec import read_output
from tasks.toolchain.trtexec.failures import explain, failure_of, judge
from tasks.toolchain.trtexec.known_failures import KNOWN
from tasks.toolchain.trtexec.output import version_of_banner

LOGS = Path(__file__).parents[2] / "golden" / "trtexec" / "logs"


def lines(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text().splitlines()


def failed(ended: str = "exit status 1") -> CommandFailed:
    return CommandFailed("the engine's build", argv=["trtexec"], ended=ended)


@pytest.mark.parametrize(("name", "version"), [("passed_10", (10, 13, 3)), ("passed_11", (11, 2, 1))])
def test_a_build_that_passed_tells_its_version_sizes_and_times(name, version):
    output = read_output(lines(name))
    assert (output.version, output.outcome, output.errors) == (version, "passed", ())
    assert output.metrics["throughput_qps"] == pytest.approx(5123.4)
    assert output.metrics["latency_ms_mean"] == pytest.approx(0.195312)
    assert output.metrics["latency_ms_p99"] == pytest.approx(0.213867)
    assert output.metrics["gpu_compute_ms_median"] == pytest.approx(0.15918)
    assert output.metrics["engine_mib"] == pytest.approx(1.72)
    assert output.metrics["build_seconds"] == pytest.approx(14.2)
    assert output.device == {"gpu": "NVIDIA H200", "compute_capability": "9.0"}
    assert judge(output, lines(name), otherwise=failed()) is None


def test_only_the_last_of_two_runs_in_one_log_counts():
    output = read_output([*lines("passed_10"), *lines("unknown_option_11")])
    assert (output.version, output.outcome) == ((11, 2, 1), "failed")
    assert output.metrics == {}


def test_a_log_that_ends_in_the_middle_is_neither_passed_nor_failed():
    output = read_output(lines("passed_10")[:6])
    assert output.outcome == "neither"
    assert isinstance(judge(output, lines("passed_10")[:6], otherwise=failed()), CommandFailed)


@pytest.mark.parametrize(
    ("digits", "version"),
    [("100001", (10, 0, 1)), ("101303", (10, 13, 3)), ("110100", (11, 1, 0)), ("8601", (8, 6, 1))],
)
def test_the_number_in_the_first_line_is_read_for_each_generation(digits, version):
    assert version_of_banner(digits) == version


FAILURES = {
    "unknown_option_11": (ConfigError, ["--fp16", "engine.target", "in its place: the network's own types"]),
    "unsupported_operator_10": (CommandFailed, ["no layer for the operator Frobnicate", "While parsing node number 3"]),
    "unsupported_operator_11": (CommandFailed, ["no layer for the operator Unique", "engine.plugins"]),
    "graph_refused_11": (CommandFailed, ["ONNX parser refuses the graph", "engine.preflight: tensorrt-rtx"]),
    "no_profile_10": (ConfigError, ["no optimization profile was given", "declare the dynamic axes"]),
    "inverted_profile_11": (ConfigError, ["refuses an optimization profile", "1 <= min <= opt <= max"]),
    "static_given_shapes_10": (ConfigError, ["no dynamic axis, yet shapes were given"]),
    "workspace_10": (CommandFailed, ["no kernel fits the workspace", "engine.memory_pools.workspace"]),
    "gpu_memory_11": (CommandFailed, ["the GPU's memory is full"]),
    "no_gpu_10": (ToolMissing, ["there is no NVIDIA GPU"]),
    "driver_too_old_11": (ToolMissing, ["older than this CUDA needs", "enginehouse doctor"]),
    "driver_too_old_docker": (ToolMissing, ["older than this CUDA needs"]),
    "other_version_10": (CommandFailed, ["built by TensorRT 10.14.1.48, and this is 10.16.1.11", "engine.target"]),
    "other_serialisation_10": (
        CommandFailed,
        ["serialisation has version 236, and this one reads 239", "engine.target"],
    ),
    "other_device_10": (CommandFailed, ["compute capability 8.0, and this GPU has 9.0"]),
    "library_missing": (
        ToolMissing,
        ["libnvinfer.so.10 is not found", "LD_LIBRARY_PATH", "engine.builder: {kind: docker}"],
    ),
    "docker_without_gpus": (ToolMissing, ["cannot give a container a GPU", "nvidia-ctk"]),
    "docker_not_running": (ToolMissing, ["Docker engine does not answer"]),
    "image_missing": (ToolMissing, ["cannot be pulled", "docker login nvcr.io"]),
    "gpu_not_supported_11": (ToolMissing, ["does not support the GPU's generation"]),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_known_failure_becomes_a_typed_error_with_the_mend(name):
    kind, told = FAILURES[name]
    error = failure_of(failed(), lines(name))
    assert type(error) is kind
    for part in told:
        assert part in str(error)


def test_every_log_is_judged_and_every_known_failure_has_a_log():
    names = {path.stem for path in LOGS.glob("*.log")}
    assert names == {*FAILURES, "passed_10", "passed_11", "silently_one_10"}
    found = {explanation.kind for name in names if (explanation := explain(lines(name)))}
    assert found == {known.kind for known in KNOWN}


def test_a_dynamic_input_that_silently_became_1_is_a_failure_though_the_run_passed():
    output = read_output(lines("silently_one_10"))
    assert output.outcome == "passed"
    error = judge(output, lines("silently_one_10"), otherwise=failed("exit status 0"))
    assert isinstance(error, ConfigError)
    assert "silently build it for 1" in str(error)


@pytest.mark.parametrize(
    ("ended", "mend"),
    [
        ("killed by SIGKILL", "most likely for memory"),
        ("deadline of 7200 s passed", "raise engine.timeout_minutes"),
        ("cancelled", None),
    ],
)
def test_what_ended_from_outside_keeps_that_cause_whatever_the_log_holds(ended, mend):
    error = failure_of(failed(ended), lines("unknown_option_11"))
    assert type(error) is CommandFailed
    assert error.ended == ended
    assert "--fp16" not in str(error)
    assert mend is None or mend in str(error)


def test_a_cause_that_is_known_already_is_not_overwritten():
    failure = CommandFailed("the engine's build", argv=["trtexec"], ended="killed by SIGKILL", cause="out of memory")
    assert failure_of(failure, []) is failure


def test_a_builder_that_was_killed_inside_its_container_is_told_so():
    error = failure_of(failed("exit status 137"), ["[I] Start parsing network model."])
    assert "killed inside its container, most likely for memory" in str(error)


def test_an_unknown_failure_stays_what_it_was():
    failure = failed()
    assert failure_of(failure, ["[E] something that nobody has seen"]) is failure
