"""Stage `train`: the recipe's model, trained by torchrun, becomes `model.safetensors`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks import evaluation
from tasks.artifacts.record import ArtifactRef
from tasks.artifacts.store import ArtifactStore
from tasks.config import Pipeline, Train, as_json, keyed
from tasks.errors import CommandFailed, ConfigError, Problem
from tasks.stage import Built, Identity, KeyedStage, KeyParts, Site, Step, move_to_product, program_step, read_json
from tasks.toolchain import probe
from tasks.toolchain.torchrun import ENVIRONMENT, agent_signal, end_of_log, failures, first_cause, torchrun_command

NAME = "train"
START = "start_from"
"""The material that holds the weights to start from, where the pipeline names one."""
JOB_VARIABLE = "ENGINEHOUSE_JOB"
"""The environment variable that names the job file to a training program of the user's."""
CHAMPION = "champion"
NUMBERS = 'expected numbers by name, such as {"accuracy": 0.97}'
INTERRUPTIONS = "interruptions.jsonl"


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
            return names[record.id]
        pending += [material.record for material in record.materials.values()]
    raise ConfigError(
        Problem(
            f"{named} was not made of anything trained: expected {CHAMPION}, or an artifact such as "
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
        "weights": None if start is None else str(start / "model.safetensors"),
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


def _steps(site: Site) -> tuple[Step, ...]:
    pipeline, train = site.pipeline, site.pipeline.train
    steps = [
        program_step(
            site,
            NAME,
            what="training",
            job=_job(site),
            timeout_seconds=60 * train.timeout_minutes,
            launcher=torchrun_command(nproc_per_node=train.nproc_per_node, max_restarts=train.max_restarts),
            script=None if train.script is None else python_script(pipeline.folder / train.script, train.args),
            env={
                **ENVIRONMENT,
                "OMP_NUM_THREADS": str(train.num_threads),
                JOB_VARIABLE: str(site.work / f"{NAME}.json"),
            },
            grace_seconds=train.preemption_grace_seconds,
            after_failure=recovery(site, train),
        )
    ]
    if probe.distribution_version("matplotlib") is not None:
        metrics = str(site.work / NAME / "work" / "metrics.jsonl")
        steps.append(program_step(site, "curves", what="the plot", job={"metrics": metrics}, timeout_seconds=300))
    return tuple(steps)


def python_script(file: Path, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line of a user's own program: not isolated, so that it imports what lies beside it."""
    return (sys.executable, "-u", str(file), *arguments)


def recovery(site: Site, train: Train) -> Callable[[CommandFailed], str | None]:
    """Return what decides, after a failure, whether the training is started again; see `Step.after_failure`.

    torchrun restarts workers by itself. What is left for here: a notice of preemption, and an agent that was killed.
    Without progress between two of them it gives up after `train.max_restarts`.
    """
    output, work = site.work / NAME / "output", site.work / NAME / "work"

    def after(failure: CommandFailed) -> str | None:
        lines = end_of_log(failure.log)
        error = output / "error.json"
        told = json.loads(error.read_bytes()) if error.exists() else None
        if failure.ended == "cancelled" or failure.ended.startswith("deadline"):
            return None
        if told is not None and told["kind"] == "preempted":
            reason = told["message"]
        elif told is not None:
            return None  # it would fail again in the same way
        elif failure.ended.startswith("killed by"):
            reason = f"torchrun was {failure.ended}"
        elif (name := agent_signal(lines)) is not None:
            reason = f"torchrun got {name}"
        else:
            raise _explained(failure, output, lines) from failure
        return _counted(work, reason, train.max_restarts)

    return after


def _explained(failure: CommandFailed, output: Path, lines: tuple[str, ...]) -> CommandFailed:
    """The failure with its first cause, which torchrun does not know."""
    cause = first_cause(output, lines)
    parts = [] if cause is None else [cause.text, *([cause.hint] if cause.hint else [])]
    if failure.cause is not None and (cause is None or "memory" in failure.cause):
        parts.insert(0, failure.cause)
    return CommandFailed(
        failure.what,
        argv=failure.argv,
        ended=failure.ended,
        log=failure.log,
        last_lines=failure.last_lines,
        cause="\n".join(parts) or None,
    )


def _counted(work: Path, reason: str, allowed: int) -> str | None:
    """Write the interruption down; None where there were too many at the same checkpoint."""
    work.mkdir(parents=True, exist_ok=True)
    latest = work / "checkpoints" / "LATEST"
    at = latest.read_text().strip() if latest.exists() else None
    file = work / INTERRUPTIONS
    with file.open("a") as log:
        log.write(json.dumps({"reason": reason, "checkpoint": at}) + "\n")
    before = _json_lines(file)
    here = 0
    for entry in reversed(before):
        if entry["checkpoint"] != at:
            break
        here += 1
    return reason if here <= allowed else None


def _json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _collect(site: Site) -> Built:
    output, work = site.work / NAME / "output", site.work / NAME / "work"
    script = site.pipeline.train.script
    report = read_json(output / "metrics.json") if script is None else foreign_report(site, output)
    move_to_product(site, {"model.safetensors": output / "model.safetensors"})
    known = ("history", "epoch", "world_size", "world_sizes", "samples", "parameters")
    notes = work / "notes.json"
    kept = {name: work / name for name in ("metrics.jsonl", "trace.json")}
    kept["curves.png"] = site.work / "curves" / "output" / "curves.png"
    return Built(
        metrics=report["metrics"],
        details={
            **{name: report[name] for name in known if name in report},
            "interruptions": [
                *_json_lines(work / INTERRUPTIONS),
                *({"reason": failure["message"], "rank": failure["rank"]} for failure in failures(output)),
            ],
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
    weights, metrics = output / "model.safetensors", output / "metrics.json"
    if not weights.is_file():
        raise broken(f"left no {weights}", hint)
    if not is_safetensors(weights):
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
)
