"""Training survives: killed, hanging and preempted processes, and what the record and the user are told of them."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tasks.errors import CommandFailed, ConfigError
from tests.integration.training import PIPELINE, RECIPE, Trainee, kill, memory_limit


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What a training is that nothing interrupts."""
    return Trainee.made(tmp_path_factory.mktemp("reference") / "user").train()


@pytest.fixture
def trainee(tmp_path):
    made = Trainee.made(tmp_path / "user")
    yield made
    mark = str(made.folder)
    deadline = time.monotonic() + 10
    while left := [p for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or ())]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def assert_same(record, reference):
    assert record.content == reference.content
    assert record.details["history"] == reference.details["history"]


def test_a_killed_worker_is_restarted_and_the_result_is_the_same(trainee, reference):
    thread = trainee.at_step(60, kill(signal.SIGKILL))
    record = trainee.train()
    thread.join()
    assert_same(record, reference)
    (interruption,) = record.details["interruptions"]
    assert interruption["rank"] == 1
    assert re.match(r"rank 1 (was killed by SIGKILL|has ended without a word)", interruption["reason"])
    assert int(interruption["checkpoint"].removeprefix("step-")) % 7 == 0
    assert any("going on from the checkpoint of step" in line for line in trainee.lines)
    assert set(record.byproducts) >= {"build.log", "metrics.jsonl"}


@pytest.mark.slow
def test_a_hanging_worker_is_ended_by_the_timeout_and_named(trainee, reference):
    thread = trainee.at_step(60, kill(signal.SIGSTOP))
    record = trainee.train("train.collective_timeout_seconds=15")  # within which the ranks must also have started
    thread.join()
    assert_same(record, reference)
    (interruption,) = record.details["interruptions"]
    assert interruption["reason"].startswith("rank 1 is stopped (as by SIGSTOP or a debugger)")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_notice_of_preemption_leads_to_a_checkpoint_and_the_run_goes_on_by_itself(trainee, reference, number):
    thread = trainee.at_step(60, lambda beat: os.kill(trainee.parent(beat["pid"]), number))
    record = trainee.train("train.preemption_signal=USR1")
    thread.join()
    assert_same(record, reference)
    (interruption,) = record.details["interruptions"]
    assert interruption["reason"].startswith("asked to stop; a checkpoint of step ")
    step = int(interruption["checkpoint"].removeprefix("step-"))
    assert f"[rank 0] going on from the checkpoint of step {step} with 2 ranks" in trainee.lines


def test_a_killed_torchrun_leaves_no_worker_and_no_files_and_is_started_again(trainee, reference, monkeypatch):
    with tempfile.TemporaryDirectory() as temporary:  # not pytest's: its path leaves no room for that of a socket
        monkeypatch.setenv("TMPDIR", temporary)
        thread = trainee.at_step(60, lambda beat: os.kill(trainee.parent(beat["pid"]), signal.SIGKILL))
        record = trainee.train()
        thread.join()
        assert list(Path(temporary).iterdir()) == []
    assert_same(record, reference)
    (interruption,) = record.details["interruptions"]
    assert interruption["resubmitted"]
    assert re.match(TOLD["torchrun"], interruption["reason"])


@pytest.mark.slow
def test_what_fails_again_and_again_is_told_with_its_cause_and_can_be_resumed(trainee, tmp_path):
    """The kernel ends the process, so it says nothing itself; torchrun reports its victim first."""
    recipe = RECIPE.replace(
        "        time.sleep(0.03)",
        "        import os, pathlib\n"
        '        flag = pathlib.Path(__file__).with_name("harmless")\n'
        '        if os.environ["RANK"] == "1" and torch.is_grad_enabled() and not flag.exists():\n'
        '            self.count = getattr(self, "count", 0) + 1\n'
        "            if self.count == 30:\n"
        "                os._exit(3)\n"
        "        time.sleep(0.03)",
    )
    (trainee.folder / "recipe.py").write_text(recipe.replace('{"x": row}', '{"input": row}'))
    with pytest.raises(CommandFailed) as caught:
        trainee.train("train.max_restarts=0")
    assert caught.value.cause is not None
    assert caught.value.cause.startswith("rank 1 "), str(caught.value)
    assert "exited with status 3" in caught.value.cause or "has ended without a word" in caught.value.cause
    (trainee.folder / "harmless").touch()
    record = trainee.train("train.max_restarts=0")
    assert record.details["notes"]["facts"]["resumed_from_step"] in (21, 28)
    assert record.details["interruptions"][0]["rank"] == 1  # of the run before, which failed
    undisturbed = Trainee.made(tmp_path / "other", recipe=recipe)
    (undisturbed.folder / "harmless").touch()
    assert undisturbed.train().content == record.content


