"""Containers for real: a Docker engine that `.ci/run` starts, our image, several replicas, and what can happen to them.

Needs `enginehouse/triton:cpu` (`containers/build triton`) and an engine at $DOCKER_HOST.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from docker.errors import NotFound
from onnx import TensorProto, helper

from flows.releases import bake, repair, shadow
from tasks.errors import NotReady, Refused, ToolMissing
from tasks.targets.docker_options import LABELS, STOP_SECONDS, TOKEN
from tasks.toolchain import triton_client
from tasks.toolchain.docker_engine import containers_with, engine, remove
from tasks.toolchain.processes import find_free_ports
from tests.waiting import eventually

pytestmark = pytest.mark.docker

TESTS = Path(__file__).parents[1]
ENGINEHOUSE = Path(sys.executable).with_name("enginehouse")


def _load(name: str, path: Path):
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


release_lab = _load("release_lab", TESTS / "release_lab.py")
Lab = release_lab.Lab


@pytest.fixture(scope="module")
def docker():
    """The engine; a run that was asked for these tests must not skip them."""
    try:
        return engine()
    except ToolMissing as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def lab(tmp_path, docker):
    release_lab.no_proxy()
    made = Lab(tmp_path / "lab", deploy="{kind: docker, replicas: 2, cpus: 1, memory: 1g}")
    yield made
    made.stop()


def healthy(container) -> bool:
    container.reload()
    return container.attrs["State"].get("Health", {}).get("Status") == "healthy"


def everyone(lab, version=None) -> list[float]:
    return [lab.ask(version, server=index) for index in range(len(lab.target.observe()))]


def test_releases_move_two_replicas_and_back_and_survive_kills_and_restarts(lab, docker):
    lab.promote(lab.release(1, stage=True))
    config = lab.config
    containers = lab.target._containers()
    assert everyone(lab) == [1, 1]
    lab.promote(lab.release(2, stage=True))
    assert [c.id for c in lab.target._containers()] == [c.id for c in containers], "moved, not made anew"
    assert (everyone(lab), everyone(lab, 1)) == ([2, 2], [1, 1])
    assert eventually(lambda: all(map(healthy, containers)), 60)

    # As it should be made: nobody's root, nothing writable, limits, loopback, no secrets.
    seen = containers[0].attrs
    host = seen["HostConfig"]
    assert seen["Config"]["User"] == "10001:10001"
    assert (host["ReadonlyRootfs"], host["CapDrop"], host["Memory"]) == (True, ["ALL"], 1 << 30)
    assert host["NanoCpus"] == 10**9
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert {b["HostIp"] for bound in host["PortBindings"].values() for b in bound} == {"127.0.0.1"}
    assert {m["Destination"]: m["RW"] for m in seen["Mounts"]} == {"/models": False, TOKEN: False}
    assert seen["Config"]["StopSignal"] == "SIGTERM"

    # Killed: its policy brings it back, and it serves the champion that was released after it was made.
    containers[0].exec_run(["kill", "-9", "1"])
    pid = seen["State"]["Pid"]
    os.kill(pid, 9)
    assert eventually(lambda: restarted(containers[0], pid), 30)
    address = lab.target.observe()[0].address
    assert eventually(lambda: triton_client.model_ready(address, "adding", 2), 60)
    assert everyone(lab) == [2, 2]

    # Back, to the byte, on both.
    lab.roll_back()
    assert lab.config == config
    assert everyone(lab) == [1, 1]
    containers[1].restart(timeout=20)
    address = lab.target.observe()[1].address
    assert eventually(lambda: triton_client.model_ready(address, "adding", 1), 60)
    assert everyone(lab) == [1, 1]


def restarted(container, pid) -> bool:
    container.reload()
    return container.status == "running" and container.attrs["State"]["Pid"] not in (0, pid)


def test_a_replica_that_is_paused_stops_the_rollout_and_the_others_are_moved_back(lab, docker):
    lab.promote(lab.release(1))
    containers = lab.target._containers()
    second = lab.release(2)
    containers[1].pause()
    try:
        with pytest.raises(NotReady):
            lab.promote(second)
    finally:
        containers[1].unpause()
    assert everyone(lab) == [1, 1]
    lab.promote(second)
    assert everyone(lab) == [2, 2]


def test_another_pipeline_file_makes_the_containers_anew_and_a_second_time_nothing(lab, docker, request):
    lab.promote(lab.release(1))
    before = [c.id for c in lab.target._containers()]
    assert [c.id for c in (docker.containers.get(r.name) for r in lab.target.ensure([], print))] == before
    assert lab.target.plan() == []
    network = docker.networks.create("enginehouse-test")
    request.addfinalizer(network.remove)
    request.addfinalizer(lab.stop)
    lab.deploy = "{kind: docker, replicas: 1, memory: 512m, network: enginehouse-test}"
    lab.configure()
    name = lab.target.observe()[0].name.rpartition("-")[0]
    assert lab.target.plan() == [
        f"end {name}-1, which is more than the pipeline file asks for",
        f"make {name}-0 anew, as the pipeline file says",
    ]
    lab.target.ensure(["adding"], lab.heard.append)
    (container,) = lab.target._containers()
    assert container.id not in before
    assert container.attrs["HostConfig"]["Memory"] == 512 << 20
    assert list(container.attrs["NetworkSettings"]["Networks"]) == ["enginehouse-test"]
    assert everyone(lab) == [1]


def test_a_container_that_somebody_removed_is_repaired(lab, docker):
    lab.promote(lab.release(1))
    lab.promote(lab.release(2))
    before = [replica.address for replica in lab.target.observe()]
    lab.target._containers()[0].remove(force=True)  # as a process would that died before it made the next one
    assert repair(lab.desk())["release"] == "adding/release@2"
    assert everyone(lab) == [2, 2]
    assert [replica.address for replica in lab.target.observe()] == before, "where clients look for it"


def test_a_candidate_that_cannot_load_is_refused_by_the_staging_container(lab, docker, monkeypatch):
    lab.promote(lab.release(1))
    whole = release_lab.adding
    monkeypatch.setattr(release_lab, "adding", lambda number, broken=False: whole(number, broken=True))
    with pytest.raises(NotReady, match="could not load adding"):
        lab.release(2, stage=True)
    assert everyone(lab) == [1, 1]
    assert containers_with(LABELS["staging"]) == []


STAGING = """
import sys, time
from pathlib import Path
from tasks.home import Home
from tasks.pipeline_file import load
from tasks.targets import target_of

