"""Stage `deploy`: moves the servers to a verified release and asks them everything again, live."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasks.artifacts.digest import digest_of
from tasks.config import Pipeline
from tasks.events import Listener
from tasks.home import Home
from tasks.rollout import LOAD_SECONDS, roll_out
from tasks.served import Candidate, Verification, ask_golden, disagreements, verify_server
from tasks.targets import DeployTarget, Replica
from tasks.toolchain.model_repository import Repository

STAGE = "deploy"


@contextmanager
def release_lock(home: Home, repository: Path, model: str) -> Iterator[None]:
    """Keep two releases of one model apart; waits for the other. Ends with the process that holds it."""
    home.locks.mkdir(parents=True, exist_ok=True)
    name = digest_of([str(repository.resolve()), model]).short
    with (home.locks / f"{model}-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def settled(candidate: Candidate, *, target: DeployTarget) -> Sequence[Replica] | None:
    """Return the servers if they run and agree with the candidate, else `None`. Milliseconds, over plain HTTP."""
    replicas = target.observe()
    if len(replicas) < target.size or any(disagreements(replica.address, candidate) for replica in replicas):
        return None
    return replicas


def move(
    pipeline: Pipeline,
    candidate: Candidate,
    *,
    committed: str | None,
    target: DeployTarget,
    home: Home,
    listener: Listener,
    measure: bool,
    override: str | None = None,
    load_seconds: float = LOAD_SECONDS,
) -> tuple[Verification, Sequence[Replica]]:
    """Bring every server to the candidate and ask it, live; then commit the config. See `roll_out`.

    With `measure` the first server is also asked the whole test data; every server is asked the golden answers.
    `override` is as in `gates.require`.
    """
    verifications: list[Verification] = []

    def check(replica: Replica, index: int) -> None:
        log = home.serve / f"{replica.name}-evaluation.log"
        with tempfile.TemporaryDirectory() as work:
            if measure and index == 0:
                verifications.append(
                    verify_server(
                        replica.address,
                        pipeline,
                        candidate,
                        runtime="live",
                        work=Path(work),
                        log=log,
                        listener=listener,
                        override=override,
                    )
                )
            else:
                verifications.append(
                    ask_golden(
                        replica.address,
                        pipeline,
                        candidate,
                        runtime="live",
                        work=Path(work),
                        log=log,
                        listener=listener,
                        override=override,
                    )
                )

    replicas = roll_out(
        candidate,
        repository=Repository(pipeline.repository),
        committed=committed,
        target=target,
        check=check,
        listener=listener,
        load_seconds=load_seconds,
    )
    gates = [gate for verification in verifications for gate in verification.gates]
    return Verification(metrics=verifications[0].metrics, gates=gates), replicas
