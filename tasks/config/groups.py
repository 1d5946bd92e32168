"""The groups of fields of a pipeline file, one class each; the union groups (`engine`, `deploy`) are in kinds.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PlainValidator, model_validator

from tasks.config.fields import Keyed, Listed, Placement, PositiveInt, Settings
from tasks.config.names import EndpointText, FolderText, Identifier, MetricName, Name, PathText, Text

DType = Literal[
    "float16", "float32", "float64",
    "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64",
    "bool",
]  # fmt: skip


def _dimension(value: object) -> int | str:
    if isinstance(value, str) and value.isidentifier():
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(f"expected the name of an axis of shapes, or a whole number of at least 1, got {value!r}")


def _nodes(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", value) if isinstance(value, str) else None
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"expected a number of machines, or MIN:MAX such as 1:4, got {value!r}")
    return str(value)


Nodes = Annotated[int | str, PlainValidator(_nodes)]
Dimension = Annotated[int | str, PlainValidator(_dimension)]


class DataSource(Settings):
    """What identifies a data set. Exactly one of the fields; another identity means training again."""

    distribution: Keyed[Text | None] = None
    """An installed Python distribution that carries the data, such as scikit-learn: its version is the identity."""
    path: Keyed[PathText | None] = None
    """A file or folder, relative to the pipeline file: the bytes are the identity, the place is not."""
    version: Keyed[Text | None] = None
    """A text that you change when the data changes: for data in a database or a bucket, or made by the recipe."""

    @model_validator(mode="after")
    def _one(self) -> DataSource:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"expected exactly one of distribution, path and version, got {got}")
        return self


class AxisRange(Settings):
    """The sizes that a dynamic axis takes: `1 <= min <= opt <= max`."""

    min: Keyed[PositiveInt]
    """The smallest size."""
    opt: Keyed[PositiveInt]
    """The size that the engine is tuned for: the usual one."""
    max: Keyed[PositiveInt]
    """The largest size."""

    @model_validator(mode="after")
    def _ordered(self) -> AxisRange:
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"expected min <= opt <= max, got min {self.min}, opt {self.opt}, max {self.max}")
        return self


class Input(Settings):
    """One input of the model: an argument of `forward` and a tensor that a client sends."""

    dtype: Keyed[DType]
    """The element type by its NumPy name."""
    shape: Keyed[Annotated[Listed[Dimension], Field(min_length=1)]]
    """Every dimension in order: the name of an axis of `shapes`, or a fixed size. The axis `batch` comes first."""


class Monitor(Settings):
    """Which epoch's weights become the product (without it the last one's), and when training ends early."""

    metric: Keyed[MetricName]
    """What is watched on the validation data: a name that the recipe's metric gives, or `loss`."""
    mode: Keyed[Literal["max", "min"]] = "max"
    """Whether more or less is better."""
    patience: Keyed[PositiveInt | None] = None
    """Training ends after so many epochs without improvement; never early if left out."""
    min_delta: Keyed[Annotated[float, Field(ge=0)]] = 0.0
    """By how much an epoch must be better to count as an improvement."""


class Checkpoint(Settings):
    """When a state is written from which an interrupted training goes on. Does not change the result."""

    every_steps: Placement[PositiveInt | None] = None
    """Optimizer steps between two checkpoints."""
    every_minutes: Placement[Annotated[float, Field(gt=0)] | None] = 10.0
    """Minutes between two checkpoints."""
    keep: Placement[PositiveInt] = 2
    """How many stay; older ones are removed."""
    asynchronous: Placement[bool] = True
    """Written while training goes on."""


class Tracker(Settings):
    """Where training's metrics go beside the run's own file."""

    kind: Placement[Literal["tensorboard", "mlflow", "wandb"]]
    """Each is an optional extra of the same name: `pip install 'enginehouse[tensorboard]'`."""
    folder: Placement[PathText] = "trackers"
    """Where it writes, in a folder of the kind's name, relative to the pipeline file."""


class Profile(Settings):
    """A trace of torch's profiler, kept beside the build's log."""

    steps: Placement[Annotated[Listed[PositiveInt], Field(min_length=2, max_length=2)]]
    """The first and the last step that are profiled, on the first process."""


