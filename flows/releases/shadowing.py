"""Shadow comparison: the same requests to the champion and to a candidate beside it; nothing is promoted."""

from functools import partial
from pathlib import Path
from typing import Any

from flows.releases.desk import Desk, known
from flows.releases.moving import candidate_of
from tasks import verify
from tasks.errors import ConfigError, Problem, Refused
from tasks.served import compare_answers


def shadow(desk: Desk, *, requests: Path | None = None) -> dict[str, Any]:
    """Replay requests to the champion and to the named release or the candidate, on a staging server."""
    now = desk.standing
    champion, release = now.champion, desk.named or now.candidate
    if champion is None:
        raise Refused(f"{desk.name} has no champion to compare with\n{known(now)}")
    if release is None or champion.version not in release.versions or champion.version == release.version:
        raise Refused(
            f"{desk.name} has no candidate that lists the champion's version {champion.version} beside its own\n"
            f"run the pipeline with --until publish to make one; {known(now)}"
        )
    if requests is not None and not requests.is_file():
        raise ConfigError(Problem(f"{requests} does not exist", hint="name a file with one request a line"))
    candidate = candidate_of(desk.store, release)
    engine = release.record.materials["engine"]
    with verify.staged(
        candidate,
        target=desk.target,
        home=desk.home,
        model_folder=desk.observe().folder,
        source=partial(desk.store.materialise, engine.content),
    ) as (server, folder):
        found = compare_answers(
            server.address,
            desk.pipeline,
            candidate,
            champion=champion.version,
            requests=requests,
            work=folder / "shadow",
            log=folder / "shadow.log",
            listener=desk.listener,
        )
    names = {str(champion.version): "champion", str(release.version): "candidate"}
    return {
        "pipeline": desk.name,
        "champion": str(champion.ref),
        "candidate": str(release.ref),
        "requests": found["requests"],
        "outputs": found["outputs"],
        "latency": {names[version]: value for version, value in found["latency"].items()},
    }
