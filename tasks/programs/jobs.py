"""What goes into each program, and what comes out: the only words that stages and programs share.

    python -I -u bootstrap.py train|curves|export|evaluate|samples|scores|precision|preflight|drift job.json

A job is one JSON object. All its paths are absolute. Every program writes into two folders, which it makes if need be:

- `output` takes products: their bytes depend on the job alone, so they hold no times, no absolute paths, no host names;
- `work` takes the rest: `notes.json` (`Notes`: seconds and warnings), and what training keeps to go on from. It is
  the same folder when the same job is run again.

A program that succeeds ends with status 0. One that fails for a reason that a user can mend writes `output/error.json`
(`Failure`), prints the same text last on stderr, and ends with status 1. Status 1 without that file is an error of
programming, or of the machine: the log holds its traceback. Of several ranks each one that fails writes
`output/failures/<attempt>-<rank>.json` (`RankFailure`); `error.json`, of the first one, is written only for what would
fail again the same way, and keeps restarted workers from trying. A rank that was asked to stop, and has written a
checkpoint, ends with status 75 (EX_TEMPFAIL) and a failure of the kind `preempted`.
Long work prints lines `::progress {"done": 3, "total": 20, …}` (`Progress`).
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

FailureKind = Literal[
    "configuration", "export refused", "gate failed", "training failed", "tool missing", "not ready", "preempted"
]


class Failure(TypedDict):
    """`output/error.json`: what went wrong, in words for the user. `kind` is that of the class in `tasks/errors.py`."""

    kind: FailureKind
    message: str
    """What is wrong and what was expected; several lines where there are several problems or the user's own frames."""
    hint: str | None
    """The mend, or the usual cause."""
    where: str | None
    """The place, such as `/abs/recipe.py:12`, `input tokens, axis sequence`, or `node node_view_1`."""
    file: str | None
    """Absolute path of the user's file, where there is one."""
    line: int | None
    """Line in `file`, counted from 1."""
    rank: int | None
    """The rank that failed, in training."""


class RankFailure(Failure):
    """`output/failures/<attempt>-<rank>.json`."""

    pid: int
    symptom: bool
    """Whether this rank only noticed that another one is missing."""
    suspect: int | None
    """For a symptom: the rank that was missing, where it is known."""
    suspect_pid: int | None
    time: float
    """Seconds since the epoch."""


class Progress(TypedDict):
    """The JSON behind `::progress `."""

    done: int
    total: int
    text: str
    metrics: dict[str, float]
    samples_per_second: NotRequired[float]
    """Of a training: since the ranks met before."""
    seconds_left: NotRequired[float]


class Notes(TypedDict):
    """`work/notes.json`: what is worth keeping in the build record, but no part of the product."""

    seconds: dict[str, float]
    """Wall time per step, such as `{"load": 1.9, "train": 14.2}`; `total` is always there."""
    warnings: list[str]
    environment: dict[str, str]
    """What really ran: `torch`, `device`, `world_size`, `threads`, `onnxruntime`..."""
    facts: dict[str, Any]
    """Further numbers, such as `checkpoints` and `usage` of a training."""


class InputSpec(TypedDict):
    """One input of the model, as in the pipeline file."""

    dtype: str
    """A numpy name: `float32`, `int64`, `bool`..."""
    shape: list[int | str]
    """Sizes, or names out of `shapes`. The first axis is the one that the rows of a batch lie along."""


class Range(TypedDict):
    """The sizes that one named axis may take."""

    min: int
    opt: int
    max: int


class Monitor(TypedDict):
    """Which epoch's weights are kept, and when to stop."""

    metric: str
    """A name that the recipe's metric gives, or `loss`: both on the validation data."""
    mode: Literal["max", "min"]
    patience: int | None
    """Epochs without improvement after which training ends; None: it never ends early."""
    min_delta: float
    """What counts as an improvement."""


class CheckpointConfig(TypedDict):
    """When checkpoints are written, and how many stay."""

    every_steps: NotRequired[int | None]
    every_minutes: NotRequired[float | None]
    """10 unless given; by the leading rank's clock."""
    keep: NotRequired[int]
    """2 unless given."""
    asynchronous: NotRequired[bool]
    """True unless given: written while training goes on."""


class TrackerConfig(TypedDict):
    """Where the metrics go beside `work/metrics.jsonl`."""

    kind: Literal["tensorboard", "mlflow", "wandb"]
    folder: str
    """Absolute."""
    name: str
    """Of the experiment or project: the pipeline's."""