def test_an_error_of_the_recipe_is_not_tried_again(trainee):
    recipe = RECIPE.replace("        time.sleep(0.03)", '        raise KeyError("oops")\n        time.sleep(0.01)')
    (trainee.folder / "recipe.py").write_text(recipe.replace('{"x": row}', '{"input": row}'))
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"Small.loss\(\) raised KeyError: 'oops'"):
        trainee.train("train.max_restarts=3")
    assert time.monotonic() - began < 90


SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
import beside

job = json.loads(Path(os.environ["ENGINEHOUSE_JOB"]).read_text())
output, work = Path(job["output"]), Path(job["work"])
assert beside.HERE and Path(job["recipe"].rpartition(":")[0]).exists()
checkpoint = work / "state.pt"
done = torch.load(checkpoint)["done"] if checkpoint.exists() else 0
for step in range(done, job["config"]["max_epochs"]):
    torch.save({"done": step + 1}, checkpoint)
    if step == 3 and done == 0 and "--die" in sys.argv:
        os._exit(9)
if os.environ["RANK"] == "0":
    torch.manual_seed(0)
    from torch import nn
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    save_file(model.state_dict(), output / "model.safetensors")
    (output / "metrics.json").write_text(json.dumps({"started_at": done}))
"""


def with_script(trainee, source=SCRIPT, arguments="[]"):
    (trainee.folder / "my_train.py").write_text(source)
    (trainee.folder / "beside.py").write_text("HERE = True\n")
    (trainee.folder / "pipeline.yaml").write_text(
        PIPELINE.replace("nproc_per_node: 2", f"script: my_train.py, args: {arguments}, nproc_per_node: 1")
    )
    return trainee


def test_a_program_of_the_users_is_trained_with_and_restarted_where_it_was(trainee):
    record = with_script(trainee, arguments='["--die"]').train()
    assert record.metrics == {"started_at": 4.0}
    assert [entry["reason"] for entry in record.details["interruptions"]] == ["local rank 0 exited with status 9"]
    assert with_script(trainee, arguments='["--die"]').train().id == record.id
    (trainee.folder / "beside.py").write_text("HERE = 1\n")
    assert trainee.train().id != record.id


def test_a_program_that_breaks_the_contract_is_told_which_part(trainee):
    with_script(trainee, SCRIPT.replace("save_file(", "print("))
    with pytest.raises(ConfigError, match="ended well, but left no ") as caught:
        trainee.train()
    assert str(trainee.folder / "my_train.py") in str(caught.value)


def test_training_starts_from_an_artifact_which_is_a_material(trainee):
    first = trainee.train("train.max_epochs=1")
    record = trainee.train("train.max_epochs=1", "train.start_from=small/train@1")
    assert record.materials["start_from"].record == first.id
    assert record.details["history"][0]["train_loss"] < first.details["history"][0]["train_loss"]
    assert trainee.train("train.max_epochs=1", "train.start_from=small/train@1").id == record.id
    with pytest.raises(ConfigError, match="there is no small/train@7"):
        trainee.train("train.start_from=small/train@7")


def test_the_record_holds_curves_and_what_was_used(reference):
    assert {"metrics.jsonl", "build.log"} <= set(reference.byproducts)
    usage = reference.details["notes"]["facts"]["usage"]
    assert len(usage) == 2
    assert all(of_rank["peak_memory_mb"] > 50 for of_rank in usage)
    assert all(of_rank["cpu_percent"] > 0 for of_rank in usage)
    assert reference.details["world_sizes"] == [[1, 2]]
    assert reference.details["interruptions"] == []


@pytest.mark.slow
def test_a_port_in_use_and_machines_that_do_not_come_are_named_as_the_cause(trainee):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CommandFailed) as caught:
            trainee.train(f"train.rdzv_endpoint={endpoint}", 'train.nnodes="1:2"', "train.batch_size=12")
    assert caught.value.cause == "a port is in use by another process"
    missing = ["train.nnodes=2", "train.batch_size=12", "train.rdzv_conf='join_timeout=2'"]
    with pytest.raises(CommandFailed) as caught:
        trainee.train(f"train.rdzv_endpoint={endpoint}", *missing)
    assert caught.value.cause is not None
    assert caught.value.cause.startswith("fewer machines came to train.rdzv_endpoint than train.nnodes asks for")


@pytest.mark.slow
def test_what_the_kernel_kills_for_want_of_memory_is_told_with_the_rank_and_a_mend(trainee):
    greedy = RECIPE.replace(
        "        time.sleep(0.03)",
        '        if __import__("os").environ["RANK"] == "1" and torch.is_grad_enabled():\n'
        "            self.held = [*getattr(self, 'held', []), torch.ones(1 << 25)]  # 128 MB more with each step\n"
        "        time.sleep(0.6)",
    )
    (trainee.folder / "recipe.py").write_text(greedy.replace('{"x": row}', '{"input": row}'))
    (trainee.folder / "pipeline.yaml").write_text(PIPELINE.replace("max_epochs", "max_restarts: 0, max_epochs"))
    with memory_limit(1800) as within:
        run = trainee.start(around=within)
        run.wait(120)
    told = (trainee.folder / "orchestrator.log").read_text()
    assert run.returncode == 1, told
    assert "out of memory: the kernel killed a process of this control group" in told
    assert re.search(r"rank 1 (was killed by the kernel, out of memory; it had \d|was killed by SIGKILL)", told), told
    if "rank 1 was killed by the kernel" in told:  # where the other rank lived to tell
        assert "try train.batch_size 5 (it is 10)" in told


@pytest.mark.slow
def test_a_compiled_model_learns_what_the_plain_one_does(trainee, reference):
    record = trainee.train("train.compile=true", "train.max_epochs=2")
    losses = [[entry["train_loss"] for entry in of.details["history"][:2]] for of in (record, reference)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


TOLD = {
    "rank 0": "rank 0 (was killed by SIGKILL|has ended without a word)",
    "rank 1": "rank 1 (was killed by SIGKILL|has ended without a word)",
    "torchrun": "torchrun was killed by SIGKILL|torchrun got SIG|asked to stop",
    "orchestrator": "the run that trained was killed",
}
"""By who is killed, what the record tells of it."""


def random_kills(runs, kills):
    """Of the 168 steps the last ones are left out: a sign of life comes twice a second, and would not tell of them."""
    chosen = random.Random(3)
    for number in range(runs):
        steps = sorted(chosen.sample(range(1, 130), kills))
        yield pytest.param([(chosen.choice(list(TOLD)), step) for step in steps], id=str(number))


@pytest.mark.slow
@pytest.mark.parametrize("kills", list(random_kills(4, 5)))
def test_whoever_is_killed_whenever_the_weights_are_the_same(kills, trainee, reference):
    print(kills)
    (trainee.folder / "pipeline.yaml").write_text(PIPELINE.replace("max_epochs", "max_restarts: 5, max_epochs"))
    run, struck = trainee.start(), set()
    for victim, step in kills:
        beat = trainee.living_at(step, rank=0 if victim == "rank 0" else 1, struck=struck)
        pid = {"torchrun": trainee.parent(beat["pid"]), "orchestrator": run.pid}.get(victim, beat["pid"])
        os.kill(pid, signal.SIGKILL)
        if victim == "orchestrator":
            assert run.wait(30) == -signal.SIGKILL
            run = trainee.start()
    assert run.wait(180) == 0
    record = trainee.train()
    assert_same(record, reference)
    reasons = [entry["reason"] for entry in record.details["interruptions"]]
    assert len(reasons) == len(kills), reasons
    for (victim, _), reason in zip(kills, reasons, strict=True):
        assert re.match(TOLD[victim], reason), reasons
