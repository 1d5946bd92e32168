"""Stage `verify`: the exact release, the whole set of versions with the whole config, on a staging server first.

One listed version that cannot load blocks the whole load, and one config holds for all versions: so the set is what is
proven, before any server with traffic hears of it. Not keyed: what it says of is a server, not bytes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tasks.config import Pipeline
from tasks.errors import StoreUnusable
from tasks.events import Listener
from tasks.gates import require
from tasks.home import Home
from tasks.served import Candidate, Verification, compare_with_champion, verify_server
from tasks.targets import DeployTarget, Replica

STAGE = "verify"


def verify(
    pipeline: Pipeline,
    candidate: Candidate,
    *,
    target: DeployTarget,
    home: Home,
    model_folder: Path,
    source: Callable[[Path], None],
    listener: Listener,
    champion: int | None = None,
    override: str | None = None,
) -> Verification:
    """Serve the candidate, with what will be listed beside it, on a staging server and ask it everything.

    With `champion`, the version that is the champion now, the gates that compare with it are judged too: both answer on
    this server, the same data, in this run. Raises as `staged` does, and `GateFailed` when the candidate answers worse
    than allowed; nothing has changed then. `override` is as in `gates.require`.
    """
    with staged(candidate, target=target, home=home, model_folder=model_folder, source=source) as (server, folder):
        proven = verify_server(
            server.address,
            pipeline,
            candidate,
            runtime="staging",
            work=folder / "evaluation",
            log=folder / "evaluation.log",
            listener=listener,
            override=override,
        )
        if champion is None or champion == candidate.version or champion not in candidate.versions:
            return proven
        compared = compare_with_champion(
            server.address,
            pipeline,
            candidate,
            proven,
            champion=champion,
            work=folder / "comparison",
            log=folder / "comparison.log",
            listener=listener,
        )
        require(compared, consequence="the champion stays as it was", override=override)
        return replace(proven, gates=[*proven.gates, *compared])


@contextmanager
def staged(
    candidate: Candidate,
    *,
    target: DeployTarget,
    home: Home,
    model_folder: Path,
    source: Callable[[Path], None],
) -> Iterator[tuple[Replica, Path]]:
    """A staging server that serves the candidate's exact set of versions, and a folder that goes with it.

    `model_folder` holds the versions that stay listed; `source` writes the candidate's files into a new folder. Raises
    `NotReady` when the set does not load.
    """
    try:
        home.staging.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{candidate.model}-", dir=home.staging))
    except OSError as error:
        raise StoreUnusable(f"{home.staging} cannot be written: {error.strerror}") from error
    try:
        repository = folder / "repository"
        versions = repository / candidate.model
        versions.mkdir(parents=True)
        (versions / "config.pbtxt").write_text(candidate.config, encoding="utf-8")
        for version in candidate.versions:
            if version == candidate.version:
                source(versions / str(version))
            else:
                shutil.copytree(model_folder / str(version), versions / str(version))
        with target.staging(repository, candidate.model, folder) as server:
            yield server, folder
    finally:
        shutil.rmtree(folder)