class TrainConfig(TypedDict):
    """The part of the pipeline file's `train` that the loop reads. Fields with a default may be left out."""

    max_epochs: int
    batch_size: int
    """Of one optimizer step over all ranks and micro-batches. It need not be divisible by the number of ranks."""
    seed: int
    gradient_accumulation_steps: NotRequired[int]
    """Micro-batches per step, 1 unless given."""
    precision: NotRequired[str]
    """`fp32` (the default), `bf16-mixed` or `fp16-mixed`."""
    compile: NotRequired[bool]
    max_grad_norm: NotRequired[float | None]
    learning_rate: NotRequired[float | None]
    """Of the built-in AdamW; None means 1e-3. Contradicts a recipe that has an `optimizer` of its own."""
    monitor: NotRequired[Monitor | None]
    device: NotRequired[Literal["cpu", "cuda"]]
    """`cpu` (gloo) is the default; `cuda` means nccl, one rank per device."""
    threads: NotRequired[int]
    """Of torch per process, 1 unless given: sums are rounded in another order with another number of threads."""
    num_workers: NotRequired[int]
    """Loading processes per rank, 0 unless given. Does not change the result."""
    timeout: NotRequired[float]
    """Seconds after which a collective operation gives up on a missing rank; 600 unless given."""
    checkpoint: NotRequired[CheckpointConfig]
    preemption_signal: NotRequired[str | None]
    """Such as `USR1`: a notice to stop, beside SIGTERM."""
    log_every_steps: NotRequired[int]
    """50 unless given."""
    trackers: NotRequired[list[TrackerConfig]]
    profile: NotRequired[list[int] | None]
    """First and last step of which the leading rank keeps a profiler trace in `work/trace.json`."""


class TrainJob(TypedDict):
    """`train`: started by torchrun once per rank (`RANK`, `LOCAL_RANK` and `WORLD_SIZE` are set), or alone.

        python -I -m torch.distributed.run --standalone --nproc-per-node 2 --no-python -- \\
            python -I -u bootstrap.py train job.json

    Writes `output/model.safetensors` and `output/metrics.json` (`TrainMetrics`). In `work` it keeps `checkpoints/`,
    from which the next start goes on, `metrics.jsonl` (one line per `log_every_steps` and per epoch), and `ranks/`
    with signs of life.
    """

    recipe: str
    """`/abs/recipe.py:Digits`."""
    weights: NotRequired[str | None]
    """A `.safetensors` file to start from; the recipe's own initial weights without it."""
    inputs: dict[str, InputSpec]
    """Only checked against what the datasets give, so that a wrong dtype is found before an hour of training; nothing
    but the names needs to be in the stage's key."""
    output: str
    work: str
    config: TrainConfig


class EpochMetrics(TypedDict):
    epoch: int
    """Counted from 1."""
    steps: int
    """Optimizer steps done so far."""
    train_loss: float
    """Mean over all training samples, each counted once, as they were seen during the epoch."""
    validation_loss: float | None
    """None where it is not finite."""
    validation: dict[str, float | None]
    """The recipe's metric on the validation data; None where it is not finite."""


class TrainMetrics(TypedDict):
    """`output/metrics.json`."""

    metrics: dict[str, float]
    """Of the epoch whose weights are kept, for the record: `train_loss`, `validation_loss`, `validation_<name>`..."""
    history: list[EpochMetrics]
    epoch: int
    """Whose weights these are: the last one's, or the best one's where the job has a `monitor`."""
    world_size: int
    world_sizes: list[list[int]]
    """`[step, ranks]` for the first step and for each one from which on there were more or fewer ranks."""
    samples: dict[str, int]
    """Of the splits `train` and `validation`."""
    parameters: int


class CurvesJob(TypedDict):
    """`curves`: draws `output/curves.png` of a training's metrics; nothing where there are none."""

    metrics: str
    """A `metrics.jsonl`."""
    output: str
    work: str


class Parity(TypedDict):
    """|onnx - pytorch| <= atol + rtol * |pytorch| for each element."""

    atol: float
    rtol: NotRequired[float]
    """1e-4 unless given."""


