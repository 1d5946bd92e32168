"""The gates that compare with the champion, measured on the server that serves both; and a reason to release anyway."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from flows.chain import Job, Selection
from flows.release import run_release
from flows.releases import describe
from tasks.errors import GateFailed, ToolMissing
from tasks.toolchain import perf_analyzer

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


def run(lab, number, *, override=None, approve=None, recorded=None) -> None:
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
    run_release(
        job,
        lab.products(number),
        lab.heard.append,
        lambda _name, work: work(),
        [],
        recorded=recorded,
        approve=approve,
    )


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
    assert {"parity", "determinism", "slices.offset", "load", "slices.high.offset"} <= set(kinds)

    run(lab, 2)
    assert lab.ask() == 2


def test_a_candidate_that_other_gates_have_proven_is_proven_anew(lab):
    def not_yet(_candidate):
        return None

    run(lab, 1)
    for _ in range(2):
        run(lab, 0.5, approve=not_yet)
    assert [release.ref.number for release in lab.desk().standing.releases] == [1, 2], "the same gates: the same proof"
    configure(lab, "{metrics: {offset: {min_improvement: 0}}}")
    with pytest.raises(GateFailed, match=r"measured -0\.5, allowed >= 0 better"):
        run(lab, 0.5)
    assert lab.ask() == 1
    configure(lab, "{metrics: {offset: {max_loss: 0.6}}}")
    run(lab, 0.5)
    assert lab.ask() == 0.5
    assert lab.desk().standing.champion.ref.number == 3, "with its own proof"


def test_a_former_champion_that_is_offered_again_shows_no_numbers_of_its_former_time(lab):
    run(lab, 1)
    run(lab, 2)
    told = []
    run(lab, 1, recorded=told.append, approve=told.append)
    offered, asked = told
    assert offered is asked
    assert not offered.promoted
    assert {runtime for values in offered.metrics.values() for runtime in values} == {"staging"}
    assert {gate["runtime"] for gate in offered.gates} == {"staging"}
    assert lab.ask() == 2


def test_a_slice_that_is_worse_than_allowed_stops_the_release(lab):
    configure(lab, "{slices: {offset: {min: 1.5}}}")
    with pytest.raises(GateFailed, match=r"slices\.offset of high on staging: measured 1, allowed >= 1\.5"):
        run(lab, 1)
    assert not lab.target.observe()


def test_a_load_ratio_that_nothing_reaches_stops_the_release(lab):
    configure(lab, "{load: {min_throughput_ratio: 1000, rounds: 2, seconds: 0.2, tool: own}}")
    run(lab, 1)
    with pytest.raises(GateFailed, match=r"load \(own load\): .*/s to the champion's"):
        run(lab, 2)
    assert lab.ask() == 1


@pytest.fixture
def real_perf_analyzer(tmp_path, triton_installation, monkeypatch):
    """NVIDIA's perf_analyzer out of a wheel of tritonclient, and the two libraries that it misses out of Triton's."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([*pip, "tritonclient==2.50.0"], check=True, timeout=120)
    (wheel,) = tmp_path.glob("tritonclient-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith("/bin/perf_analyzer")]
        (tmp_path / "perf_analyzer.bin").write_bytes(archive.read(member))
    libraries = Path(dict(triton_installation.environment)["LD_LIBRARY_PATH"].partition(":")[0])
    for name, wanted in (("libb64-*", "libb64.so.0d"), ("libcudart-*", "libcudart.so.12")):
        (tmp_path / wanted).symlink_to(next(libraries.glob(name)))
    program = tmp_path / "perf_analyzer"
    program.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={tmp_path}:{libraries} exec {tmp_path}/perf_analyzer.bin "$@"\n')
    for file in (program, tmp_path / "perf_analyzer.bin"):
        file.chmod(0o755)
    monkeypatch.setenv("ENGINEHOUSE_PERF_ANALYZER", str(program))


@pytest.mark.slow
def test_perf_analyzer_makes_the_load_where_it_runs(lab, real_perf_analyzer):
    configure(lab, "{load: {max_p99_ratio: 50, min_throughput_ratio: 0.02, rounds: 2, seconds: 1, rows: 2}}")
    run(lab, 1)
    run(lab, 2)
    loads = [gate for gate in describe(lab.desk())["gates"] if gate["gate"].startswith("load")]
    assert [gate["gate"].partition(":")[0] for gate in loads] == ["load (perf_analyzer)"] * 2
    assert all(gate["passed"] and 0.02 < gate["measured"] < 50 for gate in loads)


def test_a_perf_analyzer_that_does_not_run_is_told(tmp_path, monkeypatch):
    program = tmp_path / "perf_analyzer"
    program.write_text("#!/bin/sh\necho libb64.so.0d is missing >&2\nexit 127\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert perf_analyzer.find() is None
    monkeypatch.setenv("ENGINEHOUSE_PERF_ANALYZER", str(program))
    with pytest.raises(ToolMissing, match=r"does not run: libb64\.so\.0d is missing"):
        perf_analyzer.find()


def test_lower_is_better_where_the_pipeline_file_says_so(lab):
    configure(lab, "{metrics: {offset: {max_loss: 0.1, goal: minimize}}}")
    run(lab, 1)
    with pytest.raises(GateFailed, match=r"measured -1, allowed >= -0\.1 better"):
        run(lab, 2)
    assert lab.ask() == 1
