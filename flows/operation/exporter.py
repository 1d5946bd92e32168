"""Numbers for Prometheus: what the runs, the store, the releases, the servers and Prefect say, read now and then.

A scrape answers from memory. What it answers is read by a thread every `interval` seconds, each source apart, so that
one that hangs or is broken takes nothing from the others but its own numbers; `enginehouse_exporter_source_up` tells.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from flows.operation.reports import REJECTED, RUNNING, SUCCESS, WAITING, RunReports
from tasks.artifacts.store import ArtifactStore
from tasks.errors import EnginehouseError, NotReady, Rejected
from tasks.home import Home
from tasks.pipeline_file import load
from tasks.releases import RELEASE, Release, Standing, standing
from tasks.targets import target_of
from tasks.toolchain import triton_client

FLOWS = ("train-to-deploy", "promote", "rollback")
STATES = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING", "COMPLETED", "FAILED", "CRASHED", "CANCELLED")
"""Prefect's types of states."""
PREFECT_EVERY = 60.0
"""Seconds: Prefect answers each of these questions from its database."""


@dataclass(frozen=True, slots=True)
class Told:
    """One metric that the exporter has."""

    name: str
    text: str
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter"] = "gauge"


_MODEL = ("pipeline", "model")
METRICS = (
    Told("enginehouse_runs_total", "Runs that reported, by how they ended.", ("pipeline", "state"), "counter"),
    Told("enginehouse_run_last_timestamp_seconds", "When the last run ended.", ("pipeline",)),
    Told("enginehouse_run_last_success_timestamp_seconds", "When the last run that succeeded ended.", ("pipeline",)),
    Told("enginehouse_run_last_failed", "1 if the last run did not succeed.", ("pipeline",)),
    Told("enginehouse_run_last_seconds", "How long the last run took.", ("pipeline",)),
    Told("enginehouse_stage_runs_total", "Stages of runs, by result.", ("pipeline", "stage", "state"), "counter"),
    Told("enginehouse_stage_seconds_total", "Time in stages, by result.", ("pipeline", "stage", "state"), "counter"),
    Told("enginehouse_stage_last_build_seconds", "How long the last build of a stage took.", ("pipeline", "stage")),
    Told("enginehouse_stage_last_build_timestamp_seconds", "When it was built.", ("pipeline", "stage")),
    Told(
        "enginehouse_gate_passed", "1 if the gate passed in the last run that judged.", ("pipeline", "gate", "runtime")
    ),
    Told(
        "enginehouse_gate_overridden",
        "1 if the gate did not pass and what it judged is released all the same.",
        ("pipeline", "gate", "runtime"),
    ),
    Told("enginehouse_gate_measured", "What was measured for the gate.", ("pipeline", "gate", "runtime")),
    Told("enginehouse_releases", "Releases that are recorded.", ("pipeline",)),
    Told("enginehouse_champion_version", "The version that should answer.", _MODEL),
    Told("enginehouse_champion_metric", "What the champion reached.", (*_MODEL, "metric", "runtime")),
    Told("enginehouse_champion_made_timestamp_seconds", "When the champion was verified.", _MODEL),
    Told("enginehouse_champion_promoted_timestamp_seconds", "When it became the champion.", _MODEL),
    Told("enginehouse_servers_wanted", "Servers that the pipeline asks for.", _MODEL),
    Told("enginehouse_server_up", "1 if the server answers.", (*_MODEL, "server")),
    Told("enginehouse_served_version", "The highest version that the server has ready.", (*_MODEL, "server")),
    Told("enginehouse_prefect_flow_runs", "Flow runs by state, as Prefect counts them.", ("flow", "state")),
    Told("enginehouse_exporter_source_up", "1 if the source could be read.", ("source",)),
    Told("enginehouse_exporter_refreshed_timestamp_seconds", "When the sources were read last."),
    Told("enginehouse_exporter_refresh_seconds", "How long reading them took."),
)
"""Everything that can be asked for; docs/monitoring.md has the table."""

_KNOWN = {told.name: told for told in METRICS}
Samples = dict[str, dict[tuple[str, ...], float]]
"""Per metric, per values of its labels."""


class Numbers:
    """What one source has to say."""

    def __init__(self) -> None:
        self.samples: Samples = {}

    def __call__(self, name: str, value: float, **labels: str) -> None:
        """Set one number."""
        self.samples.setdefault(name, {})[tuple(labels[label] for label in _KNOWN[name].labels)] = float(value)


