"""Stage `train`: the recipe's model, trained by torchrun, becomes `model.safetensors`.

A program of the user's may leave a graph instead, `model.onnx`.
"""

from __future__ import annotations

import getpass
import json
import math
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks import evaluation
from tasks.artifacts.record import ArtifactRef
from tasks.artifacts.store import ArtifactStore
from tasks.config import Pipeline, as_json, keyed
from tasks.errors import ConfigError, Problem, ToolMissing
from tasks.stage import Built, Identity, KeyedStage, KeyParts, Site, Step, move_to_product, program_step, read_json
from tasks.toolchain import probe
from tasks.toolchain.interruptions import Interruptions, settle
from tasks.toolchain.torchrun import ENVIRONMENT, Meeting, ending, join_script, torchrun_command

NAME = "train"
START = "start_from"
"""The material that holds the weights to start from, where the pipeline names one."""
JOB_VARIABLE = "ENGINEHOUSE_JOB"
"""The environment variable that names the job file to a training program of the user's."""
CHAMPION = "champion"
NUMBERS = 'expected numbers by name, such as {"accuracy": 0.97}'


def starting_point(pipeline: Pipeline, store: ArtifactStore) -> ArtifactRef | None:
    """The trained artifact that `train.start_from` names; None where it names none, or there is no champion yet.

    A champion is a release: what was trained for it is found through its materials. Raises `ConfigError` for a name
    that is not there, or was never trained.
    """
    named = pipeline.train.start_from
    if named is None:
        return None
    if named == CHAMPION:
        if CHAMPION not in store.aliases(pipeline.name):
            return None
        named = f"{pipeline.name}@{CHAMPION}"
    pending = [store.resolve(named).record]
    names = {ref.record: ref for ref, _ in store.list(stage=NAME)}
    while pending:
        record = store.get_record(pending.pop())
        if record.stage == NAME and record.id in names:
            if evaluation.trained_graph(store.path(names[record.id])) is not None:
                break
            return names[record.id]
        pending += [material.record for material in record.materials.values()]
    raise ConfigError(
        Problem(
            f"{named} was not made of weights that were trained here: expected {CHAMPION}, or an artifact such as "
            f"{pipeline.name}/{NAME}@1",
            file=pipeline.source,
            field="train.start_from",
        )
    )


def _parts(pipeline: Pipeline, identity: Identity) -> KeyParts:
    code = identity.code.train
    return KeyParts(
        config={"train": keyed(pipeline.train), "inputs": sorted(pipeline.inputs)},
        code=code if identity.script is None else {"recipe": code, "script": identity.script},
        data=identity.data,
        environment=probe.versions(["torch", "numpy"]),
    )


def _job(site: Site) -> dict[str, Any]:
    """A `TrainJob` of tasks/programs/jobs.py."""
    pipeline, train = site.pipeline, site.pipeline.train
    start = site.materials.get(START)
    return {
        "recipe": evaluation.recipe_spec(pipeline),
        "inputs": as_json(pipeline.inputs),
        "weights": None if start is None else str(start / evaluation.WEIGHTS),
        "config": {
            "max_epochs": train.max_epochs,
            "batch_size": train.batch_size,
            "gradient_accumulation_steps": train.gradient_accumulation_steps,
            "seed": train.seed,
            "device": train.device,
            "precision": train.precision,
            "compile": train.compile,
            "max_grad_norm": train.max_grad_norm,
            "learning_rate": train.learning_rate,
            "monitor": None if train.monitor is None else as_json(train.monitor),
            "threads": train.num_threads,
            "num_workers": train.num_workers,
            "timeout": train.collective_timeout_seconds,
            "checkpoint": {name: getattr(train.checkpoint, name) for name in type(train.checkpoint).model_fields},
            "preemption_signal": train.preemption_signal,
            "log_every_steps": train.log_every_steps,
            "trackers": [
                {"kind": t.kind, "folder": str(pipeline.folder / t.folder / t.kind), "name": pipeline.name}
                for t in train.trackers
            ],
            "profile": None if train.profile is None else list(train.profile.steps),
        },
    }


def _folders(site: Site) -> tuple[Path, Path]:
    """The job's `output` and `work`."""
    return site.work / NAME / "output", site.work / NAME / "work"


