"""Several ranks, forked from this process because torch is slow to import: resuming, reshaping, naming who failed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tasks.programs import rank_failures, train
from tasks.programs.preparation import parallelise
from tasks.toolchain.processes import find_free_ports

NOTICE = """
    def loss(self, outputs, targets):
        import os, signal
        if torch.is_grad_enabled():
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == self.stop_at and os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGTERM)
        return F.cross_entropy(outputs["y"], targets, reduction="none")

    stop_at = 0
"""


def run_ranks(made, size, *, patience=60, **config):
    """Train with forked ranks; gives the output folder and the exit statuses by rank."""
    settings = {"max_epochs": 4, "batch_size": 12, "seed": 0, "timeout": 20, "log_every_steps": 1, **config}
    job = made.job("train", config=settings)
    shutil.rmtree(job["output"])
    Path(job["output"]).mkdir()
    (port,) = find_free_ports(1)
    sys.stdout.flush()
    children = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": str(port),
                }  # fmt: skip
                train.main(job)
                status = 0
            except BaseException as error:  # noqa: BLE001 - as bootstrap does
                status = rank_failures.record(error, job)
            finally:
                os._exit(status)
        children.append(pid)
    deadline = time.monotonic() + patience
    statuses = {}
    while len(statuses) < size:
        for rank, pid in enumerate(children):
            if rank not in statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for rank, pid in enumerate(children):
                if rank not in statuses:
                    os.kill(pid, 9)
        time.sleep(0.02)
    return Path(job["output"]), [statuses[rank] for rank in range(size)]


def recipe(bench, more="", **options):
    made = bench(**options)
    source = made.file.read_text().replace("return rows(50, 1)", "return rows(53, 1)")
    at = source.index("    def loss"), source.index("    def metric")
    made.file.write_text(source[: at[0]] + NOTICE.lstrip("\n") + "\n" + source[at[1] :] + textwrap.indent(more, "    "))
    return made


def stopping(made, step):
    made.file.write_text(made.file.read_text().replace("stop_at = 0", f"stop_at = {step}"))


def report(output):
    return json.loads((output / "metrics.json").read_text())


# Each rank has batch statistics of its own until DDP gives all those of the leading one.
STATISTICS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(self.norm(x))
"""
BEST = {"monitor": {"metric": "loss", "mode": "min", "patience": None, "min_delta": 0.0}}


