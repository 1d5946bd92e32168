"""Moves the servers of a target to a release, one after the other, and commits it; or moves them back.

The order makes every instant safe. The versions lie in the repository. A server is moved, by a load call that carries
the config or by being replaced where its image holds what it serves, and is asked again; then the next one. Only when
all agree is `config.pbtxt` replaced, which commits: a server that restarts before that serves what was the champion,
and one that restarts after it the new one (one that was baked restarts as it is). Whatever fails, those already moved
are moved back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tasks.errors import EnginehouseError, NotReady
from tasks.events import Listener, note
from tasks.served import Candidate, disagreements
from tasks.targets import DeployTarget, Replica
from tasks.toolchain import triton_client
from tasks.toolchain.model_repository import Repository, clear_leftovers, commit_config, models_of

LOAD_SECONDS = 120.0
"""A load that takes longer counts as failed; what was loaded before goes on serving."""

Check = Callable[[Replica, int], None]
"""Asks a moved server whether it does what it should, or raises; it is told which one in order it is, from 0."""


def roll_out(
    candidate: Candidate,
    *,
    repository: Repository,
    committed: str | None,
    target: DeployTarget,
    check: Check,
    listener: Listener,
    load_seconds: float = LOAD_SECONDS,
) -> Sequence[Replica]:
    """Bring every server to the candidate and let `check` ask it; then commit the config.

    `committed` is the text of `config.pbtxt` as it was observed. Raises `NotReady`, `GateFailed` or `CommandFailed`
    when a server does not follow; those already moved serve `committed` again then.
    """
    folder = repository.folder(candidate.model)
    others = [model for model in models_of(repository) if model != candidate.model]
    # A champion that is replaced anyway is not loaded first: it may be the very reason for the new release.
    first = [candidate.model] if committed == candidate.config else []
    replicas = target.ensure([*others, *first], listener)
    require_reachable(replicas)
    moved: list[Replica] = []
    try:
        for index, replica in enumerate(replicas):
            if disagreements(replica.address, candidate):
                clear_leftovers(folder)
                moved.append(replica)
                target.move(replica, candidate.model, candidate.config, timeout=load_seconds)
            check(replica, index)
        commit_config(folder, candidate.config, replacing=committed)
    except BaseException:
        for replica in reversed(moved):
            _move_back(target, replica, candidate.model, committed, listener, load_seconds)
        raise
    return replicas


def require_reachable(replicas: Sequence[Replica]) -> None:
    """Raise `NotReady` naming those that do not answer, before any other is moved."""
    silent = [replica for replica in replicas if not triton_client.server_live(replica.address)]
    if silent:
        names = ", ".join(f"{replica.name} at {replica.address.http_url}" for replica in silent)
        raise NotReady(
            f"{len(silent)} of {len(replicas)} servers do not answer: {names}\n"
            "nothing was moved; bring them back, or take them out of the pipeline file's `deploy`, and run again"
        )


def _move_back(
    target: DeployTarget, replica: Replica, model: str, committed: str | None, listener: Listener, load_seconds: float
) -> None:
    where = replica.address.http_url
    try:
        target.move(replica, model, committed, timeout=load_seconds)
    except EnginehouseError as error:  # the first failure is the one to report; this one is told beside it
        note(listener, f"{where} could not be moved back to the champion: {error}\n`enginehouse releases repair` will")
    else:
        note(listener, f"{where} serves what it served before")
