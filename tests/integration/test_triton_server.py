"""Servers on this machine, for real: started, recorded, found again, ended; whatever is killed, and whenever."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.errors import CommandFailed, NotReady, Refused, StoreUnusable
from tasks.toolchain import triton, triton_client
from tasks.toolchain.processes import find_free_ports, start_time
from tasks.toolchain.triton import ServerRecord, TritonInstallation
from tasks.toolchain.triton_setup import IDENTITY, IDENTITY_CONFIG
from tests.waiting import eventually

SHARED_MEMORY = Path("/dev/shm")

HANGING = """
import time

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(600)

    def execute(self, requests):
        return []
"""


def add_model(
    repository: Path, name: str = "identity", *, versions: tuple[int, ...] = (1,), model: bytes = IDENTITY
) -> str:
    """A model in the repository; its config's text, which lists the versions."""
    for version in versions:
        (repository / name / str(version)).mkdir(parents=True)
        (repository / name / str(version) / "model.onnx").write_bytes(model)
    config = listing(name, versions)
    (repository / name / "config.pbtxt").write_text(config)
    return config


def listing(name: str, versions: tuple[int, ...]) -> str:
    policy = f"version_policy {{ specific {{ versions: {list(versions)} }} }}\n"
    return IDENTITY_CONFIG.replace('"identity"', f'"{name}"') + policy


def add_hanging_model(repository: Path) -> None:
    (repository / "hanging" / "1").mkdir(parents=True)
    (repository / "hanging" / "1" / "model.py").write_text(HANGING)
    (repository / "hanging" / "config.pbtxt").write_text(
        IDENTITY_CONFIG.replace('"identity"', '"hanging"').replace('platform: "onnxruntime_onnx"', 'backend: "python"')
    )