def _steps(site: Site) -> tuple[Step, ...]:
    pipeline, train = site.pipeline, site.pipeline.train
    output, work = _folders(site)
    own = None if train.script is None else python_script(pipeline.folder / train.script, train.args)
    env = {
        **ENVIRONMENT,
        **ending(preemption_signal=train.preemption_signal, grace_seconds=train.preemption_grace_seconds),
        "OMP_NUM_THREADS": str(train.num_threads),
        JOB_VARIABLE: str(site.work / f"{NAME}.json"),
    }
    if train.compile:
        # Where torch keeps it by itself; but the child's TMPDIR goes with the child, and compiling takes a minute.
        usual = str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
        env["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", usual)
    meeting = None
    if train.rdzv_endpoint is not None:
        meeting = Meeting(endpoint=train.rdzv_endpoint, name=pipeline.name, conf=train.rdzv_conf)

    def training(*, keeps_store: bool, invitation: str | None = None) -> Step:
        return program_step(
            site,
            NAME,
            what="training",
            job=_job(site),
            timeout_seconds=60 * train.timeout_minutes,
            launcher=torchrun_command(
                nproc_per_node=train.nproc_per_node,
                max_restarts=train.max_restarts,
                nnodes=train.nnodes,
                meeting=meeting,
                keeps_store=keeps_store,
            ),
            script=own,
            env=env,
            grace_seconds=train.preemption_grace_seconds,
            attendant=Interruptions(output=output, work=work, allowed=train.max_restarts, invitation=invitation),
        )

    invitation = None
    if meeting is not None:
        guest = training(keeps_store=False)
        invitation = join_script(guest.argv, env, guest.job_file)
    steps = [training(keeps_store=True, invitation=invitation)]
    if probe.distribution_version("matplotlib") is not None:
        metrics = str(work / "metrics.jsonl")
        steps.append(program_step(site, "curves", what="the plot", job={"metrics": metrics}, timeout_seconds=300))
    return tuple(steps)


def _check(pipeline: Pipeline) -> None:
    """`torch.compile` writes C++ and has it compiled, for a GPU too: better said now than after an hour of loading."""
    if not pipeline.train.compile:
        return
    compiler = os.environ.get("CXX", "g++")
    mend = "Debian: apt-get install g++ python3-dev; or set train.compile: false"
    if shutil.which(compiler) is None:
        raise ToolMissing(compiler, why="train.compile needs a C++ compiler (another one is named by $CXX)", mend=mend)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise ToolMissing(str(header), why="what train.compile makes is compiled against Python's headers", mend=mend)


def python_script(file: Path, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line of a user's own program: not isolated, so that it imports what lies beside it."""
    return (sys.executable, "-u", str(file), *arguments)


def _collect(site: Site) -> Built:
    output, work = _folders(site)
    interruptions = settle(output, work)
    script = site.pipeline.train.script
    report = read_json(output / "metrics.json") if script is None else foreign_report(site, output)
    products = (evaluation.WEIGHTS, evaluation.GRAPH, f"{evaluation.GRAPH}.data")
    move_to_product(site, {name: output / name for name in products if (output / name).is_file()})
    known = ("history", "epoch", "world_size", "world_sizes", "samples", "parameters")
    notes = work / "notes.json"
    kept = {name: work / name for name in ("metrics.jsonl", "trace.json")}
    kept["curves.png"] = site.work / "curves" / "output" / "curves.png"
    return Built(
        metrics=report["metrics"],
        details={
            **{name: report[name] for name in known if name in report},
            "interruptions": interruptions,
            "notes": read_json(notes) if notes.exists() else {},
        },
        byproducts={name: path for name, path in kept.items() if path.is_file()},
    )


def foreign_report(site: Site, output: Path) -> dict[str, Any]:
    """What a training program of the user's left, as far as the contract asks for it; raises `ConfigError` naming the
    part that is broken.

    >>> # metrics.json may be {"accuracy": 0.97} or {"metrics": {"accuracy": 0.97}, "history": […], …}
    """
    script = site.pipeline.folder / str(site.pipeline.train.script)

    def broken(message: str, hint: str) -> ConfigError:
        return ConfigError(Problem(f"train.script ended well, but {message}", file=script, hint=hint))

    hint = f"its job, named by ${JOB_VARIABLE}, says under output where its products go (docs/training.md)"
    weights, graph, metrics = (output / name for name in (evaluation.WEIGHTS, evaluation.GRAPH, "metrics.json"))
    if not weights.is_file() and not graph.is_file():
        raise broken(f"left no {weights}, and no {graph.name} either", hint)
    if weights.is_file() and graph.is_file():
        raise broken(f"left both {weights} and {graph.name}", "leave the weights, or the graph that is to be served")
    if weights.is_file() and not is_safetensors(weights):
        raise broken(f"{weights} is no safetensors file", "write it with safetensors.torch.save_file")
    if not metrics.is_file():
        raise broken(f"left no {metrics}", hint)
    try:
        report = json.loads(metrics.read_bytes())
    except json.JSONDecodeError as error:
        raise broken(f"{metrics} is no JSON: {error}", NUMBERS) from error
    found = report.get("metrics", report) if isinstance(report, dict) else None
    if not isinstance(found, dict) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        for value in found.values()
    ):
        raise broken(f"{metrics} holds more than numbers", NUMBERS)
    return {**report, "metrics": found} if "metrics" in report else {"metrics": found}


def is_safetensors(file: Path) -> bool:
    """Whether a file begins as a safetensors file does: the length of a JSON header, and the header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size - 8:
            return False
        try:
            return isinstance(json.loads(opened.read(length)), dict)
        except ValueError:
            return False


STAGE = KeyedStage(
    name=NAME,
    version=2,
    reproducible=True,  # threads, seeds and the order of sums are pinned; another processor may still round otherwise
    materials=(START,),
    parts=_parts,
    steps=_steps,
    collect=_collect,
    check=_check,
)
