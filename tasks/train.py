"""Stage `train`: the recipe's model, trained by torchrun, becomes `model.safetensors`."""

from __future__ import annotations

import sys

from tasks import evaluation
from tasks.config import Pipeline, as_json, keyed
from tasks.stage import Built, Identity, KeyedStage, KeyParts, Site, Step, move_to_product, program_step, read_json
from tasks.toolchain import probe


def torchrun_command(*, nproc_per_node: int) -> tuple[str, ...]:
    """Return what stands before a worker's own command line.

    `--standalone` makes a rendezvous of its own on a free port of this machine, so that two trainings never meet;
    `--no-python` lets the worker's command line name the interpreter with its own options.
    """
    return (
        *(sys.executable, "-I", "-m", "torch.distributed.run"),
        *("--standalone", "--nnodes", "1", "--nproc-per-node", str(nproc_per_node)),
        *("--no-python", "--"),
    )


def _parts(pipeline: Pipeline, identity: Identity) -> KeyParts:
    return KeyParts(
        config={"train": keyed(pipeline.train), "inputs": sorted(pipeline.inputs)},
        code=identity.code.train,
        data=identity.data,
        environment=probe.environment(["torch", "numpy"]),
    )


def _steps(site: Site) -> tuple[Step, ...]:
    train = site.pipeline.train
    job = {
        "recipe": evaluation.recipe_spec(site.pipeline),
        "inputs": as_json(site.pipeline.inputs),
        "config": {
            "max_epochs": train.max_epochs,
            "batch_size": train.batch_size,
            "seed": train.seed,
            "precision": train.precision,
            "learning_rate": train.learning_rate,
            "threads": train.num_threads,
        },
    }
    return (
        program_step(
            site,
            "train",
            what="training",
            job=job,
            timeout_seconds=60 * train.timeout_minutes,
            launcher=torchrun_command(nproc_per_node=train.nproc_per_node),
            env={"OMP_NUM_THREADS": str(train.num_threads)},
        ),
    )


def _collect(site: Site) -> Built:
    output = site.work / "train" / "output"
    report = read_json(output / "metrics.json")
    move_to_product(site, {"model.safetensors": output / "model.safetensors"})
    return Built(
        metrics=report["metrics"],
        details={
            "history": report["history"],
            "world_size": report["world_size"],
            "samples": report["samples"],
            "parameters": report["parameters"],
            "notes": read_json(site.work / "train" / "work" / "notes.json"),
        },
    )


STAGE = KeyedStage(
    name="train",
    version=1,
    reproducible=True,  # threads, seeds and the order of sums are pinned; another processor may still round otherwise
    materials=(),
    parts=_parts,
    steps=_steps,
    collect=_collect,
)