class Train(Settings):
    """Training, by torchrun."""

    script: Keyed[PathText | None] = None
    """A training program of your own, relative to the pipeline file, instead of the built-in one (docs/training.md)."""
    args: Keyed[Listed[Text]] = ()
    """Its arguments."""
    start_from: Placement[Text | None] = None
    """Weights to start from: `champion`, or a trained artifact such as `digits/train@3`. Its bytes are a material, and
    count as one; its name does not."""
    strategy: Keyed[Literal["ddp"]] = "ddp"
    """How the processes share the work: `ddp`, every process holds the whole model."""
    nnodes: Keyed[Nodes] = 1
    """Machines, or `MIN:MAX`: as many as are there. More than one need `rdzv_endpoint` (docs/training.md)."""
    rdzv_endpoint: Placement[EndpointText | None] = None
    """`HOST:PORT`: where the machines meet, on the one that runs the pipeline."""
    rdzv_conf: Placement[Text | None] = None
    """More of torchrun's `--rdzv-conf`, such as `join_timeout=600,keep_alive_interval=5`."""
    nproc_per_node: Keyed[PositiveInt] = 1
    """Processes on each machine: one per GPU, or a few on a CPU."""
    device: Keyed[Literal["cpu", "cuda"]] = "cpu"
    """Where it computes. With `cuda` each process takes a GPU."""
    precision: Keyed[Literal["fp32", "bf16-mixed", "fp16-mixed"]] = "fp32"
    """The arithmetic of the training step. Weights are fp32 in any case; fp16 comes with gradient scaling."""
    compile: Keyed[bool] = False
    """Compile the model with `torch.compile`: slow to start, then faster."""
    max_epochs: Keyed[PositiveInt] = 10
    """Passes over the training data."""
    batch_size: Keyed[PositiveInt] = 64
    """Samples in one optimizer step over all processes and micro-batches together; a multiple of both numbers."""
    gradient_accumulation_steps: Keyed[PositiveInt] = 1
    """Micro-batches that one optimizer step is cut into: less memory, the same result but for rounding."""
    max_grad_norm: Keyed[Annotated[float, Field(gt=0)] | None] = None
    """Gradients are scaled down to this norm where theirs is larger."""
    learning_rate: Keyed[Annotated[float, Field(gt=0)] | None] = None
    """The step of the built-in AdamW, 1e-3 if left out. Leave it out where the recipe brings its own optimizer."""
    seed: Keyed[Annotated[int, Field(ge=0, lt=2**32)]] = 0
    """Seeds weights, order and augmentation. The same seed gives the same weights."""
    num_threads: Keyed[PositiveInt] = 1
    """CPU threads of each process. Keyed, since sums of floats depend on how they are split."""
    monitor: Monitor | None = None
    """Which epoch's weights become the product, and when training ends early."""
    num_workers: Placement[Annotated[int, Field(ge=0)]] = 0
    """Processes that load data ahead, for each training process. 0: it loads its own."""
    checkpoint: Checkpoint = Checkpoint()
    """When a state is written from which an interrupted training goes on."""
    max_restarts: Placement[Annotated[int, Field(ge=0)]] = 3
    """How often training goes on from its last checkpoint by itself after a process died, until it fails."""
    collective_timeout_seconds: Placement[Annotated[float, Field(gt=0)]] = 600.0
    """How long the processes wait for one of them before it is named and ended."""
    preemption_signal: Placement[Literal["USR1", "USR2", "INT"] | None] = None
    """A signal that announces the machine's end, beside SIGTERM: training writes a checkpoint and ends."""
    preemption_grace_seconds: Placement[Annotated[float, Field(gt=0)]] = 30.0
    """How long a training that is asked to end may take to write its checkpoint."""
    log_every_steps: Placement[PositiveInt] = 50
    """Optimizer steps between two lines of metrics."""
    trackers: Placement[Listed[Tracker]] = ()
    """Where training's metrics go beside the run's own file."""
    profile: Placement[Profile | None] = None
    """A trace of torch's profiler, kept beside the build's log."""
    timeout_minutes: Placement[Annotated[float, Field(gt=0)]] = 24 * 60.0
    """The training is stopped after this long."""

    @property
    def max_nodes(self) -> int:
        """Of how many machines it makes use at most."""
        return int(str(self.nnodes).rpartition(":")[2])


class Export(Settings):
    """The export to ONNX."""

    opset_version: Keyed[Annotated[int, Field(ge=18, le=25)]] = 20
    """The ONNX operator set that is written. PyTorch's exporter writes 18 and newer."""
    timeout_minutes: Placement[Annotated[float, Field(gt=0)]] = 30.0
    """The export, with its checks, is stopped after this long."""


class DynamicBatching(Settings):
    """Triton joins requests that arrive close together into one batch."""

    max_queue_delay_microseconds: Keyed[Annotated[int, Field(ge=0)]] = 0
    """How long a request may wait for others to join it."""
    preferred_batch_size: Keyed[Listed[PositiveInt]] = ()
    """Batch sizes that are sent off at once. Leave it out unless the engine is much faster at some sizes."""


