"""Repair: brings together what a process that died has left apart."""

from collections.abc import Sequence
from typing import Any

from flows.releases.desk import Desk
from flows.releases.keeping import retain
from flows.releases.moving import bring, candidate_of, restore
from tasks import deploy, publish
from tasks.beside import clear_beside
from tasks.errors import NotReady, Refused
from tasks.releases import Release, point_aliases, record_promotion
from tasks.served import Candidate, disagreements
from tasks.targets import Replica
from tasks.toolchain import triton_client


def repair(desk: Desk) -> dict[str, Any]:
    """Bring together what a process that died has left apart. What `config.pbtxt` says is what is right.

    A promotion that had not come to replace it is undone, on every server; one that had is completed.
    """
    done: list[str] = []
    pipeline, model = desk.pipeline, desk.pipeline.model
    with deploy.release_lock(desk.home, pipeline.repository, model):
        done += clear_beside(publish.Repository(pipeline.repository), model, desk.target.observe())
        observed = desk.observe()
        done += desk.target.clear_leftovers()
        done += [f"cleared {name}" for name in publish.clear_leftovers(observed.folder)]
        if observed.config is None:
            for replica in desk.target.observe():
                if triton_client.server_live(replica.address) and triton_client.ready_versions(replica.address, model):
                    triton_client.unload(replica.address, model, log=replica.log)
                    done.append(f"{replica.address.http_url} serves {model} no more, which was never released")
            return _repaired(desk, None, done)
        if observed.owner not in (None, desk.name):
            raise Refused(
                f"{observed.folder} is the model of pipeline {observed.owner}, not of {desk.name}\n"
                f"`enginehouse releases repair {observed.owner}` repairs it"
            )
        release = _release_on_disk(desk, observed.config)
        done += restore(desk, release)
        candidate = candidate_of(desk.store, release)
        replicas = desk.target.observe()
        apart = [replica for replica in replicas if _unlike(replica, candidate)]
        now = desk.standing
        recorded = now.champion is not None and now.champion.ref == release.ref
        missing = desk.target.size - len(replicas)
        if apart or missing or not recorded:
            live, replicas = bring(desk, release, observed.config, measure=False)
            done += [f"{replica.address.http_url} serves {release.ref} again" for replica in apart]
            done += [f"started what was missing of {desk.target.size} servers"] if missing else []
            if not recorded:
                record_promotion(desk.store, release, action="repair", live=live, replicas=replicas)
                done.append(f"recorded that {release.ref} is the champion")
        before = desk.store.aliases(desk.name)
        point_aliases(desk.store, desk.name)
        if desk.store.aliases(desk.name) != before:
            done.append("pointed the aliases at what the history says")
        done += retain(desk.store, pipeline, desk.target, desk.listener)
    return _repaired(desk, release, done)


def _release_on_disk(desk: Desk, config: str) -> Release:
    now = desk.standing
    own = [r for r in now.releases if r.config(desk.store) == config and r.model == desk.pipeline.model]
    if now.champion in own:
        assert now.champion is not None
        return now.champion
    if not own:
        folder = desk.pipeline.repository / desk.pipeline.model
        raise Refused(
            f"{folder}/config.pbtxt is that of no release of {desk.name}: somebody else published or edited it\n"
            "go back to a release with `enginehouse releases rollback --to`, or run the pipeline"
        )
    return own[-1]


def _unlike(replica: Replica, candidate: Candidate) -> bool:
    try:
        return bool(disagreements(replica.address, candidate))
    except NotReady:
        return True


def _repaired(desk: Desk, release: Release | None, done: Sequence[str]) -> dict[str, Any]:
    return {
        "pipeline": desk.name,
        "state": "repaired" if done else "unchanged",
        "release": None if release is None else str(release.ref),
        "done": list(done),
        "servers": [replica.address.http_url for replica in desk.target.observe()],
    }