def processes_naming(text: object) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                named = str(text).encode() in (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if named and start_time(int(folder.name)) is not None:
                found.append(int(folder.name))
    return found


def shared_memory(prefix: str) -> list[str]:
    return [path.name for path in SHARED_MEMORY.glob(f"{prefix}*")]


class Place:
    """A repository, and a folder for the server's record and log."""

    def __init__(self, root: Path, installation: TritonInstallation) -> None:
        self.repository = root / "repository"
        self.folder = root / "serve"
        self.repository.mkdir()
        self.installation = installation
        self.record = self.folder / "server.json"

    def start(self, *models: str, **options: object) -> ServerRecord:
        return triton.start(
            self.installation,
            repository=self.repository,
            models=models,
            folder=self.folder,
            name="server",
            **options,  # type: ignore[arg-type]
        )

    def script(self, body: str) -> list[str]:
        """A program that has `place` as this one does."""
        return [
            sys.executable,
            "-c",
            textwrap.dedent(
                f"""
                from pathlib import Path
                from tasks.toolchain import triton
                repository, folder = Path({str(self.repository)!r}), Path({str(self.folder)!r})
                installation = triton.find_installation()
                """
            )
            + textwrap.dedent(body),
        ]


@pytest.fixture
def place(tmp_path: Path, triton_installation: TritonInstallation) -> Iterator[Place]:
    place = Place(tmp_path, triton_installation)
    yield place
    left = triton.read_record(place.record) if place.record.exists() else None
    if left is not None:
        triton.stop(left, grace=0)
    assert eventually(lambda: not processes_naming(place.repository)), "a test left a process behind"


def test_a_server_is_recorded_found_again_asked_and_ended_without_a_trace(place: Place) -> None:
    add_model(place.repository)
    record = place.start("identity")
    triton.wait_ready(record, timeout=60)
    assert triton.observe(place.record) == record
    assert record.version == triton_client.server_metadata(record.address)["version"]
    assert triton_client.ready_versions(record.address, "identity") == (1,)
    assert triton_client.model_ready(record.address, "identity", 1)
    assert not triton_client.model_ready(record.address, "identity", 2)
    assert triton_client.model_config(record.address, "identity")["max_batch_size"] == 4
    assert triton_client.model_metadata(record.address, "identity")["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 1]}
    ]
    assert shared_memory(record.shm_prefix)
    triton.stop(record)
    assert triton.observe(place.record) is None
    assert not place.record.exists()
    assert processes_naming(place.repository) == []
    assert shared_memory(record.shm_prefix) == []
    triton.stop(record)  # once more is no error


def test_it_holds_none_of_our_descriptors_and_leads_a_session_of_its_own(place: Place) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        record = place.start()
        triton.wait_ready(record, timeout=60)
        assert os.getsid(record.pid) == record.pid
        ours = Path(f"/proc/self/fd/{write}").readlink()
        theirs = set()
        for path in Path("/proc", str(record.pid), "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                theirs.add(path.readlink())
        assert ours not in theirs
        assert record.log in theirs
    finally:
        os.close(read)
        os.close(write)


def test_it_outlives_the_process_that_started_it(place: Place) -> None:
    add_model(place.repository)
    subprocess.run(
        place.script(
            'triton.start(installation, repository=repository, models=["identity"], folder=folder, name="server")'
        ),
        check=True,
    )
    record = triton.observe(place.record)
    assert record is not None
    triton.wait_ready(record, timeout=60)


def test_of_two_starts_of_the_same_server_one_is_refused(place: Place) -> None:
    outcomes: list[object] = []

    def start() -> None:
        try:
            outcomes.append(place.start())
        except Refused as error:
            outcomes.append(error)

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if isinstance(outcome, ServerRecord)]
    assert len(winners) == 1
    assert winners == [triton.observe(place.record)]
    assert f"pid {winners[0].pid}" in str(next(outcome for outcome in outcomes if isinstance(outcome, Refused)))
    assert len(processes_naming(place.repository)) == 1


def test_a_starter_killed_at_any_instant_leaves_nothing_or_a_recorded_server(place: Place) -> None:
    chance = random.Random(20261130)
    starting = place.script(
        """
        print("now", flush=True)
        triton.start(installation, repository=repository, models=[], folder=folder, name="server")
        """
    )
    servers = 0
    for trial in range(12):
        starter = subprocess.Popen(starting, stdout=subprocess.PIPE, start_new_session=True)
        assert starter.stdout is not None
        starter.stdout.readline()
        time.sleep(chance.uniform(0, 0.06))
        (os.killpg if trial % 2 else os.kill)(starter.pid, signal.SIGKILL)
        starter.wait()
        starter.stdout.close()
        time.sleep(0.3)

        def all_is_recorded() -> bool:
            record = triton.observe(place.record)
            return processes_naming(place.repository) == ([] if record is None else [record.pid])

        assert eventually(all_is_recorded)  # a launcher that is under way comes to its end
        record = triton.observe(place.record)
        if record is not None:
            servers += 1
            triton.stop(record, grace=0)
    assert servers > 0, "no trial came far enough to mean anything"


def test_a_record_of_a_dead_process_counts_as_none_and_its_name_is_free_again(place: Place) -> None:
    add_model(place.repository)
    first = place.start("identity")
    triton.wait_ready(first, timeout=60)
    os.killpg(first.pid, signal.SIGKILL)
    assert eventually(lambda: triton.observe(place.record) is None)
    assert shared_memory(first.shm_prefix)
    second = place.start("identity")
    assert shared_memory(first.shm_prefix) == []
    triton.wait_ready(second, timeout=60)
    triton.stop(first)  # what was recorded before is none of it
    assert triton.observe(place.record) == second
    assert place.folder.joinpath("server.log.previous").exists()


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99}', "[1]", '{"format": 1, "pid": 5}'])
def test_a_file_that_is_no_record_is_named_and_not_overwritten(place: Place, content: str) -> None:
    place.folder.mkdir()
    place.record.write_text(content)
    with pytest.raises(StoreUnusable, match=r"server\.json"):
        triton.observe(place.record)
    with pytest.raises(StoreUnusable):
        place.start()
    assert place.record.read_text() == content
    place.record.unlink()