class ExportJob(TypedDict):
    """`export`: weights to a checked ONNX graph.

    Writes `output/model.onnx` (with `output/model.onnx.data` beside it if the weights are larger than 1.5 GB) and
    `output/signature.json` (`Signature`). Refusals are of the kind `export refused`.
    """

    recipe: str
    weights: NotRequired[str]
    """A `.safetensors` file."""
    onnx: NotRequired[str]
    """In the place of `weights`: a graph that the training program left itself. It keeps its own opset."""
    output: str
    work: str
    inputs: dict[str, InputSpec]
    """In the order in which the graph shall have them."""
    shapes: dict[str, Range]
    opset_version: NotRequired[int]
    """20 unless given."""
    parity: Parity
    threads: NotRequired[int]


class Tensor(TypedDict):
    name: str
    dtype: str
    """A numpy name, or `bfloat16`."""
    shape: list[int | str]
    """Sizes, names out of `shapes`, or expressions of them such as `2*sequence`."""


class Signature(TypedDict):
    """`output/signature.json`: what the graph takes and gives."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    batch_axis: str | None
    """The name of the first axis of every input and output, or None where it is a fixed size."""
    opset: int
    ir_version: int


class TritonTarget(TypedDict):
    url: str
    """Of gRPC: `127.0.0.1:8001`."""
    model: str
    version: NotRequired[str | int | None]
    """None, or left out: the one that a request without a version goes to."""
    timeout: NotRequired[float]
    """Seconds for one request; 60 unless given."""


class EvaluateJob(TypedDict):
    """`evaluate`: the recipe's metric on one runtime, fed batch by batch, and golden examples.

    Writes `output/report.json` (`Report`), and `output/golden.safetensors` if `write_golden` is true: tensors
    `inputs.<name>` and `outputs.<name>`, of real rows at the `opt` size of every axis (at most 8 rows).
    """

    recipe: str
    runtime: Literal["pytorch", "onnxruntime", "triton"]
    output: str
    work: str
    inputs: dict[str, InputSpec]
    shapes: dict[str, Range]
    batch_size: int
    """Rows per request: at most the maximum of the batch axis, which it is lowered to."""
    split: NotRequired[Literal["test", "validation"]]
    """`test` unless given. None of training and export reads the test split."""
    weights: NotRequired[str]
    """For pytorch: a `.safetensors` file."""
    onnx: NotRequired[str]
    """For onnxruntime: a `.onnx` file."""
    triton: NotRequired[TritonTarget]
    write_golden: NotRequired[bool]
    compare_golden: NotRequired[str | None]
    """A `golden.safetensors` whose inputs this runtime shall answer too."""
    rtol: NotRequired[float]
    """Of `compare_golden`, 1e-4 unless given; see `GoldenDifference.beyond_rtol`."""
    metric: NotRequired[bool]
    """False leaves the data set alone: only golden examples are written or compared. True unless given."""
    threads: NotRequired[int]


class GoldenDifference(TypedDict):
    max_abs_difference: float
    """Over all outputs and elements. An answer that is not finite or of another shape is a failure instead."""
    beyond_rtol: float
    """The largest |got - golden| - rtol * |golden|, not below 0: what a parity gate compares with its `atol`."""
    outputs: dict[str, float]
    """Largest absolute difference per output."""
    rows: int
    repeated: float
    """The largest difference between two answers to the same request."""


class Report(TypedDict):
    """`output/report.json`."""

    runtime: str
    split: str
    metrics: dict[str, float]
    """What the recipe's metric gave; empty if `metric` was false."""
    samples: int
    batches: int
    batch_size: int
    golden: GoldenDifference | None
    slices: dict[str, dict[str, float]]
    """Per slice that the recipe's metric names, what a metric fed with only its rows gave."""


class RowsJob(TypedDict):
    """Which rows of a split are drawn, and how they are put together; see `samples.drawn`."""

    inputs: dict[str, InputSpec]
    batch_size: int
    whole_batches: bool
    """Whether a last batch with fewer rows is left out: for a graph whose batch is a fixed size."""


class SamplesJob(RowsJob):
    """`samples`: rows of the recipe's data as arrays.

    Writes `output/calibration.npz` (of the training split) and `output/check.npz` (of the validation split), each the
    batches of `rows.write_batches`.
    """

    recipe: str
    calibration_rows: int
    check_rows: int
    output: str
    work: str


