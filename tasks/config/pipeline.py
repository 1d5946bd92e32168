"""The whole pipeline file as one value, and the checks that need more than one of its groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, PrivateAttr, SerializeAsAny, model_validator

from tasks.config.fields import Keyed, Placement, Settings
from tasks.config.groups import (
    AxisName,
    AxisRange,
    DataSource,
    Export,
    Gates,
    Input,
    InputName,
    Publish,
    Serve,
    Train,
)
from tasks.config.kinds import DEPLOY_TARGETS, ENGINES, DeployConfig, EngineConfig, nested, of_kind
from tasks.config.names import Name, RecipeText
from tasks.errors import Problem

BATCH = "batch"
"""The axis that Triton batches along."""

_engine = of_kind(ENGINES, EngineConfig)
_deploy = of_kind(DEPLOY_TARGETS, DeployConfig)


class Pipeline(Settings):
    """One pipeline: from a recipe to a served model."""

    name: Placement[Name]
    """The pipeline's name, under which its artifacts are listed."""
    model: Keyed[Name] = Field(default_factory=lambda data: str(data["name"]))
    """The model's name on Triton, which clients use. The pipeline's name if left out."""
    recipe: Placement[RecipeText]
    """`FILE.py:CLASS`, relative to the pipeline file. Its code is part of the key, its place is not."""
    data: Keyed[Annotated[Mapping[Name, DataSource], Field(min_length=1)]]
    """By a name of your own, what identifies each data set."""
    shapes: Keyed[Mapping[AxisName, AxisRange]] = Field(default_factory=dict)
    """By name, the axes whose size is not fixed: the one declaration of what is dynamic."""
    inputs: Keyed[Annotated[Mapping[InputName, Input], Field(min_length=1)]]
    """By name, in order, the model's inputs."""
    train: Train = Train()
    """Training, by torchrun."""
    export: Export = Export()
    """The export to ONNX."""
    engine: Annotated[SerializeAsAny[EngineConfig], BeforeValidator(_engine)] = Field(
        default_factory=lambda: cast("EngineConfig", {"kind": "onnxruntime"}), validate_default=True
    )
    """What turns the ONNX model into what is served; its fields depend on `kind`. `onnxruntime` if left out."""
    serve: Serve = Serve()
    """How Triton serves the model."""
    gates: Gates = Gates()
    """What must hold before a version is released."""
    publish: Publish = Publish()
    """Where the model goes."""
    deploy: Annotated[SerializeAsAny[DeployConfig], BeforeValidator(_deploy)] = Field(
        default_factory=lambda: cast("DeployConfig", {"kind": "process"}), validate_default=True
    )
    """Where the model is served; its fields depend on `kind`. `process` if left out."""
    approve: Placement[Literal["before_promote"] | None] = None
    """`before_promote`: a person has to agree before the live servers move to a verified candidate. Nobody is asked if
    left out."""
    approve_within_hours: Placement[Annotated[float, Field(gt=0)]] = 24.0
    """How long a run waits for that; then it has failed, and the candidate stays a candidate."""

    _source: Path = PrivateAttr(default_factory=lambda: Path("pipeline.yaml").absolute())
    _lines: Mapping[str, int | None] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any) -> None:
        """`Pipeline.model_validate(mapping, context={"source": file})` says which file the mapping was read from; and
        `lines` there, at which line each field stands, None for one that the command line gave."""
        if context is not None:
            self._source = Path(context["source"]).absolute()
            self._lines = context.get("lines", {})

    def located(self, problem: Problem) -> Problem:
        """The problem with the file and the line of its field, or of what the field would stand in."""
        if problem.file is not None or problem.field is None:
            return problem
        place = problem.field
        while place and place not in self._lines:
            place = place.rpartition(".")[0]
        if place and self._lines[place] is None:
            return replace(problem, message=f"{problem.message}; given by --set")
        return replace(problem, file=self._source, line=self._lines.get(place))

    @property
    def source(self) -> Path:
        """The pipeline file, absolute."""
        return self._source

    @property
    def folder(self) -> Path:
        """The pipeline file's folder, absolute; paths in the file are relative to it."""
        return self._source.parent

    @property
    def recipe_file(self) -> Path:
        """The recipe's Python file, absolute."""
        return self.folder / self.recipe.rpartition(":")[0]

    @property
    def recipe_attribute(self) -> str:
        """The name of the recipe's class in its file."""
        return self.recipe.rpartition(":")[2]

    @property
    def repository(self) -> Path:
        """The model repository, absolute."""
        return self.folder / self.publish.repository

    @property
    def world_size(self) -> int:
        """Training processes on all machines together; where their number may change, at most."""
        return self.train.max_nodes * self.train.nproc_per_node

    @model_validator(mode="after")
    def _agrees(self) -> Pipeline:
        found = [{"type": "stated", "loc": loc, "msg": message, "input": None} for loc, message in contradictions(self)]
        if found:
            raise nested(Pipeline, found)
        return self


