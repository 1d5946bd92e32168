"""What runs leave in the home, and the numbers that the exporter makes of it."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from flows.operation import exporter
from flows.operation.exporter import METRICS, Exporter
from flows.operation.reports import RunFolder, RunReports, carried_over
from flows.report import bars, curves_in_words, markdown
from tasks.home import Home

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "containers" / "monitoring"
BEGAN = datetime(2025, 1, 31, 12, tzinfo=UTC)


def report(state="released", *, gates=(), stages=(("train", "built", 12.5), ("export", "reused", 0.0))):
    return {
        "pipeline": "digits",
        "state": state,
        "seconds": 20.0,
        "stages": [
            {"stage": stage, "state": how, "artifact": f"digits/{stage}@1", "seconds": seconds}
            for stage, how, seconds in stages
        ],
        "metrics": {"accuracy": {"live": 0.5, "pytorch": 0.75}},
        "gates": [
            {"gate": gate, "runtime": "onnx", "measured": 0.9, "allowed": ">= 0.95", "passed": passed}
            for gate, passed in gates
        ],
        "release": None,
        "served": None,
    }


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "_flow_runs", lambda home: {})
    return Home(tmp_path / "home")


def leave(home, minutes, *args, **options):
    folder = RunFolder.new(home, "digits", BEGAN + timedelta(minutes=minutes))
    folder.keep(report(*args, **options), "# page\n\nas it was\n")
    return folder


def numbers(source):
    source.refresh()
    text = generate_latest(source.registry()).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_report_is_read_again_only_when_it_was_replaced(home, monkeypatch):
    first = leave(home, 0)
    leave(home, 1, "unchanged")
    (home.runs / "20250131T120500.000000Z-digits.log").write_text("of a run that is under way\n")
    reports = RunReports(home)
    assert [each["state"] for each in reports.refresh()] == ["released", "unchanged"]
    monkeypatch.setattr("flows.operation.reports.read", lambda file: pytest.fail(f"read {file} again"))
    assert len(reports.refresh()) == 2
    monkeypatch.undo()
    first.fail("digits", "failed", "the disk is full")
    assert [each["state"] for each in reports.refresh()] == ["unchanged", "failed"]


def test_a_run_that_failed_keeps_what_it_had_reported(home):
    folder = leave(home, 0, "built", gates=[("metrics.accuracy", False)])
    folder.fail("digits", "failed", "a gate failed")
    values = json.loads((folder.path / "report.json").read_text())
    assert (values["state"], values["error"]) == ("failed", "a gate failed")
    assert values["gates"][0]["gate"] == "metrics.accuracy"
    assert folder.page.read_text().startswith("# digits: failed\n\nas it was\n")
    assert "a gate failed" in folder.page.read_text()


def test_a_run_that_failed_before_it_could_report_leaves_a_page_all_the_same(home):
    folder = RunFolder.new(home, "digits")
    folder.fail("digits", "failed", "no such recipe")
    assert folder.page.read_text().startswith("# digits: failed\n")
    assert RunReports(home).refresh()[0]["error"] == "no such recipe"


def test_half_a_report_is_none(home):
    folder = leave(home, 0)
    (folder.path / "report.json").write_text('{"pipeline": "dig')
    assert RunReports(home).refresh() == []


def test_the_exporter_counts_runs_stages_and_gates(home):
    leave(home, 0, gates=[("parity", True), ("metrics.accuracy", True)])
    leave(home, 1, "running")
    leave(home, 2, "unchanged", stages=[("train", "reused", 0.25), ("export", "reused", 0.0)])
    source = Exporter(home)
    found = numbers(source)
    digits = ("pipeline", "digits")
    assert found["enginehouse_runs_total", digits, ("state", "released")] == 1
    assert found["enginehouse_runs_total", digits, ("state", "unchanged")] == 1
    assert ("enginehouse_runs_total", digits, ("state", "running")) not in found
    assert found["enginehouse_stage_runs_total", digits, ("stage", "export"), ("state", "reused")] == 3 - 1
    assert found["enginehouse_stage_seconds_total", digits, ("stage", "train"), ("state", "built")] == 12.5
    assert found["enginehouse_run_last_failed", digits] == 0
    assert found["enginehouse_gate_passed", ("gate", "parity"), digits, ("runtime", "onnx")] == 1

    leave(home, 3, "failed", gates=[("metrics.accuracy", False)])
    found = numbers(source)
    assert found["enginehouse_run_last_failed", digits] == 1
    assert found["enginehouse_gate_passed", ("gate", "metrics.accuracy"), digits, ("runtime", "onnx")] == 0
    assert ("enginehouse_gate_passed", ("gate", "parity"), digits, ("runtime", "onnx")) not in found

    leave(home, 4, "rejected", gates=[("metrics.accuracy", True)])
    leave(home, 5, "waiting")
    found = numbers(source)
    assert found["enginehouse_run_last_failed", digits] == 0
    assert found["enginehouse_runs_total", digits, ("state", "rejected")] == 1
    assert ("enginehouse_runs_total", digits, ("state", "waiting")) not in found
    last, good = "enginehouse_run_last_timestamp_seconds", "enginehouse_run_last_success_timestamp_seconds"
    assert found[last, digits] >= found[good, digits]


def test_a_gate_that_was_overridden_is_told_apart_from_one_that_stops_a_release(home):
    labels = (("gate", "parity"), ("pipeline", "digits"), ("runtime", "onnx"))

    def told(release):
        folder = RunFolder.new(home, "digits", BEGAN)
        gates = [("parity", False), ("metrics.accuracy", True)]
        folder.keep({**report(gates=gates), "release": release})
        found = numbers(Exporter(home))
        other = (("gate", "metrics.accuracy"), *labels[1:])
        assert found["enginehouse_gate_overridden", *other] == 0
        assert found["enginehouse_gate_passed", *labels] == 0
        return found["enginehouse_gate_overridden", *labels]

    assert told(None) == 0
    assert told({"promoted": False}) == 0
    assert told({"promoted": True}) == 1


@pytest.mark.parametrize(
    ("gate", "label"),
    [
        ("parity", "parity"),
        ("metrics.accuracy against the champion's 0.97", "metrics.accuracy against the champion's"),
        ("load (own load): p99 of p50/p95/p99 1.7/2.5/3.4 ms to the champion's 1/2/3 ms", "load (own load): p99"),
        ("load (own load): 812/s to the champion's 790/s", "load (own load): throughput"),
    ],
)
def test_the_label_of_a_gate_holds_no_measured_number(gate, label):
    assert exporter.gate_label(gate) == label


def test_a_run_that_ended_last_is_the_last_one_though_another_began_later(home):
    waited = leave(home, 0, "waiting")
    leave(home, 1, "released")
    waited.fail("digits", "failed", "never resumed")
    assert numbers(Exporter(home))["enginehouse_run_last_failed", ("pipeline", "digits")] == 1


def told(report):
    return [(row["stage"], row["state"], row["seconds"]) for row in report["stages"]]


def test_what_an_earlier_part_of_a_run_has_done_stays_done():
    before = report(
        "waiting", stages=[("train", "built", 12.5), ("export", "failed", 1.0), ("verify", "verified", 3.0)]
    )
    begins = report("running", stages=[("train", "reused", 0.0), ("export", "built", 0.5)])
    begun = carried_over(begins, before)
    assert told(begun) == [("train", "built", 12.5), ("export", "built", 0.5), ("verify", "verified", 3.0)]
    ends = [("train", "reused", 0.0), ("export", "built", 0.5), ("verify", "reused", 0.0), ("deploy", "released", 2.0)]
    assert told(carried_over(report("released", stages=ends), begun)) == [*told(begun), ("deploy", "released", 2.0)]
    assert carried_over(begins, None) == begins


def test_a_run_that_finds_its_own_candidate_released_meanwhile_has_not_done_nothing():
    ends = [("train", "reused", 0.0), ("deploy", "reused", 0.0)]
    idle = report("unchanged", stages=ends)
    assert carried_over(idle, report("waiting", stages=[("train", "built", 12.5)]))["state"] == "released"
    assert carried_over(idle, report("running", stages=[("train", "reused", 0.0)]))["state"] == "unchanged"


def test_what_an_earlier_part_of_a_run_has_done_with_another_candidate_is_not_told():
    before = report("waiting", stages=[("train", "built", 12.5), ("verify", "verified", 3.0)])
    before["stages"][0]["artifact"] = "digits/train@7"
    now = report("running", stages=[("train", "reused", 0.0)])
    assert carried_over(now, before) == now


def test_a_source_that_cannot_be_read_takes_nothing_from_the_others(home, monkeypatch):
    leave(home, 0)

    def broken(home):
        raise ConnectionError("no route")

    monkeypatch.setattr(exporter, "_flow_runs", broken)
    found = numbers(Exporter(home))
    assert found["enginehouse_exporter_source_up", ("source", "prefect")] == 0
    assert found["enginehouse_exporter_source_up", ("source", "runs")] == 1
    assert found["enginehouse_run_last_failed", ("pipeline", "digits")] == 0


def test_a_home_in_which_nothing_ran_has_no_numbers_and_stays_as_it_is(home):
    found = numbers(Exporter(home))
    assert {name for name, *_ in found} == {name for name, *_ in found if name.startswith("enginehouse_exporter_")}
    assert not home.root.exists()


def rule_tests():
    return [test for file in MONITORING.glob("rules-test*.yml") for test in yaml.safe_load(file.read_text())["tests"]]


def expressions():
    rules = yaml.safe_load((MONITORING / "rules.yml").read_text())
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])
    yield from (series["series"] for test in rule_tests() for series in test["input_series"])
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    yield from (variable["query"] for variable in dashboard["templating"]["list"])


def test_every_metric_and_label_in_rules_and_dashboard_is_one_that_the_exporter_has():
    known = {told.name: set(told.labels) for told in METRICS}
    uses = [use for text in expressions() for use in re.findall(r"(enginehouse_\w+)(?:\{([^}]*)\})?", text)]
    assert len(uses) > 30
    for name, labels in uses:
        assert name in known
        assert set(re.findall(r"(\w+)=", labels)) <= known[name]


def test_every_alert_has_a_test_in_which_it_fires():
    rules = yaml.safe_load((MONITORING / "rules.yml").read_text())
    fired = {t["alertname"] for test in rule_tests() for t in test["alert_rule_test"] if t.get("exp_alerts")}
    assert fired == {rule["alert"] for group in rules["groups"] for rule in group["rules"]}


def test_the_documentation_lists_every_metric_with_its_labels():
    page = (ROOT / "docs" / "monitoring.md").read_text()
    for told in METRICS:
        row = next((line for line in page.splitlines() if line.startswith(f"| `{told.name}` ")), None)
        assert row is not None, told.name
        assert re.findall(r"`(\w+)`", row.split("|")[2]) == list(told.labels), told.name


@pytest.mark.parametrize(
    ("values", "shown"),
    [([0.0, 0.5, 1.0], "▁▅█"), ([3.0, 3.0], "▁▁"), ([1.0], "▁"), ([float(n) for n in range(200)], None)],
)
def test_a_curve_is_a_line_of_bars(values, shown):
    line = bars(values)
    if shown is None:
        assert len(line) <= 41
        assert (line[0], line[-1]) == ("▁", "█")
        assert list(line) == sorted(line)
    else:
        assert line == shown


def test_an_epoch_without_a_number_is_left_out_of_the_curve():
    history = [
        {"epoch": 1, "train_loss": 2.0, "validation_loss": None, "validation": {"accuracy": 0.5}},
        {"epoch": 2, "train_loss": 1.0, "validation_loss": 4.0, "validation": {"accuracy": 0.75}},
    ]
    assert [row[:3] for row in curves_in_words(history)] == [
        ["train loss", "2", "1"],
        ["validation loss", "4", "4"],
        ["validation accuracy", "0.5", "0.75"],
    ]


def test_the_page_shows_runtimes_in_the_order_of_the_chain_and_gates_that_failed():
    page = markdown(report(gates=[("metrics.accuracy", False)]))
    assert "| metric | PyTorch | live server |" in page
    assert "| metrics.accuracy | onnx | **failed** | 0.9 | >= 0.95 |" in page