root = Path(sys.argv[1])
with target_of(load(root / "pipeline.yaml"), Home(root / "home")).staging(root / "models", "adding", root) as server:
    print(server.name, flush=True)
    time.sleep(600)
"""


def test_a_staging_container_ends_with_its_maker_and_the_next_command_removes_it(lab, docker):
    lab.promote(lab.release(1))
    maker = subprocess.Popen([sys.executable, "-c", STAGING, str(lab.root)], stdout=subprocess.PIPE, text=True)
    name = maker.stdout.readline().strip()
    staging = docker.containers.get(name)
    assert staging.status == "running"
    maker.kill()
    maker.wait()
    assert eventually(lambda: (staging.reload(), staging.status)[1] == "exited", 10)
    assert everyone(lab) == [1, 1]
    repair(lab.desk())
    assert containers_with(LABELS["staging"]) == []


def test_containers_that_others_remove_at_the_same_moment_are_no_error(docker):
    label = f"org.enginehouse.test.{time.time_ns()}"

    def make_and_remove() -> None:
        for _ in range(20):
            container = docker.containers.create("enginehouse/triton:cpu", labels={label: ""})
            both = [threading.Thread(target=remove, args=(container,)) for _ in range(2)]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join()
            with pytest.raises(NotFound):
                container.reload()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(make_and_remove)
        seen = 0
        while not done.done():
            seen += len(containers_with(label))
        done.result()
    assert seen
    assert containers_with(label) == []


SLOW_CONFIG = """# Written by enginehouse
name: "slow"
backend: "onnxruntime"
input [{ name: "x" data_type: TYPE_FP32 dims: [1, 1] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [1, 1] }]
"""


def slow_model(steps: int) -> bytes:
    """A graph that adds 1 as often as is said, and multiplies large matrices meanwhile."""
    size = 256
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["m", "m"], ["squared"]),
            helper.make_node("Tanh", ["squared"], ["m_out"]),
            helper.make_node("Add", ["y_in", "one"], ["y_out"]),
            helper.make_node("Identity", ["go"], ["go_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("m", TensorProto.FLOAT, [size, size]),
            helper.make_tensor_value_info("y_in", TensorProto.FLOAT, [1, 1]),
        ],
        [
            helper.make_tensor_value_info("go_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("m_out", TensorProto.FLOAT, [size, size]),
            helper.make_tensor_value_info("y_out", TensorProto.FLOAT, [1, 1]),
        ],
        [helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["steps", "", "start", "x"], ["m", "y"], body=body)],
        "slow",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1])],
        [
            helper.make_tensor("steps", TensorProto.INT64, [], [steps]),
            helper.make_tensor("start", TensorProto.FLOAT, [size, size], [0.5] * size * size),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


@pytest.fixture
def by_hand(tmp_path, docker):
    """A container of our image that somebody started without enginehouse, and without a token: its port, and itself."""
    for name, model in (("slow", slow_model(2000)), ("broken", b"no onnx")):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "1" / "model.onnx").write_bytes(model)
        (tmp_path / "models" / name / "config.pbtxt").write_text(SLOW_CONFIG.replace("slow", name))
    (port,) = find_free_ports(1)
    container = docker.containers.run(
        "enginehouse/triton:cpu",
        detach=True,
        volumes={str(tmp_path / "models"): {"bind": "/models", "mode": "ro"}},
        ports={"8000/tcp": ("127.0.0.1", port)},
    )
    yield port, container
    remove(container)


def request(port: int, method: str, path: str, body: str = "", timeout: float = 60) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_an_image_that_runs_by_itself_is_healthy_with_its_models_loads_for_nobody_and_drains(by_hand):
    port, container = by_hand

    def is_ok(path: str) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return request(port, "GET", path)[0] == 200
        return False

    assert eventually(lambda: is_ok("/v2/health/live") and is_ok("/v2/models/slow/ready"), 60)
    container.reload()
    check = container.exec_run(container.attrs["Config"]["Healthcheck"]["Test"][1:])
    assert (check.exit_code, check.output.decode().strip()) == (1, "not ready: broken"), "the server alone is no health"
    for act in ("load", "unload"):
        assert request(port, "POST", f"/v2/repository/models/slow/{act}", "{}")[0] == 403
    assert is_ok("/v2/models/slow/ready")

    asked = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}]}
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        answer = pool.submit(request, port, "POST", "/v2/models/slow/infer", json.dumps(asked))
        time.sleep(0.3)
        assert not answer.done(), "so fast that nothing was to be drained"
        container.stop(timeout=STOP_SECONDS)
        status, body = answer.result()
    assert time.monotonic() - began < STOP_SECONDS
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [2000.5])


def test_the_whole_chain_ends_in_containers_and_one_command_goes_back(workspace, docker):
    pipeline = workspace.pipeline("digits")
    small = ["--set", "deploy.kind=docker", "--set", "train.max_epochs=2", "--set", "gates.metrics.accuracy.min=0.1"]
    first = workspace.report("run", pipeline, *small)
    assert (first["state"], first["release"]["version"]) == ("released", 1)
    assert first["metrics"]["accuracy"].keys() == {"pytorch", "onnx", "staging", "live"}
    second = workspace.report("run", pipeline, *small, "--set", "serve.max_batch_size=8")
    assert second["release"]["name"] == "digits/release@2"
    assert second["served"]["http"] == first["served"]["http"], "the same container"
    (served,) = containers_with(LABELS["home"], str(workspace.home))
    assert workspace.report("releases", "rollback", "digits", "--reason", "too small")["release"] == "digits/release@1"
    host = first["served"]["http"].removeprefix("http://")
    config = json.loads(request(int(host.rpartition(":")[2]), "GET", "/v2/models/digits/config")[1])
    assert config["max_batch_size"] != 8
    assert served.status == "running"


def test_gpus_that_are_not_there_get_one_clear_error(lab, docker):
    lab.deploy = "{kind: docker, gpus: all}"
    lab.configure()
    with pytest.raises(NotReady, match="the Docker engine says"):
        lab.target.ensure([], lab.heard.append)


def test_an_image_that_is_not_there_names_the_way_to_make_it(lab, docker):
    lab.deploy = "{kind: docker, image: 'enginehouse/triton:nowhere'}"
    lab.configure()
    with pytest.raises(ToolMissing, match="containers/build triton"):
        lab.target.check()


def test_the_commands_show_and_end_containers(lab, docker):
    lab.promote(lab.release(1))
    environment = os.environ | {"ENGINEHOUSE_HOME": str(lab.home.root)}

    def enginehouse(*words):
        done = subprocess.run(
            [str(ENGINEHOUSE), *words], cwd=lab.root, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    servers = json.loads(enginehouse("serve", "status", "--json"))
    assert [(s["models"], s["state"]) for s in servers] == [(["adding 1"], "answers")] * 2
    started = time.monotonic()
    enginehouse("serve", "stop")
    assert time.monotonic() - started < 40
    assert lab.target._containers() == []


@pytest.fixture
def registry(tmp_path):
    """Debian's docker-registry on a free port; a function that ends it."""
    (port,) = find_free_ports(1)
    config = tmp_path / "registry.yml"
    config.write_text(
        "version: 0.1\n"
        f"storage: {{filesystem: {{rootdirectory: {tmp_path}/registry}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    with (tmp_path / "registry.log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)

    def answers() -> bool:
        with suppress(OSError):  # to try whether the port is free would take it from the registry for a moment
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return True
        return False

    assert eventually(answers)
    yield f"127.0.0.1:{port}", process.kill
    process.kill()
    process.wait()