def contradictions(pipeline: Pipeline) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Fields that are each right and do not fit together: the place to mend, and what is wrong, naming both fields."""
    yield from _axes(pipeline)
    yield from _batching(pipeline)
    yield from _training(pipeline)
    for place, message in pipeline.engine.contradictions(pipeline):
        yield ("engine", *place), message


def _training(pipeline: Pipeline) -> Iterator[tuple[tuple[str | int, ...], str]]:
    train, size = pipeline.train, pipeline.world_size
    if train.batch_size % size:
        yield (
            ("train", "batch_size"),
            f"{train.batch_size} cannot be split evenly over the {size} processes of "
            f"train.nproc_per_node: expected a multiple of {size}",
        )
    elif train.batch_size % (size * train.gradient_accumulation_steps):
        yield (
            ("train", "batch_size"),
            f"{train.batch_size} cannot be split evenly over the {size} processes of train.nproc_per_node and the "
            f"{train.gradient_accumulation_steps} micro-batches of train.gradient_accumulation_steps: "
            f"expected a multiple of {size * train.gradient_accumulation_steps}",
        )
    if train.nnodes != 1 and train.rdzv_endpoint is None:
        yield ("train", "nnodes"), "several machines need a place to meet: expected train.rdzv_endpoint beside it"
    if train.args and train.script is None:
        yield ("train", "args"), "only a program of your own takes arguments: expected train.script beside it"
    if train.profile is not None and train.profile.steps[0] > train.profile.steps[1]:
        first, last = train.profile.steps
        yield ("train", "profile", "steps"), f"expected the first step before the last, got {first} and {last}"


def _axes(pipeline: Pipeline) -> Iterator[tuple[tuple[str | int, ...], str]]:
    used = {axis for spec in pipeline.inputs.values() for axis in spec.shape if isinstance(axis, str)}
    for name, spec in pipeline.inputs.items():
        for at, axis in enumerate(spec.shape):
            if isinstance(axis, str) and axis not in pipeline.shapes:
                known = f"shapes declares {', '.join(pipeline.shapes)}" if pipeline.shapes else "shapes declares none"
                yield (
                    ("inputs", name, "shape", at),
                    f"the axis {axis} is not declared in shapes ({known}): "
                    f"expected shapes.{axis}: {{min: …, opt: …, max: …}}, or a fixed size",
                )
            if axis == BATCH and at > 0:
                yield (
                    ("inputs", name, "shape", at),
                    f"shapes.{BATCH} must be the first axis of inputs.{name}.shape, and stand there once",
                )
    for axis in pipeline.shapes:
        if axis not in used:
            yield ("shapes", axis), f"no shape of inputs uses the axis {axis}: expected it in some inputs.NAME.shape"


def _batching(pipeline: Pipeline) -> Iterator[tuple[tuple[str | int, ...], str]]:
    serve, batch = pipeline.serve, pipeline.shapes.get(BATCH)
    largest = serve.max_batch_size
    if largest == 0:
        if serve.dynamic_batching is not None:
            yield (
                ("serve", "dynamic_batching"),
                "dynamic batching needs batches, but serve.max_batch_size is 0: expected serve.max_batch_size >= 1",
            )
        return
    if batch is None:
        yield (
            ("serve", "max_batch_size"),
            f"{largest} asks for batches, but shapes declares no axis {BATCH}: expected shapes.{BATCH}, or 0",
        )
    else:
        if largest > batch.max:
            yield (
                ("serve", "max_batch_size"),
                f"{largest} is more than shapes.{BATCH}.max, {batch.max}: expected at most {batch.max}",
            )
        if batch.min > 1:
            yield (
                ("shapes", BATCH, "min"),
                f"{batch.min} refuses the single requests that serve.max_batch_size, {largest}, lets Triton send: "
                "expected 1",
            )
        for name, spec in pipeline.inputs.items():
            if BATCH not in spec.shape:
                yield (
                    ("inputs", name, "shape"),
                    f"serve.max_batch_size, {largest}, lets Triton batch: expected {BATCH} as the first axis",
                )
    for at, size in enumerate(serve.dynamic_batching.preferred_batch_size if serve.dynamic_batching else ()):
        if size > largest:
            yield (
                ("serve", "dynamic_batching", "preferred_batch_size", at),
                f"{size} is more than serve.max_batch_size, {largest}",
            )
