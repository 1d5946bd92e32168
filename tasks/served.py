"""What a running server must show before it counts as verified, on a staging server as on a live one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks import evaluation
from tasks.config import Pipeline
from tasks.engines import kind_of
from tasks.errors import GateResult, NotReady
from tasks.events import Listener, line_listener, note
from tasks.gates import (
    champion_gates,
    compares,
    load_gates,
    metric_gates,
    parity_gate,
    repeat_gate,
    require,
    served_gates,
    slice_gates,
)
from tasks.stage import Site, Step, program_step, read_json, run_step
from tasks.toolchain import command, perf_analyzer, probe, triton_client
from tasks.toolchain.config_pbtxt import listed_versions, messages, parse
from tasks.toolchain.triton_client import Address

_COMPARED = ("name", "max_batch_size", "input", "output", "dynamic_batching")
"""The fields of a config that a server reports as they are in force. Others it fills in (`instance_group`'s names,
`backend`, `optimization`), and a version that stays loaded keeps the `version_policy` of its own load."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What a server shall serve."""

    model: str
    version: int
    """The champion to be: the version that answers requests that name none."""
    config: str
    """The whole text of `config.pbtxt`."""
    validation: Path
    """The product of `validate`: the golden answers."""
    expected: Mapping[str, float]
    """Per metric, its value on PyTorch."""

    @property
    def versions(self) -> Sequence[int]:
        """Every version that the config lists."""
        return listed_versions(self.config) or (self.version,)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What a server showed."""

    metrics: Mapping[str, float]
    gates: Sequence[GateResult]
    slices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Per slice of the test data that the recipe names, the metrics on it."""


def disagreements(address: Address, candidate: Candidate) -> list[str]:
    """Return what a server does otherwise than `candidate` says, without asking the model anything; empty if nothing.

    Plain HTTP and a few milliseconds, so that a run in which nothing changed can afford it.
    """
    ready = triton_client.ready_versions(address, candidate.model)
    wanted = tuple(sorted(candidate.versions))
    if ready != wanted:
        return [f"model {candidate.model}: versions {list(ready)} are ready, expected {list(wanted)}"]
    from google.protobuf import json_format

    theirs = json_format.ParseDict(
        triton_client.model_config(address, candidate.model, candidate.version),
        messages().ModelConfig(),
        ignore_unknown_fields=True,
    )
    ours = parse(candidate.config)
    return [
        f"model {candidate.model}: {field} is not as config.pbtxt says"
        for field in _COMPARED
        if _comparable(theirs, field) != _comparable(ours, field)
    ]


def _comparable(config: Any, field: str) -> Any:
    value = getattr(config, field)
    if field == "dynamic_batching":
        # The server fills in the preferred sizes of an empty list; the delay is what we set.
        return config.HasField(field), value.max_queue_delay_microseconds
    return list(value) if field in ("input", "output") else value


def verify_server(
    address: Address,
    pipeline: Pipeline,
    candidate: Candidate,
    *,
    runtime: str,
    work: Path,
    log: Path,
    listener: Listener,
    override: str | None = None,
    run: command.Runner = command.run,
) -> Verification:
    """Ask a ready server everything: versions, configuration, golden answers, and the metric on the test data.

    `runtime` is `staging` or `live`; `work` takes the evaluation's files; `override` is as in `gates.require`. Raises
    `NotReady` when the server serves something else, `GateFailed` when it serves it worse than allowed.
    """
    if found := disagreements(address, candidate):
        raise NotReady(
            f"the {runtime} server at {address.http_url} does not serve what it should:\n" + "\n".join(found),
            passes=False,
        )
    report = measure_server(
        address,
        pipeline,
        candidate,
        version=candidate.version,
        runtime=runtime,
        work=work,
        log=log,
        listener=listener,
        run=run,
    )
    metrics: dict[str, float] = report["metrics"]
    precision = kind_of(pipeline).precision(pipeline)
    gates = [
        parity_gate(pipeline.gates, runtime, report["golden"], parity=kind_of(pipeline).tolerance(pipeline)),
        repeat_gate(pipeline.gates, runtime, report["golden"]),
        *metric_gates(pipeline.gates, {name: {runtime: value} for name, value in metrics.items()}),
        *slice_gates(pipeline.gates, runtime, report["slices"]),
        *served_gates(pipeline.gates, runtime, candidate.expected, metrics, precision=precision),
    ]
    consequence = "the champion stays as it was"
    if precision != "fp32":
        consequence += (
            f"; what only {precision} costs can be won back with engine.keep_fp32 or a higher engine.precision, or "
            "allowed with engine.parity and gates.served_tolerance"
        )
    require(gates, consequence=consequence, override=override)
    return Verification(metrics=metrics, gates=gates, slices=report["slices"])