@dataclass(eq=False)
class Exporter(Collector):
    """The numbers of one home."""

    home: Home
    clock: Callable[[], float] = time.time
    _reports: RunReports = field(init=False)
    _store: ArtifactStore | None = field(init=False, default=None)
    _standings: dict[str, tuple[Sequence[int], Standing]] = field(init=False, default_factory=dict)
    _prefect: tuple[float, Samples] = field(init=False, default=(float("-inf"), {}))
    _shown: Samples = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._reports = RunReports(self.home)

    def collect(self) -> Iterator[Metric]:
        """The numbers as they were read last."""
        shown = self._shown
        for told in METRICS:
            if found := shown.get(told.name):
                family = (GaugeMetricFamily if told.kind == "gauge" else CounterMetricFamily)(
                    told.name, told.text, labels=told.labels
                )
                for labels, value in found.items():
                    family.add_metric(labels, value)
                yield family

    def registry(self) -> CollectorRegistry:
        """One with nothing else in it."""
        made = CollectorRegistry()
        made.register(self)
        return made

    def keep_fresh(self, interval: float) -> threading.Thread:
        """Read the sources every `interval` seconds from now on, in a thread that ends with the process."""

        def work() -> None:
            while True:
                self.refresh()
                time.sleep(interval)

        thread = threading.Thread(target=work, name="exporter", daemon=True)
        thread.start()
        return thread

    def refresh(self) -> None:
        """Read every source anew."""
        began = time.monotonic()
        sources: dict[str, Callable[[Numbers], None]] = {
            "runs": self._read_runs,
            "store": self._read_store,
            "releases": self._read_releases,
            "prefect": self._read_prefect,
        }
        shown: Samples = {}
        told = Numbers()
        for name, read in sources.items():
            numbers = Numbers()
            try:
                read(numbers)
            except Exception as error:  # noqa: BLE001  # whatever it was: the others shall be told, and this one's end
                told("enginehouse_exporter_source_up", 0, source=name)
                print(f"{name}: {type(error).__name__}: {error}", flush=True)  # noqa: T201  # the service's log
            else:
                told("enginehouse_exporter_source_up", 1, source=name)
                shown.update(numbers.samples)
        told("enginehouse_exporter_refreshed_timestamp_seconds", self.clock())
        told("enginehouse_exporter_refresh_seconds", time.monotonic() - began)
        self._shown = shown | told.samples

    def _read_runs(self, number: Numbers) -> None:
        runs: Counter[tuple[str, str]] = Counter()
        stages: Counter[tuple[str, str, str]] = Counter()
        seconds: Counter[tuple[str, str, str]] = Counter()
        judged: dict[str, dict[str, Any]] = {}
        for report in self._reports.refresh():
            pipeline, state = report["pipeline"], report["state"]
            if state in (RUNNING, WAITING):
                continue
            runs[pipeline, state] += 1
            for row in report["stages"]:
                stages[pipeline, row["stage"], row["state"]] += 1
                seconds[pipeline, row["stage"], row["state"]] += row["seconds"]
            if report["gates"]:  # a gate that the last report does not hold is not told of any more
                judged[pipeline] = report
            ended = _timestamp(report["ended"])
            number("enginehouse_run_last_timestamp_seconds", ended, pipeline=pipeline)
            number("enginehouse_run_last_failed", state not in SUCCESS | {REJECTED}, pipeline=pipeline)
            number("enginehouse_run_last_seconds", report.get("seconds", 0), pipeline=pipeline)
            if state in SUCCESS:
                number("enginehouse_run_last_success_timestamp_seconds", ended, pipeline=pipeline)
        for pipeline, report in judged.items():
            released = (report.get("release") or {}).get("promoted", False)
            for gate in report["gates"]:
                labels = {"pipeline": pipeline, "gate": gate_label(gate["gate"]), "runtime": gate["runtime"]}
                number("enginehouse_gate_passed", gate["passed"], **labels)
                number("enginehouse_gate_overridden", released and not gate["passed"], **labels)
                number("enginehouse_gate_measured", gate["measured"], **labels)
        for (pipeline, state), count in runs.items():
            number("enginehouse_runs_total", count, pipeline=pipeline, state=state)
        for name, counted in (("enginehouse_stage_runs_total", stages), ("enginehouse_stage_seconds_total", seconds)):
            for (pipeline, stage, state), value in counted.items():
                number(name, value, pipeline=pipeline, stage=stage, state=state)

    def _read_store(self, number: Numbers) -> None:
        store = self._opened()
        if store is None:
            return
        for folder in _folders(store.root / "names"):
            for stage in _folders(folder):
                record = store.latest(folder.name, stage.name)
                if record is not None and record.key is not None:
                    began, ended = _timestamp(record.started), _timestamp(record.finished)
                    labels = {"pipeline": folder.name, "stage": stage.name}
                    number("enginehouse_stage_last_build_seconds", ended - began, **labels)
                    number("enginehouse_stage_last_build_timestamp_seconds", ended, **labels)

    def _read_releases(self, number: Numbers) -> None:
        store = self._opened()
        if store is None:
            return
        troubles = []
        for folder in _folders(store.root / "names"):
            if not (folder / RELEASE).is_dir():
                continue
            now = self._standing(store, folder.name)
            number("enginehouse_releases", len(now.releases), pipeline=folder.name)
            champion = now.champion
            if champion is None:
                continue
            labels = {"pipeline": folder.name, "model": champion.model}
            number("enginehouse_champion_version", champion.version, **labels)
            number("enginehouse_champion_made_timestamp_seconds", _timestamp(champion.record.finished), **labels)
            promotion = now.last_promotion(champion)
            measured = {name: dict(values) for name, values in champion.metrics.items()}
            if promotion is not None:
                promoted = _timestamp(promotion.record.finished)
                number("enginehouse_champion_promoted_timestamp_seconds", promoted, **labels)
                for name, value in promotion.metrics.items():
                    measured.setdefault(name, {})["live"] = value
            for name, values in measured.items():
                for runtime, value in values.items():
                    number("enginehouse_champion_metric", value, metric=name, runtime=runtime, **labels)
            try:
                self._ask_servers(number, champion, labels)
            except EnginehouseError as error:  # its pipeline file is gone, say: others' servers are asked all the same
                troubles.append(f"{folder.name}: {error}")
        if troubles:
            print("\n".join(troubles), flush=True)  # noqa: T201  # the service's log

    def _ask_servers(self, number: Numbers, champion: Release, labels: Mapping[str, str]) -> None:
        if champion.pipeline_file is None:
            return
        target = target_of(load(champion.pipeline_file, champion.overrides), self.home)
        number("enginehouse_servers_wanted", target.size, **labels)
        for replica in target.observe():
            place = {**labels, "server": replica.address.http_url}
            try:
                versions = triton_client.ready_versions(replica.address, champion.model, timeout=2)
            except NotReady:
                number("enginehouse_server_up", 0, **place)
                continue
            number("enginehouse_server_up", 1, **place)
            number("enginehouse_served_version", max(versions, default=0), **place)

    def _read_prefect(self, number: Numbers) -> None:
        if time.monotonic() - self._prefect[0] > PREFECT_EVERY:
            self._prefect = (time.monotonic(), _flow_runs(self.home))
        number.samples = self._prefect[1]

    def _opened(self) -> ArtifactStore | None:
        if self._store is None and self.home.store.is_dir():
            self._store = ArtifactStore.open(self.home.store)
        return self._store

    def _standing(self, store: ArtifactStore, pipeline: str) -> Standing:
        # A name or an alias is made or replaced by a rename, which moves its folder's time (docs/artifacts.md).
        watched = [store.root / "names" / pipeline / RELEASE, store.root / "aliases" / pipeline]
        signature = [folder.stat().st_mtime_ns for folder in watched if folder.is_dir()]
        known = self._standings.get(pipeline)
        if known is None or known[0] != signature:
            known = self._standings[pipeline] = (signature, standing(store, pipeline))
        return known[1]