class Traffic(threading.Thread):
    """A client without a pause that turns to the next server when one refuses, as a load balancer does."""

    def __init__(self, urls) -> None:
        super().__init__()
        self.urls, self.ended, self.answers, self.lost = urls, threading.Event(), [], []

    def run(self) -> None:
        while not self.ended.is_set():
            for url in self.urls:
                try:
                    self.answers.append(release_lab.answer(url) - 0.5)
                    break
                except OSError as error:
                    refused = error
            else:
                self.lost.append(refused)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.join()


def test_baked_releases_replace_the_containers_one_by_one_and_lose_no_request(lab, docker, registry):
    address, end_registry = registry
    lab.deploy = f"{{kind: docker, replicas: 2, baked: '{address}/adding'}}"
    lab.configure()
    lab.promote(lab.release(1))
    replicas, first = lab.target.observe(), lab.target._containers()
    with Traffic([replica.address.http_url for replica in replicas]) as traffic:
        lab.promote(lab.release(2))
    assert (everyone(lab), everyone(lab, 1)) == ([2, 2], [1, 1])
    assert (traffic.lost, set(traffic.answers)) == ([], {1, 2})
    assert lab.target.observe() == replicas, "at the same addresses"
    second = lab.target._containers()
    assert not {c.id for c in first} & {c.id for c in second}
    content = lab.desk().standing.champion.record.materials["engine"].content
    for container in second:
        assert container.attrs["Config"]["Image"].startswith(f"{address}/adding@sha256:")
        assert [mount["Destination"] for mount in container.attrs["Mounts"]] == [TOKEN], "it needs no repository"
        assert container.labels["org.enginehouse.content.adding.2"] == str(content)
    assert [c.id for c in second] == [docker.containers.get(r.name).id for r in lab.target.ensure([], print)]
    assert eventually(lambda: all(map(healthy, second)), 60)

    lab.release(2.5)
    with pytest.raises(Refused, match="compare on a staging server"):
        shadow(lab.desk(), live=True)

    # The same unit for whoever else deploys by image: named by its digest, and pulled by it.
    done = bake(lab.desk(), f"{address}/release:2", base="enginehouse/triton:cpu", push=True)
    assert (done["release"], done["digest"].partition("@")[0]) == ("adding/release@2", f"{address}/release")
    docker.images.remove(done["image"], force=True)
    labels = docker.images.pull(done["digest"]).labels
    assert labels["org.enginehouse.release"] == "adding/release@2"
    assert labels["org.enginehouse.version.2"] == str(content)

    # The registry is gone: a new release is not baked, and all that was pushed can be gone back to.
    end_registry()
    third = lab.release(3)
    with pytest.raises(NotReady, match=r"the registry does not take .*\n.*stays here: .* run this again"):
        lab.promote(third)
    assert [c.id for c in lab.target._containers()] == [c.id for c in second]
    second[0].remove(force=True)
    assert repair(lab.desk())["release"] == "adding/release@2"
    assert everyone(lab) == [2, 2]
    lab.roll_back()
    assert everyone(lab) == [1, 1]