def measure_server(
    address: Address,
    pipeline: Pipeline,
    candidate: Candidate,
    *,
    version: int,
    runtime: str,
    work: Path,
    log: Path,
    listener: Listener,
    run: command.Runner = command.run,
) -> dict[str, Any]:
    """Measure one version on a server with the recipe's metric; judges nothing. Returns the evaluation's `Report`.

    The golden answers are asked of the candidate's own version only: they are its own.
    """
    own = {"compare_golden": evaluation.golden_file(candidate.validation)} if version == candidate.version else {}
    step = program_step(
        Site(pipeline=pipeline, materials={}, work=work),
        "evaluate",
        name=runtime,
        what=f"the evaluation on the {runtime} server",
        job=evaluation.job(pipeline)
        | own
        | {
            "runtime": "triton",
            "rtol": kind_of(pipeline).tolerance(pipeline).rtol,
            "batch_size": min(evaluation.BATCH_SIZE, pipeline.serve.max_batch_size or evaluation.BATCH_SIZE),
            "triton": {"url": address.grpc_url, "model": candidate.model, "version": version},
        },
        timeout_seconds=evaluation.timeout_seconds(pipeline),
    )
    work.mkdir(parents=True, exist_ok=True)
    run_step(step, log=log, on_line=line_listener(listener, runtime), run=run)
    report: dict[str, Any] = read_json(step.output / "report.json")
    return report


def compare_with_champion(
    address: Address,
    pipeline: Pipeline,
    candidate: Candidate,
    proven: Verification,
    *,
    champion: int,
    work: Path,
    log: Path,
    listener: Listener,
    run: command.Runner = command.run,
) -> list[GateResult]:
    """Measure the champion's version on the staging server that serves both, and judge the candidate against it."""
    gates: list[GateResult] = []
    if compares(pipeline.gates):
        report = measure_server(
            address,
            pipeline,
            candidate,
            version=champion,
            runtime="champion",
            work=work,
            log=log,
            listener=listener,
            run=run,
        )
        gates += champion_gates(pipeline.gates.metrics, "metrics.", proven.metrics, report["metrics"])
        for name, metrics in proven.slices.items():
            theirs = report["slices"].get(name, {})
            gates += champion_gates(pipeline.gates.slices, f"slices.{name}.", metrics, theirs)
    if (load := pipeline.gates.load) is not None:
        analyzer = None if load.tool == "own" else perf_analyzer.find()
        if analyzer is None and load.tool == "perf_analyzer":
            raise perf_analyzer.missing()
        step = program_step(
            Site(pipeline=pipeline, materials={}, work=work),
            "load",
            what="the load on the staging server",
            job={
                "golden": evaluation.golden_file(candidate.validation),
                "url": address.grpc_url,
                "model": candidate.model,
                "versions": [champion, candidate.version],
                "rows": load.rows,
                "concurrency": load.concurrency,
                "rounds": load.rounds,
                "seconds": load.seconds,
                "perf_analyzer": None if analyzer is None else str(analyzer),
                "max_batch_size": parse(candidate.config).max_batch_size,
            },
            timeout_seconds=evaluation.timeout_seconds(pipeline),
        )
        work.mkdir(parents=True, exist_ok=True)
        run_step(step, log=log, on_line=line_listener(listener, "load"), run=run)
        found = read_json(step.output / "report.json")["versions"]
        if not probe.gpus():
            note(listener, "the load was measured without a GPU: it compares the two, and says nothing of a GPU")
        by = "own load" if analyzer is None else "perf_analyzer"
        gates += load_gates(load, found[str(candidate.version)], found[str(champion)], by=by)
    return gates


