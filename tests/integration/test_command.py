"""Child processes, for real: whatever ends the run, nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.errors import CommandFailed
from tasks.stage import PRIVATE_TMP
from tasks.toolchain import command
from tasks.toolchain.command import run
from tasks.toolchain.processes import start_time
from tests.waiting import eventually

FAMILY = """
# A child with a grandchild in a session of its own and an orphan in another; all three ignore SIGTERM.
import os, signal, subprocess, sys, time
from pathlib import Path

folder, role = Path(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if role == "child":
    subprocess.Popen([sys.executable, __file__, folder, "grandchild"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        os.execv(sys.executable, [sys.executable, __file__, str(folder), "orphan"])
if role == "orphan" and os.fork() != 0:
    os._exit(0)
(folder / f"{role}.pid").write_text(str(os.getpid()))
while len(list(folder.glob("*.pid"))) < 3:
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    family = Family(tmp_path)
    yield family
    for pid in family.living():  # a failed test must leave nothing behind either
        os.kill(pid, signal.SIGKILL)


class Family:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "family"
        self.folder.mkdir()
        script = folder / "family.py"
        script.write_text(FAMILY)
        self.argv = [sys.executable, str(script), str(self.folder), "child"]

    def pids(self) -> dict[str, int]:
        return {path.stem: int(path.read_text() or 0) for path in self.folder.glob("*.pid")}

    def living(self) -> list[int]:
        return [pid for pid in self.pids().values() if pid and start_time(pid) is not None]

    def await_birth(self) -> None:
        assert eventually(lambda: len(self.living()) == 3), "the test's own processes did not start"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def orchestrate(
    family: Family, tmp_path: Path, *, grace: float = 0.3, threaded: bool = False
) -> subprocess.Popen[bytes]:
    """Another process that runs the family, as the orchestrator would."""
    call = f"run({family.argv!r}, log=Path({str(tmp_path / 'log')!r}), what='family', timeout=600, grace={grace})"
    start = f"threading.Thread(target=lambda: {call}).start()" if threaded else call
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import threading\nfrom pathlib import Path\nfrom tasks.toolchain.command import run\n{start}",
        ],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def test_output_comes_line_by_line_while_it_is_written_and_lands_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "child.log"
    seen: list[tuple[str, float]] = []
    completed = run(
        python("""
            import sys, time
            print("one", flush=True)
            time.sleep(2)
            print("two", file=sys.stderr)
        """),
        log=log,
        what="child",
        timeout=30,
        on_line=lambda line: seen.append((line, time.monotonic())),
    )
    assert [line for line, _ in seen] == ["one", "two"]
    assert seen[1][1] - seen[0][1] > 0.3
    assert completed.last_lines == ("one", "two")
    assert completed.seconds > 2
    command_line, *_, before_last, last = log.read_text().splitlines()
    assert command_line.startswith(f"$ {sys.executable} -c ")
    assert (before_last, last) == ("one", "two")


def test_a_log_is_appended_to(tmp_path: Path) -> None:
    for word in ("first", "second"):
        run(["echo", word], log=tmp_path / "log", what="echo", timeout=10)
    assert (tmp_path / "log").read_text() == "$ echo first\nfirst\n$ echo second\nsecond\n"


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("print('10%\\r50%\\r100%\\ndone')", ["100%", "done"]),
        ("print('line\\r\\nend', end='')", ["line", "end"]),
        ("sys.stdout.buffer.write(b'caf\\xe9 \\xc3\\xa9\\n')", ["caf\ufffd é"]),
        ("print('x' * 200_000, end='')", None),
    ],
    ids=["progress bar", "windows line end", "not UTF-8", "no line end"],
)
def test_lines_are_text_whatever_is_written(tmp_path: Path, written: str, lines: list[str] | None) -> None:
    seen: list[str] = []
    run(python(f"import sys\n{written}"), log=tmp_path / "log", what="child", timeout=30, on_line=seen.append)
    if lines is None:
        assert "".join(seen) == "x" * 200_000
    else:
        assert seen == lines


def test_the_child_gets_the_environment_and_the_folder_that_were_named_and_no_input(tmp_path: Path) -> None:
    completed = run(
        python("import os, sys; print(sorted(os.environ), os.getcwd(), repr(sys.stdin.read()))"),
        log=tmp_path / "log",
        what="child",
        timeout=30,
        env={"ONLY": "this", "LC_ALL": "C.UTF-8"},
        cwd=tmp_path,
    )
    assert completed.last_lines == (f"['LC_ALL', 'ONLY'] {tmp_path} ''",)


