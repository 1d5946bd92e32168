"""The engine kind `tensorrt`: what it refuses before anything runs, what its key holds, and how it judges a build.

The builds here are those of small programs in trtexec's place, labelled as such: they prove that processes are started,
ended and judged rightly, and nothing about TensorRT.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from tasks import engine
from tasks.config import Pipeline
from tasks.engines.tensorrt import TensorRTEngine
from tasks.engines.tensorrt_config import (
    converts,
    declared_version,
    profiles_of,
    tolerance_of,
)
from tasks.engines.tensorrt_version import version_of
from tasks.errors import CommandFailed, ConfigError, EnginehouseError, ToolMissing
from tasks.pipeline_file import load
from tasks.stage import Site, run_step
from tasks.toolchain import probe
from tests.trtexec_stand_in import GOOD, LOGS, PIPELINE, PLAN, RECIPE, SAVE, program


@pytest.fixture(autouse=True)
def _no_gpu_of_this_machine(monkeypatch, tmp_path):
    """Whatever this machine has: a test says itself which GPU and which trtexec there are."""
    monkeypatch.setattr(probe, "gpus", tuple)
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.fixture
def pipeline(tmp_path):
    def make(**fields) -> Pipeline:
        folder = tmp_path / "pipeline"
        folder.mkdir(exist_ok=True)
        (folder / "recipe.py").write_text(RECIPE)
        file = folder / "pipeline.yaml"
        file.write_text(PIPELINE + "engine: " + json.dumps({"kind": "tensorrt"} | fields) + "\n")
        return load(file)

    return make


TARGET = {"target": "26.05", "compute_capability": "9.0"}

REFUSED_IN_THE_FILE = {
    "an unknown release": ({"target": "26.80"}, "engine.target: Triton release 26.80 is not in our table"),
    "no version": ({"tensorrt": "ten"}, "engine.tensorrt: expected a version such as 10.13.3, got 'ten'"),
    "no capability": ({"compute_capability": "hopper"}, "expected a compute capability such as 9.0"),
    "an unknown precision": ({"precision": "fp61"}, "did you mean fp16?"),
    "a misspelt field": ({"memory_pool": {}}, "did you mean engine.memory_pools?"),
    "keep_fp32 in fp32": ({"keep_fp32": "auto"}, "keep_fp32 says what stays out of a lower precision"),
    "fp8 by onnxruntime": ({"precision": "fp8", "quantizer": "onnxruntime"}, "quantizer onnxruntime makes int8 only"),
    "an unknown pool": ({"memory_pools": {"workspce": 1}}, "engine.memory_pools.workspce"),
    "a level out of range": ({"builder_optimization_level": 6}, "expected at most 5"),
    "two that exclude each other": ({"version_compatible": True, "strip_weights": True}, "exclude each other"),
    "another version than the target's": (
        {"target": "26.05", "tensorrt": "11.1.0"},
        "engine.tensorrt: 11.1.0 is not what Triton 26.05 carries, 10.16.1",
    ),
    "a generation that we know nothing of": ({"tensorrt": "8.6.1"}, "expected 10.x or 11.x"),
    "an axis that is not declared": (
        {"profiles": [{"length": {"min": 1, "opt": 1, "max": 2}}]},
        "engine.profiles.0.length: shapes declares no axis length (it declares batch)",
    ),
    "a profile outside shapes": (
        {"profiles": [{"batch": {"min": 1, "opt": 8, "max": 64}}]},
        "engine.profiles.0.batch: 1 to 64 leaves shapes.batch, 1 to 32",
    ),
    "profiles that serving leaves": (
        {"profiles": [{"batch": {"min": 1, "opt": 1, "max": 2}}, {"batch": {"min": 1, "opt": 4, "max": 8}}]},
        "engine.profiles: no profile reaches serve.max_batch_size, 32: the largest batch is 8",
    ),
    "a flag that the version lacks": (
        {"target": "26.08", "extra_flags": ["--best"]},
        "engine.extra_flags.0: --best is gone since TensorRT 11.0.0",
    ),
    "a word where a list belongs": (
        {"precision": "fp16", "keep_fp32": "automatic"},
        "engine.keep_fp32: expected 'auto' or a list, got the text 'automatic' (did you mean auto?)",
    ),
    "an inverted range": ({"profiles": [{"batch": {"min": 8, "opt": 4, "max": 32}}]}, "expected min <= opt <= max"),
}


@pytest.mark.parametrize("name", REFUSED_IN_THE_FILE)
def test_what_is_wrong_in_the_file_is_told_at_its_line(pipeline, name):
    fields, told = REFUSED_IN_THE_FILE[name]
    with pytest.raises(ConfigError) as refused:
        pipeline(**fields)
    assert told in str(refused.value)
    assert "pipeline.yaml:7" in str(refused.value)


REFUSED_BEFORE_THE_RUN = {
    "no target": ({"compute_capability": "9.0"}, ConfigError, "names no TensorRT to build with"),
    "a release of unknown TensorRT": (
        {"target": "26.09", "compute_capability": "9.0"},
        ConfigError,
        "our table does not know which TensorRT Triton 26.09 carries",
    ),
    "a plugin that is not there": (TARGET | {"plugins": ["libno.so"]}, ConfigError, "there is no plugin"),
    "docker without an image": (
        {"tensorrt": "10.16.1", "compute_capability": "9.0", "builder": {"kind": "docker"}},
        ConfigError,
        "engine.builder.image: docker needs an image",
    ),
    "no trtexec": (
        TARGET | {"builder": {"kind": "local"}},
        ToolMissing,
        "trtexec is missing: engine.kind: tensorrt builds with it",
    ),
    "no such trtexec": (
        TARGET | {"builder": {"trtexec": "bin/trtexec"}},
        ToolMissing,
        "bin/trtexec is no program here",
    ),
    "a launcher to a GPU that nobody names": (
        {"target": "26.05", "builder": {"launcher": ["true"]}},
        ConfigError,
        "engine.compute_capability: is not given, and engine.builder.launcher reaches a machine",
    ),
    "no such launcher": (
        TARGET | {"builder": {"launcher": ["srnu", "--gres=gpu:1"]}},
        ToolMissing,
        "srnu is missing: engine.builder.launcher begins with it",
    ),
}


@pytest.mark.parametrize("name", REFUSED_BEFORE_THE_RUN)
def test_what_can_be_known_before_a_run_is_refused_before_it(pipeline, name):
    fields, kind, told = REFUSED_BEFORE_THE_RUN[name]
    with pytest.raises(kind) as refused:
        engine.STAGE.check(pipeline(**fields))
    assert told in str(refused.value)


@pytest.fixture
def trtexec(tmp_path, monkeypatch):
    """Stands in for a trtexec on the PATH: prints the first line of its `--help`, and writes nothing."""

    def make(text: str = "echo '&&&& RUNNING TensorRT.trtexec [TensorRT v101601] [b11] # trtexec --help'") -> Path:
        made = program(tmp_path / "tools" / "trtexec", text + "\n")
        monkeypatch.setenv("PATH", f"{made.parent}:/usr/bin:/bin")
        probe.help_of.cache_clear()
        return made

    return make


H200 = probe.Gpu(name="NVIDIA H200", compute_capability="9.0", memory_mib=143771, driver="595.58.03")


def test_a_trtexec_on_this_machine_tells_its_version_itself(pipeline, trtexec, monkeypatch):
    trtexec()
    monkeypatch.setattr(probe, "gpus", lambda: (H200,))
    found = pipeline()
    assert version_of(found) == (10, 16, 1)
    engine.STAGE.check(found)
    assert dict(TensorRTEngine.parts(found).environment) == {"tensorrt": "10.16.1", "compute_capability": "9.0"}
    assert TensorRTEngine.steps(site(found))[1].argv[2].endswith("/tensorrt-10.16.1-sm9.0-NVIDIA-H200.lock")
    assert version_of(pipeline(target="26.09")) == (10, 16, 1), "as inside an image that our table does not know"
    assert version_of(pipeline(builder={"launcher": ["true"]})) is None, "another machine's is not asked"


@pytest.mark.parametrize(
    ("fields", "field"), [({"target": "26.08"}, "engine.target"), ({"tensorrt": "10.14.1"}, "engine.tensorrt")]
)
def test_a_trtexec_of_another_version_than_was_named_is_refused_before_the_run(pipeline, trtexec, fields, field):
    made = trtexec()
    with pytest.raises(ConfigError) as refused:
        engine.STAGE.check(pipeline(**fields))
    assert f"{field}: TensorRT 1" in str(refused.value)
    assert f"shall build, and {made} is of 10.16.1" in str(refused.value)


NO_TRTEXEC = {
    "another program": ("echo hello", ConfigError, "is no trtexec: `", "engine.builder.trtexec"),
    "one that says nothing": ("exit 1", ConfigError, "but with 'nothing'", "engine.builder.trtexec"),
    "one of an older generation": (
        "echo '&&&& RUNNING TensorRT.trtexec [TensorRT v8601] # trtexec --help'",
        ConfigError,
        "TensorRT 8.6.1 is none that we know the options of",
        "engine.builder.trtexec",
    ),
    "one whose library is missing": (
        "echo 'trtexec: error while loading shared libraries: libnvinfer.so.10: no such file'; exit 127",
        ToolMissing,
        "libnvinfer.so.10 is not found",
        "LD_LIBRARY_PATH",
    ),
}


@pytest.mark.parametrize("name", NO_TRTEXEC)
def test_a_program_that_is_no_working_trtexec_is_told_before_the_run(pipeline, trtexec, name):
    text, kind, told, mend = NO_TRTEXEC[name]
    trtexec(text)
    for fields in ({}, TARGET):
        with pytest.raises(kind) as refused:
            engine.STAGE.check(pipeline(**fields))
        assert told in str(refused.value)
        assert mend in str(refused.value)


def test_a_trtexec_that_cannot_be_executed_is_told_as_such(pipeline, trtexec):
    made = trtexec()
    made.chmod(0o644)
    with pytest.raises(ToolMissing, match="is not executable"):
        engine.STAGE.check(pipeline(builder={"trtexec": str(made)}))
    made.write_bytes(b"\x7fELF for another machine")
    made.chmod(0o755)
    with pytest.raises(ToolMissing, match=r"does not run: .*Exec format error"):
        engine.STAGE.check(pipeline(**TARGET | {"builder": {"trtexec": str(made)}}))


@pytest.mark.parametrize(
    ("gpus", "kind", "told"),
    [
        ((), ToolMissing, "nvidia-smi names none here"),
        ((H200,), ConfigError, "engine.compute_capability: 8.0 is asked for, and the GPUs here have 9.0"),
    ],
)
def test_a_gpu_that_is_not_here_is_missed_before_the_run(pipeline, trtexec, monkeypatch, gpus, kind, told):
    trtexec()
    monkeypatch.setattr(probe, "gpus", lambda: gpus)
    with pytest.raises(kind, match=told):
        engine.STAGE.check(pipeline(target="26.05", compute_capability="8.0"))


def test_what_is_found_before_the_run_is_told_at_its_line_too(pipeline):
    with pytest.raises(ConfigError, match=r"pipeline\.yaml:7: engine\.plugins: there is no plugin"):
        engine.STAGE.check(pipeline(plugins=["libno.so"], **TARGET))
    with pytest.raises(ConfigError, match=r"pipeline\.yaml:7: engine\.target: our table does not know which TensorRT"):
        engine.STAGE.check(pipeline(target="26.09"))


def test_an_opset_that_the_target_does_not_read_is_refused_before_anything_is_trained(pipeline):
    too_new = pipeline(**TARGET).model_copy(
        update={"export": pipeline(**TARGET).export.model_copy(update={"opset_version": 25})}
    )
    with pytest.raises(ConfigError, match=r"opset 25 is newer than TensorRT 10\.16\.1 reads, which is 24"):
        engine.STAGE.check(too_new)
    with pytest.raises(ConfigError, match="opset 25 is newer"):
        TensorRTEngine.check_graph(pipeline(**TARGET), opset=25, ir_version=13)


def test_the_target_decides_version_image_and_where_the_precision_comes_from(pipeline):
    ten, eleven = pipeline(precision="fp16", **TARGET), pipeline(precision="fp16", **TARGET | {"target": "26.08"})
    assert (declared_version(ten.engine), declared_version(eleven.engine)) == ((10, 16, 1), (11, 2, 1))
    assert not converts(ten.engine, declared_version(ten.engine))
    assert converts(eleven.engine, declared_version(eleven.engine))
    assert TensorRTEngine.conversion(ten) is None
    assert TensorRTEngine.conversion(eleven).precision == "fp16"
    assert "--fp16" in TensorRTEngine.steps(site(ten))[1].argv
    assert "--fp16" not in TensorRTEngine.steps(site(eleven))[1].argv
    assert "nvcr.io/nvidia/tritonserver:26.08-py3" in TensorRTEngine.steps(site(eleven))[1].argv


def test_profiles_come_from_shapes_or_from_the_list(pipeline):
    assert profiles_of(pipeline(**TARGET))[0].max == {"image": (32, 1, 8, 8)}
    listed = pipeline(
        profiles=[{"batch": {"min": 1, "opt": 1, "max": 1}}, {"batch": {"min": 2, "opt": 16, "max": 32}}], **TARGET
    )
    assert [profile.opt for profile in profiles_of(listed)] == [{"image": (1, 1, 8, 8)}, {"image": (16, 1, 8, 8)}]
    assert TensorRTEngine.profiles(listed) == 2


def test_the_tolerance_follows_the_precision_unless_it_is_said(pipeline):
    assert tolerance_of(pipeline(**TARGET)) == pipeline(**TARGET).gates.parity
    assert tolerance_of(pipeline(precision="fp16", **TARGET)).atol == 1e-2
    assert tolerance_of(pipeline(precision="fp16", parity={"atol": 0.5}, **TARGET)).atol == 0.5


def key(pipeline):
    parts = TensorRTEngine.parts(pipeline)
    return json.dumps({"config": parts.config, "environment": dict(parts.environment)}, sort_keys=True)


CHANGES = {
    "precision": {"precision": "fp16"},
    "TensorRT's version": {"target": "26.02"},
    "the compute capability": {"compute_capability": "8.6"},
    "a memory pool": {"memory_pools": {"workspace": 64}},
    "the optimization level": {"builder_optimization_level": 5},
    "a profile": {"profiles": [{"batch": {"min": 1, "opt": 4, "max": 32}}]},
    "an extra flag": {"extra_flags": ["--avgTiming=32"]},
    "hardware compatibility": {"hardware_compatibility": "ampere+"},
}
PLACEMENTS = {
    "a release with the same TensorRT": {"target": "26.04"},
    "the builder": {"builder": {"kind": "docker", "image": "mine"}},
    "a launcher": {"builder": {"launcher": ["srun"]}},
    "the deadline": {"timeout_minutes": 5},
    "measuring": {"measure": False},
    "the preflight": {"preflight": "tensorrt-rtx"},
    "how the graph was converted, which its bytes tell": {"calibration_samples": 8, "quantizer": "onnxruntime"},
    "the tolerance": {"parity": {"atol": 0.5}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_plan_is_part_of_the_key(pipeline, name):
    assert key(pipeline(**TARGET)) != key(pipeline(**TARGET | CHANGES[name]))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_where_and_how_patiently_it_is_built_is_no_part_of_the_key(pipeline, name):
    assert key(pipeline(**TARGET)) == key(pipeline(**TARGET | PLACEMENTS[name]))


def test_a_plugin_is_known_by_its_bytes(pipeline, tmp_path):
    library = tmp_path / "pipeline" / "libplugin.so"
    library.parent.mkdir()
    library.write_bytes(b"one")
    first = key(pipeline(plugins=["libplugin.so"], **TARGET))
    library.write_bytes(b"two")
    assert key(pipeline(plugins=["libplugin.so"], **TARGET)) != first


def test_the_timing_cache_lies_beside_the_store_one_per_version_and_generation(pipeline, tmp_path):
    names = set()
    for fields in (TARGET, TARGET | {"target": "26.08"}, TARGET | {"compute_capability": "8.6"}):
        (argument,) = [
            a for a in TensorRTEngine.steps(site(pipeline(**fields)))[1].argv if a.startswith("--timingCacheFile=")
        ]
        cache = Path(argument.partition("=")[2])
        assert cache.parent == tmp_path / "home" / "timing"
        names.add(cache.name)
    assert len(names) == 3


def test_in_docker_the_command_reads_the_same_folders_and_writes_as_the_user(pipeline):
    question, build = TensorRTEngine.steps(site(pipeline(**TARGET)))
    assert question.argv[:2] == ("docker", "run")
    assert build.argv[0] == "flock"
    assert f"--user={os.getuid()}:{os.getgid()}" in build.argv
    assert "--network=none" in build.argv
    assert "--volume=/export:/export:ro" in build.argv
    assert "--onnx=/export/model.onnx" in build.argv


def site(pipeline, work=Path("/work"), export=Path("/export")) -> Site:
    return Site(pipeline=pipeline, materials={"export": export}, work=work)


@pytest.fixture
def build(tmp_path, pipeline, monkeypatch):
    """Builds with a stand-in: `script` is what it does, `log` which log it prints."""
    export = tmp_path / "export"
    export.mkdir()
    (export / "model.onnx").write_bytes(b"a graph")
    (export / "signature.json").write_text("{}")
    program(tmp_path / "bin" / "nvidia-smi", "echo 'NVIDIA H200, 9.0, 595.58.03'\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def run(script: str, *, log: str | None = "passed_10", timeout_seconds: float | None = None, **fields):
        text = script + (f"sed 's/v101303/v101601/' {LOGS / log}.log\n" if log else "")
        program(tmp_path / "bin" / "trtexec", text)
        made = site(
            pipeline(**{"tensorrt": "10.16.1", "compute_capability": "9.0"} | fields), tmp_path / "work", export
        )
        made.product.mkdir(parents=True, exist_ok=True)
        for step in engine.STAGE.steps(made):
            if timeout_seconds is not None:
                object.__setattr__(step, "timeout_seconds", timeout_seconds)
            run_step(step, log=tmp_path / "log", on_line=lambda line: None)
        return made, engine.STAGE.collect(made)

    return run


def test_a_build_leaves_the_plan_its_signature_and_nothing_else(build):
    made, built = build(GOOD)
    assert sorted(path.name for path in made.product.iterdir()) == ["model.plan", "signature.json"]
    assert built.metrics["throughput_qps"] == pytest.approx(5123.4)


def test_the_passport_says_what_built_it_and_for_what(build):
    _, built = build(GOOD, precision="fp16")
    passport = built.details["passport"]
    assert passport["tensorrt"] == "10.16.1"
    assert passport["plan"]["tensorrt"] == "10.16.1.11"
    assert (passport["gpu"], passport["compute_capability"]) == ("NVIDIA H200", "9.0")
    assert passport["driver"] == "595.58.03"
    assert (passport["precision"], passport["strongly_typed"]) == ("fp16", False)
    assert passport["layers"] == {"count": 1, "by_type": {"CaskConvolution": 1}, "outputs_by_datatype": {"Half": 1}}
    assert passport["profiles"] == [
        {"min": {"image": [1, 1, 8, 8]}, "opt": {"image": [8, 1, 8, 8]}, "max": {"image": [32, 1, 8, 8]}}
    ]


def test_the_script_builds_the_same_again_from_a_copy_of_the_graph(build, tmp_path):
    made, built = build(GOOD)
    script = tmp_path / "reproduce.sh"
    script.write_text(built.details["reproduce.sh"])
    copy = tmp_path / "elsewhere" / "model.onnx"
    copy.parent.mkdir()
    copy.write_bytes((made.materials["export"] / "model.onnx").read_bytes())
    subprocess.run(["sh", script, copy], cwd=copy.parent, check=True, capture_output=True)
    assert (copy.parent / "model.plan").read_bytes() == (made.product / "model.plan").read_bytes()
    # On another machine neither the home nor the folder in which it was built is there.
    (copy.parent / "model.plan").unlink()
    shutil.rmtree(tmp_path / "home" / "timing")
    shutil.rmtree(made.work / "trtexec")
    subprocess.run(["sh", script, copy], cwd=copy.parent, check=True, capture_output=True)
    assert (copy.parent / "model.plan").read_bytes() == (made.product / "model.plan").read_bytes()
    copy.write_bytes(b"another graph")
    refused = subprocess.run(["sh", script, copy], cwd=copy.parent, check=False, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "FAILED" in refused.stdout + refused.stderr


FAULTY = {
    "status 0 without a plan": (
        SAVE,
        "passed_10",
        CommandFailed,
        "trtexec said that it passed, and yet there is no plan",
    ),
    "status 0 with an empty plan": (SAVE + ': > "$plan"\n', "passed_10", CommandFailed, "the plan is empty"),
    "status 0 with half a plan": (SAVE + f'{PLAN} > "$plan"\n', "passed_10", CommandFailed, "the plan is cut off"),
    "status 0 with less than the log says": (
        GOOD.replace("1804000", "1700000"),
        "passed_10",
        CommandFailed,
        "the plan is cut off: 1700028 bytes, and trtexec made about 1803551",
    ),
    "status 0 with something else": (
        SAVE + 'head -c 5000 /dev/zero > "$plan"\n',
        "passed_10",
        CommandFailed,
        "it is no TensorRT plan",
    ),
    "the plan of TensorRT-RTX": (
        GOOD.replace("ftrt", "vtrt"),
        "passed_10",
        CommandFailed,
        "the plan is one of TensorRT-RTX, which Triton does not load",
    ),
    "a plan of another version": (
        GOOD.replace(r"\012\020\001\013", r"\012\016\001\060"),
        "passed_10",
        ConfigError,
        "built by TensorRT 10.14.1, and 10.16.1 was asked for",
    ),
    "status 0 and not a word": (GOOD, None, CommandFailed, "without the line `&&&& PASSED`"),
    "status 0 and FAILED": (GOOD, "no_profile_10", ConfigError, "no optimization profile was given"),
    "an input that became 1": (GOOD, "silently_one_10", ConfigError, "silently build it for 1"),
    "no GPU, without FAILED": (f"cat {LOGS / 'no_gpu_10'}.log; exit 1\n", None, ToolMissing, "there is no NVIDIA GPU"),
    "an unknown option": (
        f"cat {LOGS / 'unknown_option_11'}.log; exit 1\n",
        None,
        ConfigError,
        "does not know the option --fp16",
    ),
    "an unknown failure": ("echo '[E] what is this'; exit 3\n", None, CommandFailed, "exit status 3"),
    "killed": ("kill -9 $$\n", None, CommandFailed, "killed by SIGKILL"),
    "a library that is missing": (
        f"cat {LOGS / 'library_missing'}.log; exit 127\n",
        None,
        ToolMissing,
        "libnvinfer.so.10 is not found",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_build_is_told_as_what_it_is_and_leaves_no_product(build, tmp_path, name):
    script, log, kind, told = FAULTY[name]
    with pytest.raises(EnginehouseError) as refused:
        build(script, log=log)
    assert type(refused.value) is kind
    assert told in str(refused.value)
    assert list((tmp_path / "work" / "product").iterdir()) == []


def test_what_the_layers_are_is_kept_with_the_record(build):
    _, built = build(GOOD)
    assert json.loads(built.byproducts["layers.json"].read_text())["Layers"][0]["LayerType"] == "CaskConvolution"


def test_behind_a_launcher_the_same_build_runs_where_the_launcher_brings_it(build, tmp_path):
    """The launcher stands in for `srun --gres=gpu:1`: it tells what it was given, and runs that."""
    launcher = program(tmp_path / "srun", f'shift\necho "$@" >> {tmp_path}/launched\nexec "$@"\n')
    _, built = build(GOOD, builder={"kind": "local", "launcher": [str(launcher), "--gres=gpu:1"]})
    asked, built_by = (tmp_path / "launched").read_text().splitlines()
    assert asked.startswith("nvidia-smi --query-gpu=")
    assert built_by.startswith("flock --no-fork ")
    assert built.details["passport"]["gpu"] == "NVIDIA H200", "asked where it was built"


def test_a_launcher_that_fails_is_told_with_its_own_words(build, tmp_path):
    launcher = program(
        tmp_path / "srun", "echo 'srun: error: Unable to allocate resources: Invalid partition'; exit 1\n"
    )
    with pytest.raises(CommandFailed) as failed:
        build(GOOD, builder={"kind": "local", "launcher": [str(launcher)]})
    assert "Invalid partition" in str(failed.value)


def test_a_build_past_its_deadline_is_ended_and_says_so(build):
    with pytest.raises(CommandFailed, match=r"deadline of 1 s passed"):
        build("sleep 60\n", log=None, timeout_seconds=1.0)


def test_a_plan_that_an_earlier_build_left_is_never_taken_for_this_ones(build, tmp_path):
    build(GOOD)
    (tmp_path / "work" / "product" / "model.plan").unlink()
    (tmp_path / "work" / "product" / "signature.json").unlink()
    with pytest.raises(CommandFailed, match="there is no plan"):
        build(SAVE)


def test_a_build_on_another_gpu_than_was_asked_for_is_refused(build):
    with pytest.raises(ConfigError, match=r"built on a GPU of compute capability 9\.0, and 8\.6 was asked for"):
        build(GOOD, compute_capability="8.6")


def test_two_builds_with_one_timing_cache_come_after_each_other(build, tmp_path):
    """The stand-in fails if another one holds its mark at the same time."""
    guarded = f"mkdir {tmp_path}/mark || exit 9\nsleep 1\nrmdir {tmp_path}/mark\n" + GOOD
    build(guarded)
    steps = engine.STAGE.steps(
        site(load(tmp_path / "pipeline" / "pipeline.yaml"), tmp_path / "other", tmp_path / "export")
    )
    failures: list[EnginehouseError] = []

    def once(number: int) -> None:
        made = site(load(tmp_path / "pipeline" / "pipeline.yaml"), tmp_path / f"work{number}", tmp_path / "export")
        try:
            run_step(engine.STAGE.steps(made)[1], log=tmp_path / f"log{number}", on_line=lambda line: None)
        except EnginehouseError as error:
            failures.append(error)

    threads = [threading.Thread(target=once, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert steps[1].argv[0] == "flock"
