"""What the tests of publishing share, and the trials that need processes of their own.

Run as a program, it forks publishers, kills them, and prints what came of it as one JSON object: a program, so that
nothing but itself is forked. A reader of its own looks at the repository all the while, as a server would.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks.artifacts.content import Content, FileEntry
from tasks.artifacts.digest import Digest
from tasks.artifacts.record import ArtifactRef
from tasks.errors import EnginehouseError, Refused
from tasks.publish import PublishPlan, Repository, Wanted, commit, commit_config, observe, place_version, plan
from tasks.toolchain.config_pbtxt import HEADER, listed_versions, with_versions

MODEL = "digits"
CONFIG = (
    HEADER + f'name: "{MODEL}"\nplatform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
    'input {\n  name: "x"\n  data_type: TYPE_FP32\n  dims: [4]\n}\n'
    'output {\n  name: "y"\n  data_type: TYPE_FP32\n  dims: [2]\n}\n'
)


def files_of(seed: int, *, size: int = 20_000) -> dict[str, bytes]:
    """A model of several files, one of them in a folder, that differs from every other seed's in each byte's file."""
    data = random.Random(seed).randbytes(size)
    return {"model.onnx": data, "model.onnx.data": data[::-1], "assets/vocabulary.txt": data[:100]}


def wanted(files: dict[str, bytes], *, config: str = CONFIG, number: int = 1, used: Sequence[int] = ()) -> Wanted:
    entries = [FileEntry(path, len(data), Digest.of(data)) for path, data in files.items()]
    content = Content.of(entries)

    def ref(stage: str, digest: Digest) -> ArtifactRef:
        record = Digest.of(f"{stage} {number}".encode())
        return ArtifactRef(pipeline="numbers", stage=stage, number=number, record=record, content=digest)

    return Wanted(
        pipeline="numbers",
        model=MODEL,
        engine=ref("engine", content.digest),
        files=content.files,
        config=ref("triton_config", Digest.of(config.encode())),
        config_text=config,
        actor="tester@here",
        used=frozenset(used),
    )


def source_of(files: dict[str, bytes]) -> Callable[[Path], None]:
    def source(folder: Path) -> None:
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

    return source


def publish(repository: Repository, files: dict[str, bytes], **kwargs: Any) -> PublishPlan:
    """The whole of publishing, as a flow does it without a server between; returns what was committed."""
    todo = plan(observe(repository, MODEL), wanted(files, **kwargs))
    if todo.reuses is None:
        place_version(todo, source_of(files))
        todo = plan(observe(repository, MODEL), wanted(files, **kwargs))
    commit(todo)
    return todo


def look(folder: Path, *, proven: dict[str, str]) -> list[str]:
    """What a reader finds wrong at this instant; `proven` keeps the digests of versions that were read before."""
    wrong = []
    try:
        config = (folder / "config.pbtxt").read_text()
    except FileNotFoundError:
        config = ""
    listed = listed_versions(config) or () if config else ()
    if config and not (config.startswith(HEADER) and config.endswith("}\n") and listed):
        wrong.append(f"half a config: {config!r}")
    for version in {path.name for path in folder.glob("[0-9]*")} | {str(v) for v in listed}:
        try:
            provenance = json.loads((folder / version / "provenance.json").read_text())
            there = {p.relative_to(folder / version).as_posix() for p in (folder / version).rglob("*") if p.is_file()}
            if there != {file["path"] for file in provenance["files"]} | {"provenance.json"}:
                wrong.append(f"version {version} holds {sorted(there)}")
            for file in provenance["files"]:
                data = (folder / version / file["path"]).read_bytes()
                if f"sha256:{hashlib.sha256(data).hexdigest()}" != file["digest"]:
                    wrong.append(f"version {version} has half of {file['path']}")
        except (OSError, ValueError) as error:
            wrong.append(f"version {version}: {error!r}")
            continue
        content = provenance["materials"]["engine"]["content"]
        if proven.setdefault(version, content) != content:
            wrong.append(f"version {version} was replaced")
    return wrong


class Reader:
    """A process that looks without a pause until it is told to stop."""

    def __init__(self, folder: Path) -> None:
        self.stop_read, self.stop_write = os.pipe()
        self.found_read, self.found_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.stop_write)
            os.set_blocking(self.stop_read, False)
            proven: dict[str, str] = {}
            looks, wrong = 0, []
            while not wrong:
                wrong = look(folder, proven=proven)
                looks += 1
                try:
                    if os.read(self.stop_read, 1) == b"":
                        break
                except BlockingIOError:
                    pass
            os.write(self.found_write, json.dumps({"looks": looks, "wrong": wrong[:5]}).encode())
            os._exit(0)
        os.close(self.found_write)

    def stop(self) -> dict[str, Any]:
        os.close(self.stop_write)
        with os.fdopen(self.found_read) as found:
            result: dict[str, Any] = json.load(found)
        os.waitpid(self.pid, 0)
        return result


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (a fork must never come back into its parent's code)
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return pid


def state(repository: Repository) -> dict[str, Any]:
    found = observe(repository, MODEL)
    return {
        "entries": sorted(p.name for p in found.folder.iterdir()),
        "contents": {v: str(p.provenance.engine.content) for v, p in sorted(found.versions.items())},
        "listed": found.listed,
        "wrong": [*found.damaged.values(), *found.foreign.values(), *found.leftovers],
    }


def kill_at_random_instants(repository: Repository, trials: int) -> dict[str, Any]:
    """Each trial publishes another content, is killed, and is run again to its end."""
    publish(repository, files_of(0))
    reader = Reader(repository.folder(MODEL))
    chance = random.Random(7)
    usual = 0.0
    killed = 0
    leftovers = 0
    for trial in range(1, trials + 1):
        began_read, began_write = os.pipe()

        def work() -> None:
            os.write(began_write, b"x")  # noqa: B023
            publish(repository, files_of(trial))  # noqa: B023
            time.sleep(60)

        pid = fork(work)
        os.read(began_read, 1)
        time.sleep(chance.uniform(0, usual))
        os.kill(pid, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        os.close(began_read)
        os.close(began_write)
        leftovers += len(observe(repository, MODEL).leftovers)
        started = time.monotonic()
        publish(repository, files_of(trial))
        usual = (usual + time.monotonic() - started) / 2
    return {"killed": killed, "leftovers": leftovers, "reader": reader.stop(), "state": state(repository)}


CHANGES = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.chmod", "fcntl.flock", "shutil.rmtree")


def kill_before_every_step(repository: Repository, *, placed: int) -> dict[str, Any]:
    """Die before the first, second, ... change of the file system, each time in a repository of its own.

    What lies there then is what a reader would have seen at that instant. Ends with the run that comes through.
    """
    base = Repository(repository.path / "base")
    for seed in range(placed):
        publish(base, files_of(seed))
    base.path.mkdir(parents=True, exist_ok=True)
    for step in itertools.count(1):
        trial = Repository(repository.path / f"{step}")
        shutil.copytree(base.path, trial.path)

        def work() -> None:
            seen = 0

            def hook(event: str, _args: Any) -> None:
                nonlocal seen
                if event in CHANGES:
                    seen += 1
                    if seen == step:  # noqa: B023
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            publish(trial, files_of(placed))  # noqa: B023

        ended = os.waitpid(fork(work), 0)[1]
        folder = trial.folder(MODEL)
        wrong = look(folder, proven={}) if folder.exists() else []
        assert wrong == [], (step, wrong)
        publish(trial, files_of(placed))
        after = state(trial)
        assert after["wrong"] == [], (step, after)
        assert after["entries"] == [*map(str, range(1, placed + 2)), "config.pbtxt"], (step, after)
        assert after["listed"] == tuple(range(1, placed + 2)), (step, after)
        if not os.WIFSIGNALED(ended):
            assert os.WEXITSTATUS(ended) == 0
            return {"steps": step}
    raise AssertionError


def publish_at_once(repository: Repository, publishers: int, rounds: int, *, same: bool) -> dict[str, Any]:
    """Several publishers start at one instant; who is refused says so and runs again."""
    reader = Reader(repository.folder(MODEL))
    refused = 0
    for round_ in range(rounds):
        start_read, start_write = os.pipe()

        def work(number: int) -> None:
            os.close(start_write)  # noqa: B023
            os.read(start_read, 1)  # noqa: B023
            files = files_of(1000 * round_ + (0 if same else number))  # noqa: B023
            try:
                publish(repository, files)
            except Refused as error:
                os._exit(9 if "run again" in str(error) else 1)

        pids = [fork(lambda n=n: work(n)) for n in range(publishers)]  # type: ignore[misc]
        os.close(start_write)
        os.close(start_read)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert set(codes) <= {0, 9}, codes
        refused += codes.count(9)
    return {"refused": refused, "reader": reader.stop(), "state": state(repository)}


def commit_at_once(repository: Repository, committers: int, rounds: int) -> dict[str, Any]:
    """Several configs want to replace the same one; each hesitates at the last instant. Returns who came through."""
    folder = repository.folder(MODEL)
    for seed in range(committers):
        publish(repository, files_of(seed))
    codes = []
    for _ in range(rounds):
        observed = (folder / "config.pbtxt").read_text()

        def work(version: int) -> None:
            sys.addaudithook(lambda event, _: time.sleep(0.05) if event == "os.rename" else None)
            config = with_versions(CONFIG.replace("size: 8", f"size: {os.getpid()}"), [version])
            try:
                commit_config(folder, config, replacing=observed)  # noqa: B023
            except Refused:
                os._exit(9)

        pids = [fork(lambda n=n: work(n)) for n in range(1, committers + 1)]  # type: ignore[misc]
        codes.append(sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
    return {"codes": codes}


def in_a_full_file_system(repository: Repository) -> dict[str, Any]:
    """`repository` lies in a file system of 1 MiB. Every write that can fail for want of room is made to."""
    publish(repository, files_of(0))
    before = state(repository)
    config = (repository.folder(MODEL) / "config.pbtxt").read_bytes()
    errors = []

    def fails(work: Callable[[], object]) -> None:
        try:
            work()
        except EnginehouseError as error:
            errors.append(f"{type(error).__name__}: {error}")
        assert (repository.folder(MODEL) / "config.pbtxt").read_bytes() == config
        assert state(repository) == before

    fails(lambda: publish(repository, files_of(1, size=2_000_000)))
    filler = repository.path.parent / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
    fails(lambda: publish(repository, files_of(1)))
    fails(lambda: publish(repository, files_of(0), config=CONFIG.replace("size: 8", "size: 4")))
    filler.unlink()
    publish(repository, files_of(1))
    return {"errors": errors, "state": state(repository)}


def in_a_read_only_file_system(repository: Repository) -> dict[str, Any]:
    """`repository` lies in a file system that is made read-only by the command that stands in the environment."""
    publish(repository, files_of(0))
    before = state(repository)
    assert os.system(os.environ["REMOUNT"]) == 0
    errors = []
    for files in (files_of(0), files_of(1)):
        try:
            publish(repository, files)
        except EnginehouseError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {"errors": errors, "unchanged": state(repository) == before}


if __name__ == "__main__":
    trial = {
        "random": lambda r: kill_at_random_instants(r, 40),
        "first": lambda r: kill_before_every_step(r, placed=0),
        "next": lambda r: kill_before_every_step(r, placed=1),
        "race": lambda r: publish_at_once(r, 4, 5, same=False),
        "same": lambda r: publish_at_once(r, 4, 5, same=True),
        "commits": lambda r: commit_at_once(r, 4, 3),
        "full": in_a_full_file_system,
        "read-only": in_a_read_only_file_system,
    }[sys.argv[1]]
    print(json.dumps(trial(Repository(Path(sys.argv[2])))))