def test_the_child_inherits_no_descriptor_and_no_ignored_signal(tmp_path: Path) -> None:
    completed = run(
        python("""
            import os
            print(sorted(d for d in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{d}")))
        """),
        log=tmp_path / "log",
        what="child",
        timeout=30,
    )
    assert completed.last_lines == ("[0, 1, 2]",)
    # A shell shows what exec passed on; Python itself would ignore SIGPIPE again.
    ignored = run(["grep", "SigIgn", "/proc/self/status"], log=tmp_path / "log", what="child", timeout=30).last_lines[0]
    # Those two are what Python ignores; what else is ignored came from whoever started the tests.
    mask = int(ignored.split()[1], 16)
    assert [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if mask >> (number - 1) & 1] == []


@pytest.mark.parametrize(
    ("code", "ended"),
    [("raise SystemExit(3)", "exit status 3"), ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL")],
)
def test_a_failure_says_how_it_ended_and_can_be_run_again_by_hand(tmp_path: Path, code: str, ended: str) -> None:
    argv = python(f"print('the last words', flush=True)\n{code}")
    with pytest.raises(CommandFailed) as caught:
        run(argv, log=tmp_path / "log", what="training", timeout=30)
    assert caught.value.ended == ended
    assert caught.value.last_lines == ("the last words",)
    message = str(caught.value)
    assert f"training failed: {ended}" in message
    assert str(tmp_path / "log") in message
    pasted = message.partition("command: ")[2].partition("\nlog: ")[0]
    again = subprocess.run(["bash", "-c", pasted], capture_output=True, text=True, check=False)
    assert again.stdout == "the last words\n"
    assert again.returncode != 0


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"could not be started.*No such file"):
        run(["no-such-program-here"], log=tmp_path / "log", what="nothing", timeout=10)


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        ("OSError: [Errno 98] Address already in use", "a port is in use by another process"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ModuleNotFoundError: No module named 'lightning'", "a Python module is missing: No module named 'lightning'"),
    ],
)
def test_usual_causes_are_told(tmp_path: Path, printed: str, cause: str) -> None:
    with pytest.raises(CommandFailed) as caught:
        run(python(f"raise SystemExit({printed!r})"), log=tmp_path / "log", what="child", timeout=30)
    assert caught.value.cause == cause


def test_a_stage_can_tell_its_own_causes(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed) as caught:
        run(
            ["sh", "-c", "echo oops; exit 1"],
            log=tmp_path / "log",
            what="child",
            timeout=30,
            diagnose=lambda lines: f"it said {lines[-1]}",
        )
    assert caught.value.cause == "it said oops"


def test_past_the_deadline_every_descendant_is_killed(tmp_path: Path, family: Family) -> None:
    with pytest.raises(CommandFailed) as caught:
        run(family.argv, log=tmp_path / "log", what="family", timeout=10, grace=0.3)
    assert caught.value.ended == "deadline of 10 s passed"
    assert len(family.pids()) == 3
    assert family.living() == []


def test_a_child_that_obeys_sigterm_may_tidy_up_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed) as caught:
        run(
            ["bash", "-c", "trap 'echo tidied; exit 0' TERM; sleep 60 & wait"],
            log=tmp_path / "log",
            what="child",
            timeout=3,
            grace=20,
        )
    assert caught.value.last_lines == ("tidied",)
    assert "deadline" in caught.value.ended