class ScoresJob(RowsJob):
    """`scores`: the recipe's metric on answers to the rows of `check.npz`.

    Writes `output/report.json`: by the name of the answers, the metric's numbers.
    """

    recipe: str
    check_rows: int
    answers: dict[str, str]
    """By name, a file of `rows.write_batches` with the outputs for each batch."""
    output: str
    work: str


class PrecisionJob(TypedDict):
    """`precision`: a graph in lower precision. Runs in an environment with ModelOpt, or with onnxruntime alone.

    Writes `output/model.onnx` (with `model.onnx.data` beside it if large), `output/signature.json` and
    `output/report.json`: what was converted, how many nodes, what stays in fp32, and what each layer loses. A graph
    that differs by more than `parity` is refused as `gate failed`, with the layers that lose most and a list to keep.
    """

    onnx: str
    precision: Literal["fp16", "bf16", "int8", "fp8"]
    quantizer: Literal["modelopt", "onnxruntime"]
    keep_fp32: Literal["auto"] | list[str]
    """Nodes that stay as they are; `auto` finds a smallest list."""
    calibration: str
    check: str
    """Files of `samples`. The answers to the latter are left as `work/fp32.npz` and `work/converted.npz`."""
    parity: Parity
    output: str
    work: str


class PreflightJob(TypedDict):
    """`preflight`: compiles a graph with TensorRT-RTX on the CPU. Runs in an environment with tensorrt-rtx.

    Writes `output/report.json`: what was compiled for which target, what that proves and what it does not. A graph that
    is refused is a failure of the kind `gate failed`, naming the nodes.
    """

    onnx: str
    profiles: list[dict[str, dict[str, list[int]]]]
    """Each by `min`, `opt` and `max`, by input, its sizes."""
    compute_capability: str | None
    """Of the GPU that shall serve; the nearest older one that TensorRT-RTX knows stands in for others."""
    output: str
    work: str


class DriftJob(TypedDict):
    """`drift`: the recipe's own comparison of recent data with the training's."""

    recipe: str
    inputs: list[str]
    recent: str
    """A file or folder; the recipe knows what it holds."""
    output: str
    work: str


class DriftReport(TypedDict):
    """`output/report.json` of `drift`."""

    drifted: bool
    scores: dict[str, float]


class GoldenJob(TypedDict):
    """`golden`: the golden answers, asked of a Triton server; without recipe, data or torch."""

    golden: str
    """A `golden.safetensors`, as `evaluate` writes it."""
    triton: TritonTarget
    max_batch_size: int
    """Of the served config; 0 where Triton does not batch."""
    rtol: NotRequired[float]
    output: str
    work: str


class LoadJob(TypedDict):
    """`load`: two versions of one model under the same load in the same run, in turns; without recipe or data."""

    golden: str
    """Whose inputs are asked."""
    url: str
    """Of gRPC."""
    model: str
    versions: list[int]
    rows: int
    """Of each request."""
    concurrency: int
    rounds: int
    seconds: float
    """Of each version's turn in a round."""
    perf_analyzer: str | None
    """The program that makes the load; `None` for our own clients."""
    max_batch_size: int
    """The server's; 0 where the batch axis is one of the model's own."""
    output: str
    work: str


class Latency(TypedDict):
    """Milliseconds per request, and requests per second."""

    p50: float
    p95: float
    p99: float
    throughput: float
    requests: int


class LoadReport(TypedDict):
    """`output/report.json` of `load`."""

    versions: dict[str, Latency]


class ShadowJob(TypedDict):
    """`shadow`: the same requests to champion and candidate, and how their answers differ."""

    golden: str
    """Whose output names are asked, and whose inputs where no requests are given."""
    requests: str | None
    """A file of recorded ones: JSON of Triton's HTTP protocol, one a line; or `.npz`, inputs by name, one a row."""
    champion: TritonTarget
    candidate: TritonTarget
    output: str
    work: str


class OutputDifference(TypedDict):
    max: float
    """The largest absolute difference of any element of any request."""
    mean: float
    """Of each request's largest difference."""
    choices: int
    """Rows with a largest element along the last axis; 0 where there is but one element."""
    other_choice: int
    """Of these, how many have it elsewhere."""
    worst: list[int]
    """The requests that differ most, counted from 0."""


class ShadowReport(TypedDict):
    """`output/report.json` of `shadow`."""

    requests: int
    outputs: dict[str, OutputDifference]
    latency: dict[str, Latency]


class GoldenReport(TypedDict):
    """`output/report.json` of `golden`."""

    golden: GoldenDifference
