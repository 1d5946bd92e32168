"""Shadow comparison: the same requests to the champion and to a candidate beside it; nothing is promoted."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from flows.releases.desk import Desk, known
from flows.releases.moving import candidate_of, restore
from tasks import deploy, publish, verify
from tasks.beside import served_beside
from tasks.errors import ConfigError, NotReady, Problem, Refused
from tasks.releases import Release
from tasks.served import compare_answers, disagreements
from tasks.targets import Replica


def shadow(desk: Desk, *, requests: Path | None = None, live: bool = False) -> dict[str, Any]:
    """Replay requests to the champion and to the named release or the candidate.

    On a staging server that serves both as versions of one model; or, with `live`, on the first server that is in use,
    beside whose champion the candidate is loaded under a name of its own.
    """
    now = desk.standing
    champion, release = now.champion, desk.named or now.candidate
    if champion is None:
        raise Refused(f"{desk.name} has no champion to compare with\n{known(now)}")
    if release is None or champion.version == release.version:
        raise Refused(f"{desk.name} has no candidate\nrun the pipeline with --until publish to make one; {known(now)}")
    if not live and champion.version not in release.versions:
        raise Refused(
            f"{release.ref} does not list the champion's version {champion.version} beside its own\n"
            "run the pipeline with --until publish to make one that does, or compare with --live"
        )
    if requests is not None and not requests.is_file():
        raise ConfigError(Problem(f"{requests} does not exist", hint="name a file with one request a line"))
    side_by_side = _on_live(desk, champion, release) if live else _on_staging(desk, release)
    with side_by_side as (server, beside, folder):
        found = compare_answers(
            server.address,
            desk.pipeline,
            candidate_of(desk.store, release),
            champion=champion.version,
            beside=beside,
            requests=requests,
            work=folder / "shadow",
            log=folder / "shadow.log",
            listener=desk.listener,
        )
    return {
        "pipeline": desk.name,
        "on": "live" if live else "staging",
        "champion": str(champion.ref),
        "candidate": str(release.ref),
        "requests": found["requests"],
        "outputs": found["outputs"],
        "latency": found["latency"],
    }


@contextmanager
def _on_staging(desk: Desk, release: Release) -> Iterator[tuple[Replica, str | None, Path]]:
    with verify.staged(
        candidate_of(desk.store, release),
        target=desk.target,
        home=desk.home,
        model_folder=desk.observe().folder,
        source=partial(desk.store.materialise, release.record.materials["engine"].content),
    ) as (server, folder):
        yield server, None, folder


@contextmanager
def _on_live(desk: Desk, champion: Release, release: Release) -> Iterator[tuple[Replica, str | None, Path]]:
    if not desk.target.reads_repository:
        raise Refused(
            "the servers hold what they serve, and see no model repository that a candidate could be loaded from "
            "(deploy.baked)\ncompare on a staging server, without --live"
        )
    repository = publish.Repository(desk.pipeline.repository)
    with (
        deploy.release_lock(desk.home, desk.pipeline.repository, desk.pipeline.model),
        tempfile.TemporaryDirectory() as folder,
    ):
        replicas = desk.target.observe()
        if not replicas:
            raise NotReady(f"no server of {desk.name} runs\n`enginehouse releases repair {desk.name}` starts it")
        if found := disagreements(replicas[0].address, candidate_of(desk.store, champion)):
            raise NotReady(
                f"{replicas[0].address.http_url} does not serve {champion.ref}: {'; '.join(found)}\n"
                f"`enginehouse releases repair {desk.name}` mends it"
            )
        restore(desk, release)
        with served_beside(candidate_of(desk.store, release), repository=repository, replica=replicas[0]) as name:
            yield replicas[0], name, Path(folder)
