"""The real Prometheus scrapes the exporter of a home with a served release, and evaluates the shipped rules."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

from flows.operation.reports import RunFolder
from tasks.toolchain.processes import find_free_ports

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "containers" / "monitoring"
ENGINEHOUSE = Path(sys.executable).with_name("enginehouse")

_spec = spec_from_file_location("release_lab", ROOT / "tests" / "release_lab.py")
release_lab = module_from_spec(_spec)
sys.modules["release_lab"] = release_lab
_spec.loader.exec_module(release_lab)


def program(name):
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is missing; on Debian and Ubuntu: apt-get install prometheus", pytrace=False)
    return found


def test_the_rules_do_what_their_tests_say():
    done = subprocess.run(
        [program("promtool"), "test", "rules", "rules-test.yml", "rules-test-days.yml"],
        cwd=MONITORING,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def lab(tmp_path_factory, triton_installation):
    release_lab.no_proxy()
    made = release_lab.Lab(tmp_path_factory.mktemp("prometheus") / "lab")
    made.promote(made.release(1))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def exporter(lab):
    """The exporter's process, and its port."""
    (port,) = find_free_ports(1)
    with (lab.root / "exporter.log").open("w") as log:
        process = subprocess.Popen(
            [str(ENGINEHOUSE), "metrics", "serve", "--port", str(port), "--interval", "1", "--home", lab.home.root],
            env=os.environ | {"PREFECT_HOME": str(lab.root / "prefect")},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    yield process, port
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def prometheus(lab, exporter):
    """A Prometheus with the shipped configuration, but for the exporter's port and the pace."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9847"]}]  # the exporter's own default
    job["static_configs"] = [{"targets": [f"127.0.0.1:{exporter[1]}"]}]
    folder = lab.root / "prometheus"
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(MONITORING / "rules.yml", folder)
    (port,) = find_free_ports(1)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    yield Prometheus(f"http://127.0.0.1:{port}", folder / "log")
    process.send_signal(signal.SIGTERM)
    process.wait(30)


class Prometheus:
    def __init__(self, url: str, log: Path) -> None:
        self.url, self.log = url, log

    def ask(self, expression: str) -> list[tuple[dict[str, str], float]]:
        asked = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{asked}", timeout=10) as answer:
                found = json.load(answer)
        except OSError:  # not up yet
            return []
        return [(each["metric"], float(each["value"][1])) for each in found["data"]["result"]]

    def await_value(self, expression: str, wanted: float, seconds: float = 60) -> dict[str, str]:
        deadline = time.monotonic() + seconds
        while True:
            found = self.ask(expression)
            for labels, value in found:
                if value == wanted:
                    return labels
            assert time.monotonic() < deadline, f"{expression}: {found}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.2)


def test_prometheus_sees_the_champion_and_that_it_is_served(lab, prometheus):
    prometheus.await_value('up{job="enginehouse"}', 1)
    prometheus.await_value('enginehouse_champion_version{pipeline="adding"}', 1)
    labels = prometheus.await_value('enginehouse_served_version{pipeline="adding"}', 1)
    assert labels["server"] == lab.target.observe()[0].address.http_url
    prometheus.await_value('enginehouse_champion_metric{metric="offset",runtime="staging"}', 1)
    prometheus.await_value("enginehouse_servers_wanted", 1)
    prometheus.await_value("count(ALERTS) or vector(0)", 0)


def test_a_failed_run_fires_its_alerts_and_the_next_good_one_ends_them(lab, prometheus):
    gate = {"gate": "metrics.offset", "runtime": "onnx", "measured": 0.1, "allowed": ">= 1", "passed": False}
    report = {"pipeline": "adding", "state": "failed", "seconds": 1, "stages": [], "metrics": {}, "gates": [gate]}
    RunFolder.new(lab.home, "adding").keep(report)
    prometheus.await_value('ALERTS{alertname="EnginehouseRunFailed",alertstate="firing",pipeline="adding"}', 1)
    prometheus.await_value('ALERTS{alertname="EnginehouseGateFailing",alertstate="firing",gate="metrics.offset"}', 1)
    RunFolder.new(lab.home, "adding").keep({**report, "state": "released", "gates": [{**gate, "passed": True}]})
    prometheus.await_value("count(ALERTS) or vector(0)", 0)


def test_a_new_champion_and_a_server_that_is_gone_are_seen_without_a_restart(lab, prometheus):
    lab.promote(lab.release(2))
    prometheus.await_value('enginehouse_champion_version{pipeline="adding"}', 2)
    prometheus.await_value('enginehouse_served_version{pipeline="adding"}', 2)
    prometheus.await_value("count(ALERTS) or vector(0)", 0)
    lab.stop()
    prometheus.await_value('ALERTS{alertname="EnginehouseServersMissing",alertstate="pending",pipeline="adding"}', 1)


def test_an_exporter_that_is_gone_is_seen(exporter, prometheus):
    exporter[0].kill()
    exporter[0].wait()
    prometheus.await_value('ALERTS{alertname="EnginehouseExporterDown",alertstate="pending"}', 1)