def test_an_occupied_port_is_named_with_the_process_that_has_it(place: Place) -> None:
    for protocol, option in (("HTTP", "http_port"), ("gRPC", "grpc_port"), ("metrics", "metrics_port")):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(NotReady) as caught:
                place.start(**{option: port})
        assert f"port {port}" in str(caught.value)
        assert protocol in str(caught.value)
        assert f"pid {os.getpid()}" in str(caught.value)
    assert not place.record.exists()


def test_given_ports_are_used(place: Place) -> None:
    http_port, grpc_port, metrics_port = find_free_ports(3)
    record = place.start(http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)
    triton.wait_ready(record, timeout=60)
    assert (record.http_port, record.grpc_port, record.metrics_port) == (http_port, grpc_port, metrics_port)
    socket.create_connection(("127.0.0.1", metrics_port), timeout=5).close()


def test_a_binary_that_cannot_be_executed_leaves_no_record(place: Place) -> None:
    place.installation = TritonInstallation(
        tritonserver=Path("/nowhere/tritonserver"), version="0", backends="native", arguments=(), environment=()
    )
    with pytest.raises(CommandFailed, match="No such file"):
        place.start()
    assert not place.record.exists()


def test_a_server_that_dies_before_it_is_ready_is_noticed_at_once(place: Place) -> None:
    add_hanging_model(place.repository)
    record = place.start("hanging")

    def kill() -> None:
        eventually(lambda: "loading: hanging:1" in record.log.read_text())
        os.kill(record.pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    began = time.monotonic()
    with pytest.raises(NotReady) as caught:
        triton.wait_ready(record, timeout=60)
    assert time.monotonic() - began < 40
    assert "ended before it was ready" in str(caught.value)
    assert str(record.log) in str(caught.value)
    assert "loading: hanging:1" in "\n".join(caught.value.last_lines)


def test_a_port_that_is_taken_between_choice_and_use_is_named(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        # As if the port had been free when it was chosen: the last of equal options counts.
        record = place.start(arguments=[f"--http-port={port}"])
        with pytest.raises(NotReady) as caught:
            triton.wait_ready(record, timeout=60)
    assert "ended before it was ready" in str(caught.value)
    assert f"127.0.0.1:{port}" in "\n".join(caught.value.last_lines)


def test_one_bad_model_is_named_and_keeps_no_other_from_being_served(place: Place) -> None:
    add_model(place.repository)
    add_model(place.repository, "broken", model=b"no onnx")
    record = place.start("identity", "broken")
    with pytest.raises(NotReady) as caught:
        triton.wait_ready(record, timeout=60)
    assert "broken version 1: " in str(caught.value)
    assert "model.onnx" in str(caught.value)
    assert triton_client.model_ready(record.address, "identity")
    triton.stop(record, grace=0)


def test_models_that_are_not_there_or_have_a_refused_config_are_named(place: Place) -> None:
    config = add_model(place.repository, "misconfigured")
    (place.repository / "misconfigured" / "config.pbtxt").write_text(config.replace("dims: [1]", "dims: [0]"))
    record = place.start("ghost", "misconfigured")
    began = time.monotonic()
    with pytest.raises(NotReady) as caught:
        triton.wait_ready(record, timeout=60)
    assert time.monotonic() - began < 20
    assert f"ghost: it is not in {place.repository}" in str(caught.value)
    assert "misconfigured: its config.pbtxt is refused" in str(caught.value)
    assert "dimension must be integer >= 1" in record.log.read_text()


def test_a_model_that_hangs_while_it_loads_outlasts_neither_the_deadline_nor_the_stop(place: Place) -> None:
    add_hanging_model(place.repository)
    bystander = SHARED_MEMORY / "enginehouse_served_bystander_region"
    bystander.write_text("of another server")
    try:
        record = place.start("hanging")
        with pytest.raises(NotReady, match="after 2 s"):
            triton.wait_ready(record, timeout=2)
        assert triton.observe(place.record) == record
        assert shared_memory(record.shm_prefix)
        began = time.monotonic()
        triton.stop(record, grace=1)
        assert time.monotonic() - began < 10
        assert processes_naming(place.repository) == []
        assert shared_memory(record.shm_prefix) == []
        assert bystander.exists()
    finally:
        bystander.unlink()


def test_staging_is_ready_inside_the_block_and_gone_after_it(place: Place) -> None:
    add_model(place.repository)
    with triton.staging(
        place.installation, repository=place.repository, models=["identity"], folder=place.folder
    ) as server:
        assert triton_client.server_ready(server.address)
        assert triton_client.ready_versions(server.address, "identity") == (1,)
        assert server.log.exists()
    assert processes_naming(place.repository) == []
    assert shared_memory(server.shm_prefix) == []
    assert not list(place.folder.glob("*.json"))


def test_staging_refuses_with_the_servers_reason(place: Place) -> None:
    add_model(place.repository, "broken", model=b"no onnx")
    with (
        pytest.raises(NotReady, match=r"broken version 1: .*model\.onnx"),
        triton.staging(place.installation, repository=place.repository, models=["broken"], folder=place.folder),
    ):
        pytest.fail("it is not ready")
    assert processes_naming(place.repository) == []


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_staging_dies_with_us_however_we_die(place: Place, signal_number: signal.Signals) -> None:
    add_model(place.repository)
    ours = subprocess.Popen(
        place.script(
            """
            import time
            with triton.staging(installation, repository=repository, models=["identity"], folder=folder) as server:
                print(server.shm_prefix, flush=True)
                time.sleep(600)
            """
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert ours.stdout is not None
    prefix = ours.stdout.readline().strip()
    assert len(processes_naming(place.repository)) >= 2
    os.killpg(ours.pid, signal_number)
    ours.wait()
    ours.stdout.close()
    assert eventually(lambda: not processes_naming(place.repository))
    # What a killed one could not tidy up, the next one does.
    with triton.staging(place.installation, repository=place.repository, folder=place.folder):
        assert shared_memory(prefix) == []


def test_a_second_run_agrees_with_a_recorded_server_without_any_heavy_import(place: Place) -> None:
    add_model(place.repository)
    triton.wait_ready(place.start("identity"), timeout=60)
    told = subprocess.run(
        place.script(
            """
            import sys, time
            from tasks.toolchain import triton_client
            began = time.perf_counter()
            record = triton.observe(folder / "server.json")
            assert triton_client.server_ready(record.address)
            assert triton_client.ready_versions(record.address, "identity") == (1,)
            assert triton_client.model_config(record.address, "identity", 1)["max_batch_size"] == 4
            assert time.perf_counter() - began < 0.5
            print([name for name in ("numpy", "tritonclient", "grpc", "torch", "prefect") if name in sys.modules])
            """
        ),
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "[]\n"


def test_a_load_call_moves_versions_without_the_file_and_without_reloading_those_that_stay(place: Place) -> None:
    add_model(place.repository, versions=(1, 2))
    (place.repository / "identity" / "config.pbtxt").write_text(listing("identity", (1,)))
    record = place.start("identity")
    triton.wait_ready(record, timeout=60)
    address = record.address

    def load(*versions: int) -> tuple[int, ...]:
        triton_client.load(address, "identity", config_text=listing("identity", versions), log=record.log)
        return triton_client.ready_versions(address, "identity")

    first = runners(record, 1)
    assert load(1, 2) == (1, 2)
    assert runners(record, 1) == first
    # Without a config, and with nothing changed on disk, the server keeps what the call gave it.
    triton_client.load(address, "identity")
    assert triton_client.ready_versions(address, "identity") == (1, 2)
    # The file need not exist.
    (place.repository / "identity" / "config.pbtxt").unlink()
    assert load(2) == (2,)
    assert load(1, 2) == (1, 2)
    # The server reports the policy with which a version was loaded, not the one in force.
    second = runners(record, 2)
    assert load(2) == (2,)
    assert runners(record, 2) == second
    assert triton_client.model_config(address, "identity", 2)["version_policy"] == {"specific": {"versions": [1, 2]}}
    # A listed version that does not exist is no error.
    assert load(2, 7) == (2,)
    # A leftover beside the versions makes all of them reload.
    (place.repository / "identity" / ".leftover").mkdir()
    assert load(2) == (2,)
    assert eventually(lambda: runners(record, 2) != second)


def runners(record: ServerRecord, version: int) -> set[int]:
    """The processes that run a version."""
    found = set()
    for pid in processes_naming(f"identity/{version}/model.onnx"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if os.getsid(pid) == record.pid:
                found.add(pid)
    return found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("dims: [1]", "dims: [2]"), "input 'x' has shape"),
        (('platform: "onnxruntime_onnx"', 'platform: "tensorrt_plan"'), "unable to find backend library"),
        (("dims: [1]", "dims: [0]"), "dimension must be integer >= 1"),
    ],
    ids=["the backend's reason", "the server's reason", "a reason that stands in the log alone"],
)
def test_a_refused_load_tells_the_reason_and_the_champion_stays(
    place: Place, change: tuple[str, str], reason: str
) -> None:
    config = add_model(place.repository)
    with triton.staging(
        place.installation, repository=place.repository, models=["identity"], folder=place.folder
    ) as server:
        with pytest.raises(NotReady) as caught:
            triton_client.load(server.address, "identity", config_text=config.replace(*change), log=server.log)
        assert reason in str(caught.value)
        assert "At:" not in str(caught.value).split("\nlast lines")[0]
        assert triton_client.ready_versions(server.address, "identity") == (1,)


def test_a_load_that_hangs_ends_at_its_deadline(place: Place) -> None:
    add_hanging_model(place.repository)
    with triton.staging(place.installation, repository=place.repository, folder=place.folder) as server:
        began = time.monotonic()
        with pytest.raises(NotReady, match="Deadline"):
            triton_client.load(server.address, "hanging", timeout=1)
        assert time.monotonic() - began < 10


def test_unloading_ends_a_model(place: Place) -> None:
    add_model(place.repository)
    with triton.staging(
        place.installation, repository=place.repository, models=["identity"], folder=place.folder
    ) as server:
        triton_client.unload(server.address, "identity")
        assert eventually(lambda: triton_client.ready_versions(server.address, "identity") == ())


@pytest.mark.slow
def test_setup_makes_an_installation_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "triton"
    code = f"""
from pathlib import Path
from tasks.toolchain import triton
triton.setup(Path({str(folder)!r}), say=print)
"""
    for seconds in (0.5, 2.0, 4.0):
        killed = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(seconds)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        assert not folder.exists()
        assert eventually(lambda: not processes_naming(folder))
    said: list[str] = []
    made = triton.setup(folder, say=said.append)
    assert made.version == "2.51.0"
    assert said[-1].startswith("Triton 2.51.0 is ready")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["triton", "triton.lock", "triton.log"]
    said.clear()
    began = time.monotonic()
    assert triton.setup(folder, say=said.append) == made
    assert time.monotonic() - began < 1
    assert said == []
    # Our own backend alone is brought up to date without installing anything.
    description = folder / "installation.json"
    description.write_text(description.read_text().replace('"backend": "', '"backend": "0'))
    shutil.rmtree(next(folder.glob("backends-*")))
    assert triton.setup(folder, say=said.append) == made
    assert said == ["bringing the backend up to date"]


def test_setup_touches_no_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(Refused, match="something else"):
        triton.setup(tmp_path, say=print)
    assert (tmp_path / "letter.txt").read_text() == "dear"