def test_images_of_versions_that_retention_removes_go_with_them_and_can_be_made_anew(lab, docker, registry):
    name = f"{registry[0]}/kept"
    lab.keep, lab.deploy = 1, f"{{kind: docker, baked: '{name}'}}"
    lab.configure()
    tags: dict[int, str] = {}
    for number in (1, 2, 3, 4):  # each lists the version before it, too
        lab.promote(lab.release(number))
        (tags[number],) = (tag for tag in lab.target._image({}).tags if tag.startswith(name))
        if number == 1:
            holder = docker.containers.create(tags[1])
        if number == 3:
            assert docker.images.list(name=tags[1]), "a container is made from it"
            remove(holder)
    assert not (lab.root / "models" / "adding" / "1").exists()
    there = {tag for image in docker.images.list(name=name) for tag in image.tags if tag.startswith(name)}
    assert there & {*tags.values()} == {tags[3], tags[4]}
    said = {event["text"] for event in lab.heard if "removed the image" in event.get("text", "")}
    assert said == {f"removed the image {tags[number]}" for number in (1, 2)}
    lab.roll_back("1")
    assert everyone(lab) == [1]


@pytest.mark.skipif("ENGINEHOUSE_TEST_DOCKERD" not in os.environ, reason="needs an engine that it may restart")
def test_after_a_restart_of_the_engine_the_champion_serves_again(lab, docker):
    folder = os.environ["ENGINEHOUSE_TEST_DOCKERD"]
    lab.promote(lab.release(1))
    lab.promote(lab.release(2))
    servers = [replica.address for replica in lab.target.observe()]
    for verb in ("stop", "start"):
        subprocess.run([str(TESTS.parent / ".ci" / "dockerd"), verb, folder], check=True, timeout=120)
    assert eventually(lambda: all(triton_client.model_ready(a, "adding", 2) for a in servers), 90)
    assert everyone(lab) == [2, 2]
    assert [replica.address for replica in lab.target.observe()] == servers, "at the same ports"


def test_the_trainer_trains_in_a_container_that_may_write_nothing_but_its_folder(tmp_path, docker):
    work = tmp_path / "work"
    shutil.copytree(TESTS.parent / "examples" / "digits", work / "digits")
    for path in [work, *work.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    words = ["run", "/work/digits/pipeline.yaml", "--until", "export", "--set", "train.max_epochs=2", "--json"]
    container = docker.containers.run(
        "enginehouse/trainer:cpu",
        words,
        detach=True,
        read_only=True,
        tmpfs={"/tmp": ""},
        volumes={str(work): {"bind": "/work", "mode": "rw"}},
        cap_drop=["ALL"],
        shm_size="256m",
    )
    try:
        status = container.wait(timeout=400)["StatusCode"]
        log = container.logs(stdout=True, stderr=True).decode()
        assert status == 0, log[-3000:]
        report = json.loads(container.logs(stdout=True, stderr=False))
        assert [stage["state"] for stage in report["stages"]] == ["built", "built"]
    finally:
        container.remove(force=True)