class InstanceGroup(Settings):
    """Copies of the model that answer at the same time."""

    count: Keyed[PositiveInt] = 1
    """How many copies (on a GPU machine: for each GPU)."""
    kind: Keyed[Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU"]] = "KIND_AUTO"
    """Where they run. `KIND_AUTO` takes the GPU where there is one."""


class Serve(Settings):
    """How Triton serves the model: what becomes its `config.pbtxt`. Changing it neither trains nor exports again."""

    max_batch_size: Keyed[Annotated[int, Field(ge=0)]] = 0
    """The largest batch that Triton makes, at most `shapes.batch.max`. 0: Triton does not batch."""
    dynamic_batching: DynamicBatching | None = None
    """Joins requests into batches; does not if left out. Needs a `max_batch_size` of at least 1."""
    instance_group: Keyed[Annotated[Listed[InstanceGroup], Field(min_length=1)]] = (InstanceGroup(),)
    """Groups of copies of the model. One copy if left out."""


class Parity(Settings):
    """How far an answer may lie from PyTorch's: `|a - b| <= atol + rtol * |b|` for every element."""

    atol: Keyed[Annotated[float, Field(ge=0)]] = 1e-4
    """The absolute part."""
    rtol: Keyed[Annotated[float, Field(ge=0)]] = 1e-3
    """The relative part."""


class MetricGate(Settings):
    """What a metric on the test data must reach, at least one of these."""

    min: Keyed[float | None] = None
    """The smallest value that passes."""
    max: Keyed[float | None] = None
    """The largest value that passes."""
    min_improvement: Placement[float | None] = None
    """By how much a candidate must be better than the champion, both measured on one server in one run."""
    max_loss: Placement[Annotated[float, Field(ge=0)] | None] = None
    """By how much a candidate may be worse than the champion, both measured on one server in one run."""
    goal: Placement[Literal["maximize", "minimize"]] = "maximize"
    """Which way is better, for `min_improvement` and `max_loss`."""

    @model_validator(mode="after")
    def _says_something(self) -> MetricGate:
        if all(bound is None for bound in (self.min, self.max, self.min_improvement, self.max_loss)):
            raise ValueError("expected min, max, min_improvement or max_loss")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"expected min <= max, got min {self.min:g} and max {self.max:g}: nothing passes")
        return self


class LoadGate(Settings):
    """How a candidate must bear load next to the champion: ratios of one run, never absolute numbers."""

    max_p99_ratio: Placement[Annotated[float, Field(gt=0)] | None] = None
    """The candidate's p99 latency to the champion's, at most."""
    min_throughput_ratio: Placement[Annotated[float, Field(gt=0)] | None] = None
    """The candidate's requests per second to the champion's, at least."""
    concurrency: Placement[PositiveInt] = 4
    """Clients that ask at the same time."""
    rows: Placement[PositiveInt] = 1
    """Rows of each request."""
    rounds: Placement[PositiveInt] = 6
    """How often the two take turns."""
    seconds: Placement[Annotated[float, Field(gt=0)]] = 1.0
    """How long a turn takes."""
    tool: Placement[Literal["auto", "own", "perf_analyzer"]] = "auto"
    """What makes the load: NVIDIA's perf_analyzer, our own clients, or perf_analyzer where there is one that runs."""

    @model_validator(mode="after")
    def _says_something(self) -> LoadGate:
        if self.max_p99_ratio is None and self.min_throughput_ratio is None:
            raise ValueError("expected max_p99_ratio, min_throughput_ratio or both")
        return self


class Gates(Settings):
    """What must hold before a version is released."""

    parity: Parity = Parity()
    """How far the ONNX model's, the engine's and the server's answers may lie from PyTorch's."""
    metrics: Keyed[Mapping[MetricName, MetricGate]] = Field(default_factory=dict)
    """By name, the metrics that the recipe's `metric` returns, and what each must reach."""
    slices: Placement[Mapping[MetricName, MetricGate]] = Field(default_factory=dict)
    """By name, what a metric must reach on every slice that the recipe's metric names with `slices(targets)`."""
    load: LoadGate | None = None
    """Latency and throughput next to the champion's. Not measured if left out."""
    repeat_tolerance: Placement[Annotated[float, Field(ge=0)]] = 0.0
    """The largest difference between two answers of a server to the same request."""
    served_tolerance: Keyed[Annotated[float, Field(ge=0)] | None] = None
    """The largest difference of a metric between PyTorch and the live server. If left out it follows the engine's
    precision: 0.001 in fp32, 0.002 in tf32, 0.005 in fp16, 0.01 in bf16, 0.02 in int8 and fp8."""
    timeout_minutes: Placement[Annotated[float, Field(gt=0)]] = 30.0
    """One evaluation, on whichever runtime, is stopped after this long."""


class Publish(Settings):
    """Where the model goes."""

    repository: Placement[FolderText] = "model_repo"
    """The Triton model repository, relative to the pipeline file. Made if it is not there."""
    keep: Placement[PositiveInt] = 5
    """Versions of older releases than the newest that many are removed from the repository. Never the champion's, the
    previous one's, the candidate's or a pinned one's; and what was removed can be rolled back to all the same."""
    takes_over: Placement[Name | None] = None
    """The name of another pipeline whose model this one goes on with; as after renaming a pipeline. Without it, a model
    that another pipeline published is left as it is."""


InputName = Identifier
AxisName = Identifier
