"""Releases and rollbacks under steady traffic: is every request answered, and by a version that was proven?

    make bench                      50 releases and 50 rollbacks on the process target
    python benchmarks/swap_under_load.py --releases 10 --deploy '{kind: docker, replicas: 2}'

Every release is staged, verified, placed and recorded as `enginehouse run` does it, the servers are moved by the code
that moves them there, and every second release is followed by going back. The models add a number, so each answer says
which version gave it. What it does not measure: the speed of a model (adding a number costs nothing), a network, a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from release_lab import Lab, no_proxy  # noqa: E402

from tasks import rollout  # noqa: E402
from tasks.releases import Release  # noqa: E402

SETTLE_SECONDS = 0.5
"""After a load call the server still unloads what is not listed any more."""


@dataclass
class Windows:
    """When what happened, in CLOCK_MONOTONIC."""

    steady: list[tuple[float, float]] = field(default_factory=list)
    staging: list[tuple[float, float]] = field(default_factory=list)
    load: list[tuple[float, float]] = field(default_factory=list)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        getattr(self, name).append((began, time.monotonic()))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of it."""

    releases: int
    rollbacks: int
    replicas: int
    requests: int
    failed: int
    unproven: int
    """Answers of a version that no staging server had verified by then."""
    wrong: int
    """Answers whose number is not that of the version that says it gave them."""
    by_kind: dict[str, int]
    latency_ms: dict[str, dict[str, float]]
    load_seconds: dict[str, float]
    errors: list[str]

    @property
    def ratio(self) -> float:
        """p99 during a load call to p99 in steady traffic."""
        return self.latency_ms["load"]["p99"] / self.latency_ms["steady"]["p99"]

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "p99_ratio": round(self.ratio, 2)}

    def table(self) -> str:
        rows = [
            ("releases, rollbacks, replicas", f"{self.releases}, {self.rollbacks}, {self.replicas}"),
            ("requests", f"{self.requests:,} (" + ", ".join(f"{k} {n:,}" for k, n in self.by_kind.items()) + ")"),
            ("failed", str(self.failed)),
            ("answered by a version not verified", str(self.unproven)),
            ("answered wrongly", str(self.wrong)),
            *(
                (
                    f"latency, {name}",
                    f"p50 {v['p50']:.1f} ms, p99 {v['p99']:.1f} ms, max {v['max']:.1f} ms ({v['n']:.0f})",
                )
                for name, v in self.latency_ms.items()
            ),
            ("p99 during a load to steady p99", f"{self.ratio:.2f}"),
            ("a load call", f"p50 {self.load_seconds['p50']:.2f} s, max {self.load_seconds['max']:.2f} s"),
        ]
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def run(
    root: Path, *, releases: int, deploy: str = "{kind: process}", pause: float = 0.01, steady: float = 5.0
) -> Result:
    """Drive traffic through `releases` releases, each followed by going back, every fifth by another release first."""
    no_proxy()
    lab = Lab(root, deploy=deploy)
    windows = Windows()
    load = rollout.triton_client.load

    def timed_load(*args: Any, **options: Any) -> None:
        with windows.of("load"):
            load(*args, **options)
            time.sleep(SETTLE_SECONDS)

    rollout.triton_client.load = timed_load
    verified: dict[int, float] = {}
    rollbacks = 0
    try:
        first = proven(lab, 1, verified, windows)
        lab.promote(first)
        with traffic(lab, root / "answers.json", pause) as pin:
            pin(first.version)
            with windows.of("steady"):
                time.sleep(steady)
            number = 1
            while number < releases:
                burst = 2 if number % 5 == 0 else 1
                for _ in range(min(burst, releases - number)):
                    number += 1
                    before = lab.desk().standing.champion
                    assert before is not None
                    release = proven(lab, number, verified, windows)
                    pin(before.version)
                    lab.promote(release)
                champion = lab.desk().standing.champion
                previous = lab.desk().standing.previous
                assert champion is not None
                assert previous is not None
                pin(previous.version)
                lab.roll_back()
                rollbacks += 1
            with windows.of("steady"):
                time.sleep(steady)
        replicas = len(lab.target.observe())
    finally:
        rollout.triton_client.load = load
        lab.stop()
    answers = json.loads((root / "answers.json").read_text())
    return judge(answers, windows, verified, releases=releases, rollbacks=rollbacks, replicas=replicas)


def proven(lab: Lab, number: int, verified: dict[int, float], windows: Windows) -> Release:
    """A release that a staging server has verified; from then on its version may answer."""
    with windows.of("staging"):
        release = lab.release(number, stage=True)
    verified[release.version] = time.monotonic()
    return release


@contextmanager
def traffic(lab: Lab, out: Path, pause: float) -> Iterator[Any]:
    """Traffic to every server of the target while the block runs; gives the function that repins clients."""
    replicas = lab.target.observe()
    order = {
        "http": [replica.address.http_url for replica in replicas],
        "grpc": [replica.address.grpc_url for replica in replicas],
        "pause": pause,
        "out": str(out),
    }
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("traffic.py")), json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def pin(version: int) -> None:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"pin {version}\n")
            child.stdin.flush()
            assert child.stdout.readline() == "pinned\n"

        try:
            yield pin
        finally:
            child.stdin.write("stop\n")
            child.stdin.close()
            child.wait(60)


def judge(answers: Sequence[Sequence[Any]], windows: Windows, verified: dict[int, float], **counts: int) -> Result:
    def seconds(spans: Sequence[tuple[float, float]]) -> list[float]:
        return [a[1] for a in answers if any(a[0] < end and a[0] + a[1] > start for start, end in spans)]

    good = [a for a in answers if a[6] is None]
    return Result(
        requests=len(answers),
        failed=len(answers) - len(good),
        unproven=sum(verified.get(a[4], math.inf) > a[0] + a[1] for a in good),
        wrong=sum(round(a[5]) != a[4] or (a[3] not in (0, a[4])) for a in good),
        by_kind={
            f"{kind} {what}": sum(a[2] == kind and bool(a[3]) == pinned for a in answers)
            for kind in ("http", "grpc")
            for what, pinned in (("unversioned", False), ("pinned", True))
        },
        latency_ms={
            name: percentiles([1000 * s for s in seconds(getattr(windows, name))])
            for name in ("steady", "staging", "load")
        },
        load_seconds=percentiles([end - start - SETTLE_SECONDS for start, end in windows.load]),
        errors=sorted({a[6] for a in answers if a[6] is not None})[:5],
        **counts,
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and max by nearest rank, and how many there were."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3) if ordered else math.nan

    return {"p50": at(0.5), "p99": at(0.99), "max": at(1), "n": len(ordered)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--releases", type=int, default=50)
    parser.add_argument("--deploy", default="{kind: process}", help="the pipeline file's `deploy`")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between two requests of a client")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="enginehouse-bench-") as root:
        result = run(Path(root), releases=arguments.releases, deploy=arguments.deploy, pause=arguments.pause)
    print(json.dumps(result.to_json(), indent=2) if arguments.json else result.table())
    for error in result.errors:
        print(error, file=sys.stderr)
    sys.exit(1 if result.failed or result.unproven or result.wrong else 0)


if __name__ == "__main__":
    main()
