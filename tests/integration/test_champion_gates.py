"""The gates that compare with the champion, measured on the server that serves both; and a reason to release anyway."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from flows.chain import Job, Selection
from flows.release import run_release
from flows.releases import describe
from tasks.errors import GateFailed

TESTS = Path(__file__).parents[1]
_spec = spec_from_file_location("release_lab", TESTS / "release_lab.py")
release_lab = module_from_spec(_spec)
sys.modules["release_lab"] = release_lab
_spec.loader.exec_module(release_lab)


@pytest.fixture
def lab(tmp_path, triton_installation):
    release_lab.no_proxy()
    made = release_lab.Lab(tmp_path / "lab")
    yield made
    made.stop()


def run(lab, number, *, override=None) -> None:
    """What `enginehouse run` does after its keyed stages."""
    job = Job(
        pipeline=lab.pipeline,
        identity=None,
        home=lab.home,
        store=lab.store,
        selection=Selection(),
        given={},
        override=override,
    )
    run_release(job, lab.products(number), lab.heard.append, lambda _name, work: work())


def configure(lab, gates) -> None:
    lab.gates = gates
    lab.configure()


def test_a_candidate_is_measured_beside_the_champion_and_judged_by_the_difference(lab):
    configure(
        lab,
        "{metrics: {offset: {min_improvement: 0.5}}, slices: {offset: {max_loss: 0.1, min: 0}}, "
        "load: {max_p99_ratio: 50, min_throughput_ratio: 0.02, rounds: 2, seconds: 0.3}}",
    )
    run(lab, 1)  # there is no champion to compare it with
    config = lab.config
    with pytest.raises(GateFailed) as failed:
        run(lab, 1.25)
    assert "metrics.offset against the champion's 1 on staging: measured 0.25, allowed >= 0.5 better" in str(
        failed.value
    )
    assert (lab.config, lab.ask()) == (config, 1)

    run(lab, 1.25, override="the customer waits")
    assert lab.ask() == 1.25
    shown = describe(lab.desk())
    assert shown["override"] == "the customer waits"
    failing = [gate["gate"] for gate in shown["gates"] if not gate["passed"]]
    assert failing == ["metrics.offset against the champion's 1"]
    assert shown["slices"] == {"high": {"offset": 1.25}, "low": {"offset": 1.25}}
    kinds = [gate["gate"].partition(" ")[0] for gate in shown["gates"]]
    assert {"parity", "determinism", "slices.offset", "load:", "slices.high.offset"} <= set(kinds)

    run(lab, 2)
    assert lab.ask() == 2


def test_a_slice_that_is_worse_than_allowed_stops_the_release(lab):
    configure(lab, "{slices: {offset: {min: 1.5}}}")
    with pytest.raises(GateFailed, match=r"slices\.offset of high on staging: measured 1, allowed >= 1\.5"):
        run(lab, 1)
    assert not lab.target.observe()


def test_a_load_ratio_that_nothing_reaches_stops_the_release(lab):
    configure(lab, "{load: {min_throughput_ratio: 1000, rounds: 2, seconds: 0.2}}")
    run(lab, 1)
    with pytest.raises(GateFailed, match=r"load: .*/s to the champion's"):
        run(lab, 2)
    assert lab.ask() == 1


def test_lower_is_better_where_the_pipeline_file_says_so(lab):
    configure(lab, "{metrics: {offset: {max_loss: 0.1, goal: minimize}}}")
    run(lab, 1)
    with pytest.raises(GateFailed, match=r"measured -1, allowed >= -0\.1 better"):
        run(lab, 2)
    assert lab.ask() == 1