def _flow_runs(home: Home) -> Samples:
    """What Prefect counts; nothing where no server is named and none is kept."""
    from flows.operation.api import connected, server_url

    number = Numbers()
    if server_url(home) is None:
        return {}
    with connected(home) as client:
        for flow in FLOWS:
            for state in STATES:
                asked: dict[str, Any] = {
                    "flows": {"name": {"any_": [flow]}},
                    "flow_runs": {"state": {"type": {"any_": [state]}, "name": {"not_any_": [Rejected.__name__]}}},
                }
                counted = client.request("POST", "/flow_runs/count", json=asked)
                number("enginehouse_prefect_flow_runs", counted.json(), flow=flow, state=state.lower())
    return number.samples


def gate_label(gate: str) -> str:
    """A gate's name without what was measured, which would make every run a series of its own.

    >>> gate_label("metrics.accuracy against the champion's 0.97")
    "metrics.accuracy against the champion's"
    >>> gate_label("load (own load): p99 of p50/p95/p99 1.7/2.5/3.4 ms to the champion's 1.6/2.5/3.5 ms")
    'load (own load): p99'
    >>> gate_label("load (own load): 812/s to the champion's 790/s")
    'load (own load): throughput'
    """
    gate = re.sub(r"(?<=against the champion's) .*", "", gate)
    gate = re.sub(r"^(load \(.*?\): p99) .*", r"\1", gate)
    return re.sub(r"^(load \(.*?\): )\S+/s to .*", r"\1throughput", gate)


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _timestamp(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()