@pytest.mark.parametrize(
    ("size", "options", "config"),
    [(2, {}, {}), (3, {}, {}), (2, {"model": STATISTICS}, {}), (2, {"model": STATISTICS}, BEST)],
    ids=["two", "three", "batch statistics", "batch statistics of the best epoch"],
)
def test_interrupted_ranks_end_with_the_bytes_of_uninterrupted_ones(size, options, config, bench):
    whole, statuses = run_ranks(recipe(bench, **options), size, **config)
    assert statuses == [0] * size
    made = recipe(bench, **options)
    stopping(made, 8)
    stopped, statuses = run_ranks(made, size, **config)
    assert statuses == [rank_failures.PREEMPTED] * size
    told = json.loads((stopped / "error.json").read_text())
    assert told["kind"] == "preempted"
    # torchrun asks workers to stop, too, when a host joins: then they go on at once.
    assert not rank_failures.restart_is_vain(stopped)
    stopping_no_more = made.file.read_text().replace("stop_at = 8", "stop_at = 0")
    made.file.write_text(stopping_no_more)
    resumed, statuses = run_ranks(made, size, **config)
    assert statuses == [0] * size
    for name in ("model.safetensors", "metrics.json"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes(), name


def test_what_is_validated_is_what_is_kept(bench):
    made = recipe(bench, model=STATISTICS)
    output, statuses = run_ranks(made, 2, max_epochs=1)
    assert statuses == [0, 0]
    user = made.recipe()
    model = user.model(["x"])
    model.load_state_dict(load_file(output / "model.safetensors"))
    model.eval()
    inputs, targets = user.batch(list(user.data("validation", ["x"])))
    with torch.no_grad():
        loss = user.losses(user.forward(model, inputs), targets).mean()
    assert report(output)["metrics"]["validation_loss"] == pytest.approx(float(loss), abs=1e-6)


@pytest.mark.parametrize(("size", "full"), [(1, 0), (2, 0), (2, 1)])
def test_a_disk_that_is_full_is_told_as_such_by_every_rank(size, full, bench):
    made = recipe(
        bench, model=STATISTICS.replace("nn.Linear(4, 3)", "nn.Sequential(nn.Linear(4, 4096), nn.Linear(4096, 3))")
    )
    made.file.write_text(
        made.file.read_text().replace("return rows(53, 1)", "return Limited(rows(53, 1))")
        + textwrap.dedent(f"""
        import os, resource, signal

        class Limited(list):
            # To whoever writes, a limit on the size of files is a disk that is full.
            def __getitem__(self, index):
                if os.environ.get("RANK") == "{full}":
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
                return super().__getitem__(index)
        """)
    )
    output, statuses = run_ranks(made, size, timeout=10, checkpoint={"every_steps": 3})
    assert statuses == [1] * size
    failures = [json.loads(path.read_text()) for path in (output / "failures").glob("*.json")]
    assert len(failures) == size
    for failure in failures:
        assert "a checkpoint cannot be written" in failure["message"]
        assert f"(rank {full})" in failure["message"]
        assert not failure["symptom"]


def test_the_ranks_exchange_gradients_once_per_step_however_many_parts_it_has(bench, monkeypatch):
    made = recipe(bench)

    def counting(model, world):
        parallel = parallelise(model, world)

        def hook(state, bucket):
            with (made.folder / f"exchanges-{world.rank}").open("a") as file:
                file.write("x")
            return allreduce_hook(state, bucket)

        parallel.register_comm_hook(None, hook)
        return parallel

    monkeypatch.setattr(train, "parallelise", counting)
    counted = {}
    for parts in (1, 3):
        output, statuses = run_ranks(made, 2, max_epochs=1, gradient_accumulation_steps=parts)
        assert statuses == [0, 0]
        counted[parts] = len((made.folder / "exchanges-0").read_text())
        (made.folder / "exchanges-0").unlink()
        shutil.rmtree(output.parent / "work")
    assert counted[3] == counted[1] >= 5, "53 rows in steps of 12"


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_a_checkpoint_is_taken_up_by_more_or_fewer_ranks(before, after, bench):
    whole, _ = run_ranks(recipe(bench), before)
    made = recipe(bench)
    stopping(made, 8)
    run_ranks(made, before)
    made.file.write_text(made.file.read_text().replace("stop_at = 8", "stop_at = 0"))
    resumed, statuses = run_ranks(made, after)
    assert statuses == [0] * after
    mine, theirs = report(resumed), report(whole)
    # The pass with which DDP settles its buckets calls the loss, too.
    assert mine["world_sizes"] == [[1, before], [9 if before == 1 else 8, after]]
    for one, other in zip(mine["history"], theirs["history"], strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], abs=1e-6)
        assert one["steps"] == other["steps"]


def test_micro_batches_of_several_ranks_give_the_loss_of_one(bench):
    histories = []
    for size, parts in ((1, 1), (2, 2), (3, 2)):
        output, statuses = run_ranks(recipe(bench), size, gradient_accumulation_steps=parts)
        assert statuses == [0] * size
        histories.append(report(output)["history"])
    for history in histories[1:]:
        for mine, alone in zip(history, histories[0], strict=True):
            assert mine["train_loss"] == pytest.approx(alone["train_loss"], abs=1e-6)
            assert mine["validation_loss"] == pytest.approx(alone["validation_loss"], abs=1e-6)


