"""Signs of life: what each rank is doing, in a file of its own, so that one that hangs or died can be named by others.

A thread writes `work/ranks/rank-<n>.json` (`Beat`) twice a second; it goes on while the rank waits in a collective
operation, and stops when the process is stopped or gone. The same thread samples what the process uses.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch

from .supervise import oom_kills

EVERY = 0.5
"""Seconds between beats."""
SILENT = 4.0
"""Seconds without a beat after which a rank counts as silent."""

PHASES = ("starting", "loading data", "forward", "backward", "optimizer", "between steps", "validation", "finished")
"""What a rank may be doing, in the order of a step."""


class Beat(TypedDict):
    """`work/ranks/rank-<n>.json`."""

    rank: int
    pid: int
    host: str
    attempt: str
    """Which start of the workers wrote it: beats of an earlier one say nothing about this one."""
    step: int
    phase: str
    since: float
    """When the phase began (seconds since the epoch)."""
    time: float
    memory_mb: float
    oom_kills: int
    """How many processes of its control group the kernel had killed for want of memory when this rank began."""


def attempt() -> str:
    """What all ranks of one start of the workers share, and no two starts."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@dataclass(kw_only=True)
class Usage:
    """What this process used, sampled with each beat."""

    cpu_percent: list[float] = field(default_factory=list)
    peak_memory_mb: float = 0.0
    gpu_percent: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        found = {"peak_memory_mb": round(self.peak_memory_mb, 1)}
        for name, values in (("cpu_percent", self.cpu_percent), ("gpu_percent", self.gpu_percent)):
            if values:
                found[name] = round(sum(values) / len(values), 1)
        if torch.cuda.is_available():
            found["peak_gpu_memory_mb"] = round(torch.cuda.max_memory_allocated() / 1e6, 1)
        return found


class Beats:
    """This rank's signs of life; `at` costs next to nothing and may be called in every step."""

    def __init__(self, work: Path, rank: int) -> None:
        self._folder, self._rank = work / "ranks", rank
        self._folder.mkdir(parents=True, exist_ok=True)
        self._now = ("starting", 0, time.time())
        self._end = threading.Event()
        self._oom_kills = oom_kills()
        self._memory_mb = 0.0
        self.usage = Usage()
        self._cpu = (time.monotonic(), sum(os.times()[:4]))
        self._thread = threading.Thread(target=self._beat_on, name="beats", daemon=True)
        self._write()
        self._thread.start()

    def at(self, phase: str, step: int) -> None:
        """Say what comes now."""
        self._now = (phase, step, time.time())

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
        self._write()

    def _beat_on(self) -> None:
        while not self._end.wait(EVERY):
            self._sample()
            with contextlib.suppress(OSError):  # a full disk is told by whoever needs it
                self._write()

    def _write(self) -> None:
        phase, step, since = self._now
        beat: Beat = {
            "rank": self._rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "attempt": attempt(),
            "step": step,
            "phase": phase,
            "since": since,
            "time": time.time(),
            "memory_mb": round(self._memory_mb, 1),
            "oom_kills": self._oom_kills,
        }
        temporary = self._folder / f".rank-{self._rank}.{os.getpid()}"
        temporary.write_text(json.dumps(beat))
        temporary.replace(self._folder / f"rank-{self._rank}.json")

    def _sample(self) -> None:
        now, used = time.monotonic(), sum(os.times()[:4])
        before, used_before = self._cpu
        self._cpu = (now, used)
        self.usage.cpu_percent.append(100 * (used - used_before) / (now - before))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self._memory_mb = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        self.usage.peak_memory_mb = max(self.usage.peak_memory_mb, self._memory_mb)
        if torch.cuda.is_available():
            with contextlib.suppress(ModuleNotFoundError, RuntimeError):  # no pynvml, or a driver that does not tell
                self.usage.gpu_percent.append(torch.cuda.utilization())


def read_beats(work: Path) -> list[Beat]:
    """What is known of this start's ranks, by rank."""
    found: list[Beat] = []
    for path in sorted((work / "ranks").glob("rank-*.json")):
        beat: Beat = json.loads(path.read_text())
        if beat["attempt"] == attempt():
            found.append(beat)
    return sorted(found, key=lambda beat: beat["rank"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """The rank that the others waited for in vain."""

    rank: int
    pid: int
    here: bool
    """Whether it is on this machine."""
    told: str
    """What is known about it, as the end of a sentence that begins with the rank."""
    alive: bool
    out_of_memory: bool = False
    """Whether the kernel ended it for want of memory."""

    def end(self) -> None:
        """A rank that the others gave up on holds its place until it is gone; one that is stopped or hangs in a system
        call ends for SIGKILL only, which torchrun sends half a minute later."""
        if self.here and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def suspect(work: Path, rank: int, *, patience: float = 1.5) -> Suspect | None:
    """Who is to blame for a collective operation that failed on this rank; None where nobody stands out.

    A process needs a moment to be seen dead, hence the patience (seconds).
    """
    until = time.monotonic() + patience
    while True:
        beats = read_beats(work)
        others = [beat for beat in beats if beat["rank"] != rank]
        before = [beat["oom_kills"] for beat in beats if beat["rank"] == rank]
        for beat in others:
            state = _process_state(beat)
            if state == "gone" and before and oom_kills() > before[0]:
                told = f"was killed by the kernel, out of memory; it had {beat['memory_mb']:,.0f} MB when it was last "
                return _suspect(beat, f"{told}heard of {_place(beat)}", alive=False, out_of_memory=True)
            if state in ("gone", "stopped"):
                told = "has ended without a word" if state == "gone" else "is stopped (as by SIGSTOP or a debugger)"
                return _suspect(beat, f"{told}; it was last heard of {_place(beat)}", alive=state != "gone")
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    now = time.time()
    silent = [beat for beat in others if now - beat["time"] > SILENT]
    if silent:
        beat = min(silent, key=lambda b: b["time"])
        return _suspect(beat, f"has not been heard of for {now - beat['time']:.0f} s, then {_place(beat)}", alive=True)
    behind = [beat for beat in others if beat["phase"] not in ("backward", "between steps", "finished")]
    if behind:
        beat = min(behind, key=lambda b: (b["step"], b["since"]))
        return _suspect(beat, f"did not come: {_place(beat)} for {now - beat['since']:.0f} s", alive=True)
    return None


def _suspect(beat: Beat, told: str, *, alive: bool, out_of_memory: bool = False) -> Suspect:
    here = beat["host"] == socket.gethostname()
    return Suspect(rank=beat["rank"], pid=beat["pid"], here=here, told=told, alive=alive, out_of_memory=out_of_memory)


def _place(beat: Beat) -> str:
    return f'in the phase "{beat["phase"]}" of step {beat["step"]}'


def _process_state(beat: Beat) -> str:
    """`gone`, `stopped`, `living`, or `unknown` on another machine."""
    if beat["host"] != socket.gethostname():
        return "unknown"
    try:
        stat = Path(f"/proc/{beat['pid']}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    letter: Any = stat.rpartition(")")[2].split()[0]
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "living")