def test_a_stopped_child_ends_at_the_deadline_too(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(CommandFailed):
        run(python("import os; os.kill(os.getpid(), 19)"), log=tmp_path / "log", what="child", timeout=0.5, grace=30)
    assert time.monotonic() - began < 15


def test_what_is_left_when_the_child_has_ended_is_killed(tmp_path: Path, family: Family) -> None:
    waiting = f"while [ $(ls {family.folder} | wc -l) -lt 3 ]; do sleep 0.05; done"
    completed = run(
        ["bash", "-c", f"{' '.join(family.argv)} & {waiting}; echo done"],
        log=tmp_path / "log",
        what="family",
        timeout=60,
    )
    assert "done" in completed.last_lines
    assert family.living() == []


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("whole_group", [False, True], ids=["process", "process group"])
def test_no_descendant_outlives_a_signalled_orchestrator(
    tmp_path: Path, family: Family, signal_number: signal.Signals, whole_group: bool
) -> None:
    orchestrator = orchestrate(family, tmp_path)
    family.await_birth()
    (os.killpg if whole_group else os.kill)(orchestrator.pid, signal_number)
    orchestrator.wait(timeout=20)
    if signal_number == signal.SIGINT:
        # KeyboardInterrupt: everything is killed before it propagates.
        assert family.living() == []
    assert eventually(lambda: family.living() == [])


def test_no_descendant_outlives_an_orchestrator_killed_while_it_starts(tmp_path: Path, family: Family) -> None:
    for instant in range(8):
        orchestrator = orchestrate(family, tmp_path)
        time.sleep(0.05 + 0.02 * instant)
        orchestrator.kill()
        orchestrator.wait()
    time.sleep(0.5)
    assert eventually(lambda: family.living() == [] and not _processes_naming(str(family.folder)))


def _processes_naming(text: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                named = text.encode() in (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if named:
                found.append(int(folder.name))
    return found


def test_a_thread_ends_its_child_when_the_main_thread_has_ended_by_an_exception(tmp_path: Path, family: Family) -> None:
    orchestrator = orchestrate(family, tmp_path, threaded=True)
    family.await_birth()
    # The main thread has nothing to do and is over; the interpreter waits for the thread, and the thread for the child.
    orchestrator.wait(timeout=20)
    assert family.living() == []


def test_children_run_in_threads_and_are_cancelled_from_another(tmp_path: Path, family: Family) -> None:
    failures: list[CommandFailed] = []

    def work() -> None:
        try:
            run(family.argv, log=tmp_path / "log", what="family", timeout=600, grace=0.3)
        except CommandFailed as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    family.await_birth()
    command.cancel_all()
    thread.join(timeout=20)
    assert [failure.ended for failure in failures] == ["cancelled"]
    assert family.living() == []


def test_an_exception_from_the_line_callback_ends_the_child(tmp_path: Path, family: Family) -> None:
    class Stop(Exception):
        pass

    def stop(line: str) -> None:
        raise Stop(line)

    with pytest.raises(Stop, match="ready"):
        run(family.argv, log=tmp_path / "log", what="family", timeout=600, grace=0.3, on_line=stop)
    assert family.living() == []


def test_the_child_dies_with_a_killed_supervisor(tmp_path: Path) -> None:
    def kill_supervisor(line: str) -> None:
        os.kill(int(line), signal.SIGKILL)

    code = "import os, time; print(os.getppid(), flush=True); time.sleep(600)"
    with pytest.raises(CommandFailed, match="supervisor killed"):
        run(python(code), log=tmp_path / "log", what="child", timeout=600, on_line=kill_supervisor)
    assert eventually(lambda: not _processes_naming(code))


def test_a_child_that_signals_its_own_process_group_does_not_reach_the_supervisor(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed) as caught:
        run(["bash", "-c", "kill -9 0"], log=tmp_path / "log", what="child", timeout=30)
    assert caught.value.ended == "killed by SIGKILL"


def test_a_child_killed_for_want_of_memory_is_told_from_one_killed_by_hand(tmp_path: Path) -> None:
    group = _memory_group(f"enginehouse-test-{os.getpid()}")
    if group is None:
        pytest.skip("this user may not make a control group with a memory limit")
    code = f"""
        import sys
        from pathlib import Path
        from tasks.errors import CommandFailed
        from tasks.toolchain.command import run
        Path({str(group / "cgroup.procs")!r}).write_text("0")
        log = Path({str(tmp_path / "log")!r})
        try:
            run([sys.executable, "-c", "bytearray(1 << 30)"], log=log, what="big", timeout=60)
        except CommandFailed as error:
            print(error.cause)
    """
    try:
        told = subprocess.run(python(code), capture_output=True, text=True, check=True)
    finally:
        assert eventually(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
    assert told.stdout.startswith("out of memory")


def _memory_group(name: str) -> Path | None:
    """A control group limited to 200 MB (version 1 or 2), or None where none can be made."""
    for parent, limit, swap in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"),
    ):
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(200 << 20))
            if (group / swap).exists():
                (group / swap).write_text(str(200 << 20) if "memsw" in swap else "0")
            return group
        group.rmdir()
    return None


def test_supervision_costs_a_fraction_of_a_second(tmp_path: Path) -> None:
    durations = []
    for _ in range(5):
        began = time.perf_counter()
        run(["true"], log=tmp_path / "log", what="nothing", timeout=10)
        durations.append(time.perf_counter() - began)
    assert min(durations) < 0.2  # measured: 0.03


@pytest.mark.parametrize("room", [True, False], ids=["a short path", "a path that leaves a socket no room"])
def test_a_temporary_folder_of_its_own_goes_with_a_child_that_is_killed(tmp_path: Path, room: bool) -> None:
    told: list[str] = []
    with tempfile.TemporaryDirectory() as short:
        outer = Path(short) if room else Path(short, "n" * 60)
        outer.mkdir(exist_ok=True)
        with pytest.raises(CommandFailed, match="deadline"):
            run(
                python("import tempfile, time; print(tempfile.mkdtemp(), flush=True); time.sleep(60)"),
                log=tmp_path / "log",
                what="a program",
                timeout=5,
                grace=0.0,
                env={**os.environ, "TMPDIR": str(outer), PRIVATE_TMP: "1"},
                on_line=told.append,
            )
        (made,) = map(Path, told)
        assert (made.parent.parent == outer) is room
        assert list(outer.iterdir()) == ([] if room else [made])
