"""How one rank of several says that it failed: whether it is the cause, or only noticed that another is missing."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .failures import ProgramFailed, is_out_of_memory, places_within, to_json, write_failure
from .jobs import RankFailure

if TYPE_CHECKING:
    from .beats import Suspect

LOST_PEER = re.compile(
    r"gloo/|connectFullMesh|connection (was )?(closed|reset|refused)|socket (closed|timeout)|broken pipe|"
    r"timed out|timeout|recvBytes|NCCL|TCPStore|c10d::|barrier",
    re.IGNORECASE,
)
DISTRIBUTED = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "CheckpointException"}
LOADER_DIED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\).*?(?:killed by signal: ([\w ]+)|exited unexpectedly)"
)
PREEMPTED = 75
"""EX_TEMPFAIL of <sysexits.h>: try again later."""


def restart_is_vain(output: Path) -> bool:
    """Whether this rank was restarted though it would fail again in the same way.

    A rank that was asked to stop would not: torchrun asks it, too, when a host joins and all are to start again.
    """
    file = output / "error.json"
    try:
        told = json.loads(file.read_bytes())
    except FileNotFoundError:
        return False
    if told["kind"] != "preempted":
        return True
    file.unlink(missing_ok=True)
    return False


def record(error: BaseException, job: dict[str, Any]) -> int:
    """Write what this rank knows of its failure; returns its exit status."""
    output, work = Path(job["output"]), Path(job["work"])
    rank = int(os.environ.get("RANK", "0"))
    final = isinstance(error, ProgramFailed)
    suspect = None
    if isinstance(error, ProgramFailed):
        failure = error
    elif is_lost_peer(error):
        from .beats import suspect as find_suspect  # needs torch, which may be what failed

        suspect = find_suspect(work, rank)
        failure = lost_peer(error, suspect, job)
    else:
        failure = unexpected(error, job, rank)
    found: RankFailure = {
        **to_json(failure),
        "pid": os.getpid(),
        "symptom": not final and is_lost_peer(error),
        "suspect": None if suspect is None else suspect.rank,
        "suspect_pid": None if suspect is None else suspect.pid,
        "time": time.time(),
    }
    folder = output / "failures"
    folder.mkdir(exist_ok=True)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    temporary = folder / f".{attempt}-{rank}"
    temporary.write_text(json.dumps(found, indent=1) + "\n")
    temporary.rename(folder / f"{attempt}-{rank}.json")
    if final:
        write_failure(failure, output)
    if not found["symptom"]:
        _tell_torchrun(failure)
    if suspect is not None:
        suspect.end()
    return PREEMPTED if failure.kind == "preempted" else 1


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception says no more than that a peer did not answer."""
    if type(error).__name__ in DISTRIBUTED:
        return True
    return isinstance(error, RuntimeError) and not loader_died(error) and bool(LOST_PEER.search(str(error)))


def loader_died(error: BaseException) -> re.Match[str] | None:
    """What torch says of a loading process that ended; the exception behind the one that is raised knows the signal."""
    found = [LOADER_DIED.search(str(one)) for one in (error, error.__cause__, error.__context__)]
    return max((match for match in found if match), key=lambda match: match[2] is not None, default=None)


def lost_peer(error: BaseException, suspect: Suspect | None, job: dict[str, Any]) -> ProgramFailed:
    if suspect is None:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        return ProgramFailed("training failed", f"another rank could not be reached: {first}")
    hint = "if it was only slow, raise train.collective_timeout_seconds" if suspect.alive else None
    hint = _less_memory(job) if suspect.out_of_memory else hint
    return ProgramFailed("training failed", f"rank {suspect.rank} {suspect.told}", hint=hint)


def unexpected(error: BaseException, job: dict[str, Any], rank: int) -> ProgramFailed:
    """What is neither the user's to mend for certain nor a lost peer: told with its cause where that is known."""
    text = str(error).strip()
    if died := loader_died(error):
        how = f"was ended by a signal ({died[2]})" if died[2] else "ended"
        return ProgramFailed(
            "training failed",
            f"a data loading process of rank {rank} (pid {died[1].strip()}) {how}",
            hint="usual causes: not enough memory or shared memory (/dev/shm); train.num_workers: 0 loads in the rank",
        )
    if is_out_of_memory(error):
        return _out_of_memory(text, job, rank)
    recipe = Path(str(job.get("recipe", "")).rpartition(":")[0])
    frames = traceback.extract_tb(error.__traceback__)
    places = places_within(error, recipe.parent) if recipe.name else []
    lines = [place.described() for place in places]
    if not lines and frames:
        last = frames[-1]
        lines = [f"  {last.filename}:{last.lineno} in {last.name}: {last.line}"]
    head = f"rank {rank} failed: {type(error).__name__}" + (f": {text}" if text else "")
    return ProgramFailed("training failed", "\n".join([head, *lines]), place=places[-1] if places else None)


def _out_of_memory(text: str, job: dict[str, Any], rank: int) -> ProgramFailed:
    import resource

    import torch

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    memory = f"its peak was {peak:.1f} GB"
    if "CUDA" in text and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        memory = f"its peak was {torch.cuda.max_memory_allocated() / 1e9:.1f} GB of the GPU's {total / 1e9:.1f} GB"
    return ProgramFailed(
        "training failed",
        f"rank {rank} ran out of memory; {memory}: {(text.splitlines() or ['MemoryError'])[0][:300]}",
        hint=_less_memory(job),
    )


def _less_memory(job: dict[str, Any]) -> str:
    batch_size = job.get("config", {}).get("batch_size")
    half = f"try train.batch_size {max(1, batch_size // 2)} (it is {batch_size}), or " if batch_size else ""
    return f"{half}the same batch in more parts with train.gradient_accumulation_steps"


def _tell_torchrun(failure: ProgramFailed) -> None:
    """In the file that torchrun reads, so that it names this rank and not the one whose end it saw first."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    message = {"message": str(failure), "extraInfo": {"py_callstack": str(failure), "timestamp": str(int(time.time()))}}
    Path(path).write_text(json.dumps({"message": message}))