MISBEHAVING = {
    "exits": ("os._exit(3)", "rank 1 has ended without a word", True),
    "raises": ('raise OverflowError("too much")', "raised OverflowError: too much", False),
    "hangs": ("time.sleep(60)", 'rank 1 did not come: in the phase "loading data" of step 3', True),
    "is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 is stopped (as by SIGSTOP or a debugger)", True),
    "runs out of memory": (
        "resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34)); bytearray(2**35)", "rank 1 ran out of memory", False
    ),
    "cannot allocate a tensor": ("torch.empty(2**50)", "rank 1 ran out of memory", False),
}  # fmt: skip


@pytest.mark.parametrize(("action", "says", "symptom"), MISBEHAVING.values(), ids=MISBEHAVING)
def test_the_rank_that_failed_is_named_and_not_its_victims(action, says, symptom, bench):
    made = recipe(bench)
    made.file.write_text(
        made.file.read_text().replace("return rows(53, 1)", "return Misbehaving(rows(53, 1))")
        + textwrap.dedent(f"""
        import os, resource, signal, time

        class Misbehaving(list):
            count = 0

            def __getitem__(self, index):
                Misbehaving.count += 1
                if os.environ.get("RANK") == "1" and Misbehaving.count > 22:
                    {action}
                return super().__getitem__(index)
        """)
    )
    began = time.monotonic()
    output, statuses = run_ranks(made, 2, patience=40, timeout=4)
    assert time.monotonic() - began < 50
    assert statuses[0] == 1
    failures = [json.loads(path.read_text()) for path in sorted((output / "failures").glob("*.json"))]
    first = min(failures, key=lambda failure: (failure["symptom"], failure["time"]))
    assert first["symptom"] is symptom
    assert says in first["message"]
    if symptom:
        assert (first["rank"], first["suspect"]) == (0, 1)
    assert not (output / "model.safetensors").exists()


SLOW = """
    def loss(self, outputs, targets):
        import os, time
        time.sleep(0.1 if os.environ["RANK"] == "1" and torch.is_grad_enabled() else 0)
        return F.cross_entropy(outputs["y"], targets, reduction="none")
"""


def with_loss(bench, loss):
    made = bench()
    source = made.file.read_text()
    made.file.write_text(
        source[: source.index("    def loss")] + loss.lstrip("\n") + "\n" + source[source.index("    def metric") :]
    )
    return made


def test_a_rank_that_is_slow_all_the_time_is_named_with_the_share_that_others_wait(bench):
    made = with_loss(bench, SLOW)
    _, statuses = run_ranks(made, 2, max_epochs=12)  # it has to be slow at 20 meetings in a row, of 60
    assert statuses == [0, 0]
    notes = json.loads((made.folder / "train" / "work" / "notes.json").read_text())
    (warning,) = notes["warnings"]
    found = re.match(r"rank 1 is slower than the others: they wait for it (\d+)% of the time", warning)
    assert found
    ranks = notes["facts"]["ranks"]
    assert ranks["slowest"] == 1
    assert ranks["share_waited"] > 0.2
    assert 20 < int(found[1]) <= 100


def test_a_data_loading_process_that_is_killed_is_named_with_its_rank(bench):
    made = recipe(bench)
    made.file.write_text(
        made.file.read_text().replace("return rows(53, 1)", "return Dying(rows(53, 1))")
        + textwrap.dedent("""
        import os, signal

        class Dying(list):
            count = 0

            def __getitem__(self, index):
                if torch.utils.data.get_worker_info() is not None and os.environ["RANK"] == "1":
                    Dying.count += 1
                    if Dying.count > 8:
                        os.kill(os.getpid(), signal.SIGKILL)
                return super().__getitem__(index)
        """)
    )
    output, statuses = run_ranks(made, 2, patience=25, timeout=6, num_workers=1)
    assert statuses[1] == 1
    told = json.loads((output / "failures" / "0-1.json").read_text())
    assert re.match(r"a data loading process of rank 1 \(pid \d+\) was ended by a signal \(Killed\)", told["message"])
    assert not told["symptom"]
    assert "/dev/shm" in told["hint"]
