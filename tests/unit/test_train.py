"""What the stage plans, and what it makes of failures and of other people's products: no process is started."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tasks import train
from tasks.artifacts.code import RecipeCode
from tasks.config import Pipeline
from tasks.errors import CommandFailed, ConfigError, ToolMissing
from tasks.stage import Identity, Site
from tasks.toolchain.interruptions import Interruptions, settle
from tasks.toolchain.torchrun import agent_signal, cause_among, failures

PIPELINE = {
    "name": "small",
    "recipe": "recipe.py:Small",
    "data": {"rows": {"version": "1"}},
    "inputs": {"x": {"dtype": "float32", "shape": [1, 16]}},
}


def site(folder: Path, **fields: object) -> Site:
    pipeline = Pipeline.model_validate(
        {**PIPELINE, "train": {"batch_size": 64, **fields}}, context={"source": folder / "pipeline.yaml"}
    )
    return Site(pipeline=pipeline, materials={}, work=folder / "work")


def step(at: Site):
    return train.STAGE.steps(at)[0]


def test_the_command_is_torchruns_with_a_rendezvous_of_its_own(tmp_path):
    planned = step(site(tmp_path, nproc_per_node=2, num_threads=3, max_restarts=5))
    line = shlex.join(planned.argv[1:])
    assert line.startswith(
        "-I -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nnodes 1 --nproc-per-node 2 "
        "--max-restarts 5 --no-python -- "
    )
    assert line.endswith(f"bootstrap.py train {tmp_path}/work/train.json")
    assert planned.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert planned.env["OMP_NUM_THREADS"] == "3"


def test_several_machines_meet_where_the_pipeline_says_and_others_can_join(tmp_path):
    fields = {"nnodes": "1:3", "rdzv_endpoint": "host-a:29400", "rdzv_conf": "join_timeout=60", "batch_size": 12}
    planned = step(site(tmp_path, **fields))
    meeting = "--rdzv-backend c10d --rdzv-endpoint host-a:29400 --rdzv-id small --rdzv-conf is_host={},join_timeout=60"
    assert f"{meeting.format('true')} --nnodes 1:3 --nproc-per-node 1 " in shlex.join(planned.argv)
    assert planned.attendant is not None
    planned.job_file.parent.joinpath("train", "work").mkdir(parents=True)
    told = planned.attendant.starting()
    assert told == f"other machines take part with: sh {tmp_path}/work/train/join.sh"
    script = (tmp_path / "work" / "train" / "join.sh").read_text()
    assert f"{meeting.format('false')} --nnodes 1:3 --nproc-per-node 1 " in script
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in script
    planned.job_file.touch()
    fake = tmp_path / "once.sh"
    fake.write_text(re.sub(r"(?m)^    .* && exit 0$", f"    rm {planned.job_file}", script))
    subprocess.run(["sh", str(fake)], check=True, timeout=20)  # it ends with the job


def test_a_program_of_the_users_stands_where_ours_would(tmp_path):
    planned = step(site(tmp_path, script="mine/train.py", args=["--lr", "0.1"]))
    assert planned.argv[-4:] == ("-u", f"{tmp_path}/mine/train.py", "--lr", "0.1")
    assert planned.env["ENGINEHOUSE_JOB"] == str(planned.job_file)


def test_the_job_says_everything_with_absolute_paths(tmp_path):
    fields = {
        "monitor": {"metric": "accuracy", "patience": 3},
        "trackers": [{"kind": "tensorboard", "folder": "seen"}],
        "profile": {"steps": [10, 20]},
        "checkpoint": {"every_steps": 7, "every_minutes": None},
    }
    job = step(site(tmp_path, **fields)).job
    assert job["recipe"] == f"{tmp_path}/recipe.py:Small"
    assert job["config"]["monitor"] == {"metric": "accuracy", "mode": "max", "patience": 3, "min_delta": 0.0}
    assert job["config"]["trackers"] == [
        {"kind": "tensorboard", "folder": f"{tmp_path}/seen/tensorboard", "name": "small"}
    ]
    assert job["config"]["profile"] == [10, 20]
    assert job["config"]["checkpoint"] == {
        "every_steps": 7, "every_minutes": None, "keep": 2, "asynchronous": True,
    }  # fmt: skip


KEYED = {
    "precision": "bf16-mixed", "compile": True, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0,
    "monitor": {"metric": "accuracy"}, "device": "cuda", "script": "train.py",
}  # fmt: skip
PLACED = {
    "num_workers": 2, "checkpoint": {"every_steps": 5}, "max_restarts": 0, "collective_timeout_seconds": 5.0,
    "preemption_signal": "USR1", "preemption_grace_seconds": 3.0, "log_every_steps": 5,
    "trackers": [{"kind": "mlflow"}], "profile": {"steps": [1, 2]}, "timeout_minutes": 3.0,
    "start_from": "small/train@1", "rdzv_endpoint": "host-a:29400", "rdzv_conf": "join_timeout=60",
}  # fmt: skip


@pytest.mark.parametrize("field", [*KEYED, *PLACED])
def test_what_changes_the_result_is_keyed_and_nothing_else(field, tmp_path):
    def key(at: Site):
        return train.STAGE.parts(at.pipeline, IDENTITY).config

    changed = key(site(tmp_path, **{field: {**KEYED, **PLACED}[field]}))
    assert (changed != key(site(tmp_path))) is (field in KEYED)


def test_compiling_asks_for_a_compiler_before_anything_is_trained(tmp_path, monkeypatch):
    check = train.STAGE.check
    check(site(tmp_path, compile=True).pipeline)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check(site(tmp_path).pipeline)
    with pytest.raises(ToolMissing, match=r"g\+\+ is missing: train.compile needs a C\+\+ compiler"):
        check(site(tmp_path, compile=True).pipeline)


IDENTITY = Identity(code=RecipeCode(train={}, metric={}, notes=()), data=None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"nproc_per_node": 2, "gradient_accumulation_steps": 3}, "expected a multiple of 6"),
        ({"nnodes": 2}, "expected train.rdzv_endpoint beside it"),
        ({"nnodes": "3:2", "rdzv_endpoint": "a:1"}, "expected a number of machines, or MIN:MAX such as 1:4, got '3:2'"),
        ({"nnodes": 2, "rdzv_endpoint": "host-a"}, "expected HOST:PORT such as trainer-1:29400, got 'host-a'"),
        ({"nnodes": "1:3", "rdzv_endpoint": "a:1"}, "expected a multiple of 3"),
        ({"args": ["--fast"]}, "expected train.script beside it"),
        ({"profile": {"steps": [9, 3]}}, "expected the first step before the last, got 9 and 3"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(fields, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        site(tmp_path, **fields)


def failure(*lines: str, ended: str = "exit status 1", log: Path | None = None, cause: str | None = None):
    if log is not None:
        log.write_text("\n".join(lines) + "\n")
    return CommandFailed("training", argv=["torchrun"], ended=ended, log=log, last_lines=lines, cause=cause)


def tell(output: Path, attempt: int, rank: int, message: str, *, symptom: bool = False, time: float = 0.0, **more):
    folder = output / "failures"
    folder.mkdir(parents=True, exist_ok=True)
    told = {"message": message, "hint": None, "rank": rank, "symptom": symptom, "suspect": None, "time": time}
    told |= {"pid": 70 + rank, **more}
    (folder / f"{attempt}-{rank}.json").write_text(json.dumps(told))


TORCHRUN = """
E1130 17:50:28 6864 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 71)
[1]:
  time      : 2026-11-30_17:48:16
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 72)
"""


def test_a_cause_is_believed_before_a_symptom_and_the_earlier_before_the_later(tmp_path):
    assert cause_among(failures(tmp_path), ()) is None
    tell(tmp_path, 0, 0, "of an earlier attempt")
    tell(tmp_path, 1, 0, "rank 2 did not come", symptom=True, time=1.0)
    tell(tmp_path, 1, 1, "the second", time=3.0)
    tell(tmp_path, 1, 2, "the first", time=2.0)
    cause = cause_among(failures(tmp_path), ())
    assert cause is not None
    assert cause.text == "the first"


def test_how_a_silent_rank_ended_is_read_from_torchruns_report(tmp_path):
    tell(tmp_path, 0, 0, "rank 1 has ended without a word", symptom=True, suspect=1, suspect_pid=72)
    cause = cause_among(failures(tmp_path), TORCHRUN.splitlines())
    assert cause is not None
    assert cause.text == "rank 1 was killed by SIGKILL"


def test_a_signal_to_torchrun_is_read_from_its_traceback():
    assert agent_signal(["torch…SignalException: Process 12 got signal: 15"]) == "SIGTERM"
    assert agent_signal(["nothing"]) is None


def folders(at: Site) -> tuple[Path, Path]:
    return at.work / "train" / "output", at.work / "train" / "work"


def started(at: Site) -> Interruptions:
    attendant = step(at).attendant
    assert isinstance(attendant, Interruptions)
    for folder in folders(at):
        folder.mkdir(parents=True, exist_ok=True)
    attendant.starting()
    return attendant


def after(at: Site):
    return started(at).failed


def checkpoint(at: Site, step_number: int) -> None:
    folder = at.work / "train" / "work" / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "LATEST").write_text(f"step-{step_number:08d}\n")


def report(at: Site, **told: object) -> None:
    output = at.work / "train" / "output"
    output.mkdir(parents=True, exist_ok=True)
    (output / "error.json").write_text(json.dumps(told))


def test_after_a_preemption_it_goes_on_as_long_as_there_is_progress(tmp_path):
    at = site(tmp_path, max_restarts=1)
    report(at, kind="preempted", message="asked to stop")
    for number in range(5):
        checkpoint(at, number)
        assert after(at)(failure()) == "asked to stop"
    assert after(at)(failure()) is None


def test_a_killed_torchrun_is_started_again_and_a_cancelled_one_is_not(tmp_path):
    at = site(tmp_path)
    (at.work / "train" / "output").mkdir(parents=True)
    assert after(at)(failure(ended="killed by SIGKILL")) == "torchrun was killed by SIGKILL"
    assert after(at)(failure(ended="cancelled")) is None
    assert after(at)(failure(ended="deadline of 60 s passed")) is None
    signalled = failure("x.SignalException: Process 1 got signal: 15", log=tmp_path / "log")
    assert after(at)(signalled) == "torchrun got SIGTERM"


def test_what_would_fail_again_in_the_same_way_is_not_started_again(tmp_path):
    at = site(tmp_path)
    report(at, kind="configuration", message="no such layer")
    assert after(at)(failure()) is None


def test_a_failure_is_told_with_its_first_cause_and_the_kernels_kill(tmp_path):
    at = site(tmp_path)
    tell(at.work / "train" / "output", 0, 0, "rank 1 has ended without a word", symptom=True, suspect=1, suspect_pid=72)
    killed = failure(*TORCHRUN.splitlines(), log=tmp_path / "log", cause="out of memory: the kernel killed a process")
    with pytest.raises(CommandFailed) as caught:
        after(at)(killed)
    assert caught.value.cause == "out of memory: the kernel killed a process\nrank 1 was killed by SIGKILL"


DIED = "E1130 17:50:28 68 multiprocessing/api.py:1002] failed (exitcode: {}) local_rank: {} (pid: {}) of binary: x"


def test_a_worker_that_only_torchrun_saw_end_is_told_of(tmp_path):
    at = site(tmp_path)
    attendant = started(at)
    attendant.line("going on from the checkpoint of step 7 with 2 ranks")
    attendant.line(DIED.format(-9, 1, 71))
    assert settle(*folders(at)) == [
        {"reason": "local rank 1 was killed by SIGKILL", "checkpoint": None, "rank": 1},
    ]


def test_a_sign_of_life_says_which_rank_it_was_and_where(tmp_path):
    at = site(tmp_path)
    attendant = started(at)
    checkpoint(at, 7)
    (folders(at)[1] / "ranks").mkdir()
    beat = {"rank": 3, "pid": 71, "phase": "forward", "step": 9}
    (folders(at)[1] / "ranks" / "rank-3.json").write_text(json.dumps(beat))
    attendant.line(DIED.format(5, 1, 71))
    assert settle(*folders(at)) == [
        {"reason": 'rank 3 exited with status 5 in the phase "forward" of step 9', "checkpoint": "step-00000007",
         "rank": 3},
    ]  # fmt: skip


def test_the_first_cause_takes_the_place_of_the_victim_that_torchrun_named(tmp_path):
    at = site(tmp_path)
    attendant = started(at)
    attendant.line(DIED.format(1, 0, 70))
    tell(folders(at)[0], 0, 0, "rank 1 is stopped", symptom=True, suspect=1, suspect_pid=71)
    attendant.line(DIED.format(1, 0, 80))
    tell(folders(at)[0], 1, 0, "rank 0 failed: OverflowError", pid=80)
    assert [(entry["rank"], entry["reason"]) for entry in settle(*folders(at))] == [
        (1, "rank 1 is stopped"),
        (0, "rank 0 failed: OverflowError"),
    ]


def test_the_first_cause_is_known_also_when_the_run_that_saw_the_victim_is_killed_before_it_ends(tmp_path):
    at = site(tmp_path)
    attendant = started(at)
    tell(folders(at)[0], 0, 0, "rank 1 has ended without a word", symptom=True, suspect=1, suspect_pid=71)
    attendant.line(DIED.format(1, 0, 70))
    shutil.rmtree(folders(at)[0])  # as the next run's claim begins anew
    started(at)
    assert [(entry.get("rank"), entry["reason"]) for entry in settle(*folders(at))] == [
        (1, "rank 1 has ended without a word"),
        (None, "the run that trained was killed"),
    ]


def test_what_befell_earlier_runs_of_the_same_build_is_told_too(tmp_path):
    at = site(tmp_path)
    started(at)  # and killed: nothing says how it ended
    failed = started(at)
    failed.line(DIED.format(-11, 0, 70))
    with pytest.raises(CommandFailed, match="local rank 0 was killed by SIGSEGV"):
        failed.failed(failure())
    cancelled = started(at)
    assert cancelled.failed(failure(ended="cancelled")) is None
    started(at)
    assert [entry["reason"] for entry in settle(*folders(at))] == [
        "the run that trained was killed",
        "local rank 0 was killed by SIGSEGV",
        "training ended: cancelled",
    ]
    assert len(settle(*folders(at))) == 3


def test_a_lost_rendezvous_is_met_again_and_a_port_in_use_is_not(tmp_path):
    lost = "rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed."
    at = site(tmp_path)
    assert started(at).failed(failure(lost, log=tmp_path / "log")) == "the place where the machines meet was lost"
    in_use = failure("name: EADDRINUSE, message: address already in use", lost, log=tmp_path / "other")
    with pytest.raises(CommandFailed):
        started(at).failed(in_use)


WEIGHTS = (2).to_bytes(8, "little") + b"{}"
BROKEN = {
    "no weights": (None, b"{}", "left no .*model.safetensors"),
    "weights that are none": (b"pickle", b"{}", "is no safetensors file"),
    "a header that is cut": ((99).to_bytes(8, "little") + b"{}", b"{}", "is no safetensors file"),
    "no metrics": (WEIGHTS, None, "left no .*metrics.json"),
    "metrics that are no JSON": (WEIGHTS, b"accuracy: 1", "is no JSON"),
    "metrics that are no numbers": (WEIGHTS, b'{"accuracy": "high"}', "holds more than numbers"),
    "metrics that are not finite": (WEIGHTS, b'{"metrics": {"loss": NaN}}', "holds more than numbers"),
    "a list": (WEIGHTS, b"[1, 2]", "holds more than numbers"),
}


@pytest.mark.parametrize(("weights", "metrics", "says"), BROKEN.values(), ids=BROKEN)
def test_a_program_that_breaks_the_contract_is_told_which_part(weights, metrics, says, tmp_path):
    at = site(tmp_path, script="train.py")
    for name, data in (("model.safetensors", weights), ("metrics.json", metrics)):
        if data is not None:
            (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=says) as caught:
        train.foreign_report(at, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/train.py: train.script ended well, but ")


def test_a_graph_may_take_the_weights_place_but_not_stand_beside_them(tmp_path):
    at = site(tmp_path, script="train.py")
    (tmp_path / "metrics.json").write_bytes(b"{}")
    (tmp_path / "model.onnx").write_bytes(b"\x08")
    assert train.foreign_report(at, tmp_path)["metrics"] == {}
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    with pytest.raises(ConfigError, match="left both "):
        train.foreign_report(at, tmp_path)


@pytest.mark.parametrize("written", [b'{"accuracy": 1}', b'{"metrics": {"accuracy": 1}, "history": []}'])
def test_metrics_may_be_plain_or_with_more_beside_them(written, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "metrics.json").write_bytes(written)
    assert train.foreign_report(site(tmp_path, script="train.py"), tmp_path)["metrics"] == {"accuracy": 1}


def test_what_an_earlier_start_said_explains_no_later_failure(tmp_path):
    at = site(tmp_path)
    log = tmp_path / "log"
    earlier = ["$ torchrun", "x.SignalException: Process 1 got signal: 15"]
    assert started(at).failed(failure(*earlier, log=log)) == "torchrun got SIGTERM"
    with pytest.raises(CommandFailed):
        started(at).failed(failure(*earlier, "$ torchrun", "something else", log=log))
