"""Stage `preflight`: the very graph that TensorRT will get, compiled by TensorRT-RTX on the CPU.

`enginehouse run pipeline.yaml --until preflight` ends here, on a laptop: unsupported operators with their nodes, shapes
that do not fit and bad profiles come out before a GPU is paid for. The report says what that proves and what not.
"""

from __future__ import annotations

from tasks.config import Pipeline
from tasks.engines import Preflight, kind_of
from tasks.stage import Built, Identity, KeyedStage, KeyParts, Site, Step, move_to_product, program_step, read_json
from tasks.toolchain import builder_environment


def _wanted(pipeline: Pipeline) -> Preflight:
    preflight = kind_of(pipeline).preflight(pipeline)
    assert preflight is not None
    return preflight


def _applies(pipeline: Pipeline) -> bool:
    return kind_of(pipeline).preflight(pipeline) is not None


def _check(_pipeline: Pipeline) -> None:
    builder_environment.require("tensorrt-rtx")


def _profiles(pipeline: Pipeline) -> list[dict[str, dict[str, list[int]]]]:
    return [
        {
            end: {name: list(shape) for name, shape in at.items()}
            for end, at in (("min", profile.min), ("opt", profile.opt), ("max", profile.max))
        }
        for profile in _wanted(pipeline).profiles
        if profile.opt
    ]


def _parts(pipeline: Pipeline, _identity: Identity) -> KeyParts:
    return KeyParts(
        config={"profiles": _profiles(pipeline), "compute_capability": _wanted(pipeline).compute_capability},
        environment={"tensorrt-rtx": builder_environment.requirements_digest("tensorrt-rtx")},
    )


def _steps(site: Site) -> tuple[Step, ...]:
    graph = site.materials.get("precision", site.materials["export"]) / "model.onnx"
    return (
        program_step(
            site,
            "preflight",
            what="the preflight",
            job={
                "onnx": str(graph),
                "profiles": _profiles(site.pipeline),
                "compute_capability": _wanted(site.pipeline).compute_capability,
            },
            timeout_seconds=60 * site.pipeline.export.timeout_minutes,
            python=builder_environment.find_environment("tensorrt-rtx").python,
        ),
    )


def _collect(site: Site) -> Built:
    output = site.work / "preflight" / "output"
    report = read_json(output / "report.json")
    seconds = read_json(site.work / "preflight" / "work" / "notes.json")["seconds"]
    move_to_product(site, {"report.json": output / "report.json"})
    return Built(metrics={"layers": report["layers"], "build_seconds": seconds["build"]}, details=report)


def _preview(_pipeline: Pipeline) -> tuple[str, ...]:
    return ("compiles the graph with TensorRT-RTX on this machine's CPU: strong evidence for TensorRT, no proof",)


STAGE = KeyedStage(
    name="preflight",
    version=1,
    reproducible=False,  # the size of the plan is told, and it may differ
    materials=("export", "precision"),
    parts=_parts,
    steps=_steps,
    collect=_collect,
    applies=_applies,
    check=_check,
    preview=_preview,
)