GOLDEN_SECONDS = 120.0
"""The deadline of asking the golden answers: eight rows or less."""


def ask_golden(
    address: Address,
    pipeline: Pipeline,
    candidate: Candidate,
    *,
    runtime: str,
    work: Path,
    log: Path,
    listener: Listener,
    override: str | None = None,
    run: command.Runner = command.run,
) -> Verification:
    """Ask a ready server for its versions, its configuration and the golden answers; about a second.

    Needs neither the recipe nor data, both of which may have changed since the release was made. Raises as
    `verify_server`.
    """
    if found := disagreements(address, candidate):
        raise NotReady(
            f"the {runtime} server at {address.http_url} does not serve what it should:\n" + "\n".join(found),
            passes=False,
        )
    tolerance = kind_of(pipeline).tolerance(pipeline)
    output, job_file = work / "golden" / "output", work / "golden.json"
    step = Step(
        name="golden",
        what=f"asking the {runtime} server",
        argv=tuple(command.python_program("golden", job_file)),
        timeout_seconds=GOLDEN_SECONDS,
        output=output,
        job_file=job_file,
        job={
            "golden": evaluation.golden_file(candidate.validation),
            "triton": {"url": address.grpc_url, "model": candidate.model, "version": candidate.version},
            "max_batch_size": parse(candidate.config).max_batch_size,
            "rtol": tolerance.rtol,
            "output": str(output),
            "work": str(work / "golden" / "work"),
        },
    )
    work.mkdir(parents=True, exist_ok=True)
    run_step(step, log=log, on_line=line_listener(listener, runtime), run=run)
    golden = read_json(output / "report.json")["golden"]
    results = [
        parity_gate(pipeline.gates, runtime, golden, parity=tolerance),
        repeat_gate(pipeline.gates, runtime, golden),
    ]
    require(results, consequence="the champion stays as it was", override=override)
    return Verification(metrics={}, gates=results)


def compare_answers(
    address: Address,
    pipeline: Pipeline,
    candidate: Candidate,
    *,
    champion: int,
    beside: str | None = None,
    requests: Path | None,
    work: Path,
    log: Path,
    listener: Listener,
    run: command.Runner = command.run,
) -> dict[str, Any]:
    """Replay requests, the golden inputs if none are given, to the champion's and the candidate's version.

    `beside` is the name under which the candidate is served, where that is another than the champion's.
    Returns the `ShadowReport`; judges nothing. Raises `ConfigError` for a file that holds no requests.
    """
    step = program_step(
        Site(pipeline=pipeline, materials={}, work=work),
        "shadow",
        what="the shadow comparison",
        job={
            "golden": evaluation.golden_file(candidate.validation),
            "requests": None if requests is None else str(requests.absolute()),
            "champion": {"url": address.grpc_url, "model": candidate.model, "version": champion},
            "candidate": {
                "url": address.grpc_url,
                "model": beside or candidate.model,
                "version": candidate.version,
            },
        },
        timeout_seconds=evaluation.timeout_seconds(pipeline),
    )
    work.mkdir(parents=True, exist_ok=True)
    run_step(step, log=log, on_line=line_listener(listener, "shadow"), run=run)
    report: dict[str, Any] = read_json(step.output / "report.json")
    return report
