"""What `enginehouse releases` does: looks at what was released, and moves what is served. No Prefect, no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tasks import deploy, publish, verify
from tasks.artifacts.digest import Digest
from tasks.artifacts.store import ArtifactStore
from tasks.config import Pipeline
from tasks.engines import kind_of
from tasks.errors import ConfigError, NotReady, Problem, Refused
from tasks.events import Listener, note
from tasks.home import Home, find_home
from tasks.pipeline_file import load
from tasks.releases import (
    RELEASE,
    Action,
    Release,
    Standing,
    pin,
    point_aliases,
    record_promotion,
    standing,
    superfluous,
    unpin,
)
from tasks.served import Candidate, Verification, compare_answers, disagreements
from tasks.targets import DeployTarget, Replica, target_of
from tasks.toolchain import triton_client
from tasks.toolchain.provenance import Origin, Provenance

FILES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class Desk:
    """One pipeline's releases, and all that it takes to act on them."""

    home: Home
    store: ArtifactStore
    name: str
    named: Release | None
    """The release that was named, where one was."""
    given: Pipeline | None
    """The pipeline, where its file was given."""
    listener: Listener

    @property
    def standing(self) -> Standing:
        """As it is now; read anew each time."""
        return standing(self.store, self.name)

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline: as given, else as the named or else the newest release was made from. Raises `ConfigError`."""
        if self.given is not None:
            return self.given
        release = self.named or self.standing.champion or self.standing.releases[-1]
        file = release.pipeline_file
        if file is None or not file.is_file():
            raise ConfigError(
                Problem(f"{release.ref} was made from {file}, which is gone", hint="name the pipeline file instead")
            )
        return load(file, release.overrides)

    @cached_property
    def target(self) -> DeployTarget:
        """Where the pipeline is served."""
        return target_of(self.pipeline, self.home)

    def release(self, text: str | None) -> Release:
        """The release that `text` names (`digits/release@3`, or its number alone). Raises `ConfigError`."""
        if text is None:
            assert self.named is not None
            return self.named
        name = f"{self.name}/{RELEASE}@{text}" if text.isdecimal() else text
        ref = self.store.resolve(name)
        found = self.standing.of(ref.record)
        if found is None:
            raise ConfigError(Problem(f"{text} is no release of {self.name}", hint=_known(self.standing)))
        return found


def open_desk(text: str | None, *, overrides: Sequence[str] = (), home: Path | None = None, listener: Listener) -> Desk:
    """Find out whose releases are meant: `text` is a pipeline file, a pipeline's name, a release's name, or nothing.

    Raises `ConfigError` where that names nothing, or where nothing is named and there are several.
    """
    given = None
    if text is not None and text.endswith(FILES):
        given = load(Path(text), overrides)
        room = find_home(given.folder) if home is None else Home(home.absolute())
    else:
        room = find_home(Path.cwd()) if home is None else Home(home.absolute())
    if not room.store.is_dir():
        raise ConfigError(f"there is no store at {room.store}: run a pipeline first, or name the folder with --home")
    store = ArtifactStore.open(room.store, warn=lambda line: note(listener, line))
    pipelines = sorted({ref.pipeline for ref, _ in store.list(None, RELEASE)})
    if given is not None:
        name = given.name
    elif text is not None:
        name = text.partition("/")[0].partition("@")[0]
    elif len(pipelines) == 1:
        (name,) = pipelines
    else:
        released = ", ".join(pipelines) or "none was released yet"
        raise ConfigError(Problem("which pipeline is meant?", hint=f"name one of: {released}"))
    if name not in pipelines:
        released = ", ".join(pipelines) or "none was released yet"
        raise ConfigError(Problem(f"{name} has no release", hint=f"there are releases of: {released}"))
    desk = Desk(home=room, store=store, name=name, named=None, given=given, listener=listener)
    if given is None and text is not None and text != name:
        return Desk(home=room, store=store, name=name, named=desk.release(text), given=None, listener=listener)
    return desk


def pipelines_with_releases(home: Home, listener: Listener) -> list[str]:
    """The names of all pipelines that have released something."""
    if not home.store.is_dir():
        return []
    store = ArtifactStore.open(home.store, warn=lambda line: note(listener, line))
    return sorted({ref.pipeline for ref, _ in store.list(None, RELEASE)})


def promote(desk: Desk, *, reason: str | None = None) -> dict[str, Any]:
    """Make the named release, or the candidate, the champion; the live servers are asked the whole test data."""
    now = desk.standing
    release = desk.named or now.candidate
    if release is None:
        champion = now.champion
        if champion is not None and _settled(desk, champion) is not None:
            return _report(desk, "unchanged", champion)
        release = champion
    if release is None:
        raise Refused(f"{desk.name} has no candidate to promote\n{_known(now)}")
    return _move(desk, release, "promote", measure=True, reason=reason)


def roll_back(desk: Desk, *, to: str | None = None, reason: str | None = None) -> dict[str, Any]:
    """Go back to the champion before the champion, or to the release `to`: its versions and its config, to the byte.

    It was proven before it was released, so the live servers are asked the golden answers only: seconds.
    """
    now = desk.standing
    release = desk.release(to) if to is not None else desk.named or now.previous
    if release is None:
        raise Refused(f"{desk.name} has no champion before the present one to go back to\n{_known(now)}")
    return _move(desk, release, "roll back", measure=False, reason=reason)


def set_pin(desk: Desk, *, remove: bool = False) -> dict[str, Any]:
    """Keep the named release's versions in the repository whatever `publish.keep` says, or stop doing so."""
    release = desk.named or desk.standing.champion
    if release is None:
        raise Refused(f"{desk.name} has no champion; name the release to pin\n{_known(desk.standing)}")
    changed = unpin(desk.store, release) if remove else pin(desk.store, release)
    state = ("unpinned" if remove else "pinned") if changed else "unchanged"
    return {"pipeline": desk.name, "state": state, "release": str(release.ref)}


def repair(desk: Desk) -> dict[str, Any]:
    """Bring together what a process that died has left apart. What `config.pbtxt` says is what is right.

    A promotion that had not come to replace it is undone, on every server; one that had is completed.
    """
    done: list[str] = []
    pipeline, model = desk.pipeline, desk.pipeline.model
    with deploy.release_lock(desk.home, pipeline.repository, model):
        observed = _observe(desk)
        done += [f"cleared {name}" for name in publish.clear_leftovers(observed.folder)]
        if observed.config is None:
            for replica in desk.target.observe():
                if triton_client.server_live(replica.address) and triton_client.ready_versions(replica.address, model):
                    triton_client.unload(replica.address, model, log=replica.log)
                    done.append(f"{replica.address.http_url} serves {model} no more, which was never released")
            return _repaired(desk, None, done)
        release = _release_on_disk(desk, observed.config)
        done += _restore(desk, release)
        candidate = candidate_of(desk.store, release)
        replicas = desk.target.observe()
        apart = [replica for replica in replicas if _unlike(replica, candidate)]
        now = desk.standing
        recorded = now.champion is not None and now.champion.ref == release.ref
        missing = desk.target.size - len(replicas)
        if apart or missing or not recorded:
            live, replicas = _bring(desk, release, observed.config, measure=False)
            done += [f"{replica.address.http_url} serves {release.ref} again" for replica in apart]
            done += [f"started what was missing of {desk.target.size} servers"] if missing else []
            if not recorded:
                record_promotion(desk.store, release, action="repair", live=live, replicas=replicas)
                done.append(f"recorded that {release.ref} is the champion")
        before = desk.store.aliases(desk.name)
        point_aliases(desk.store, desk.name)
        if desk.store.aliases(desk.name) != before:
            done.append("pointed the aliases at what the history says")
        done += retain(desk.store, pipeline, desk.listener)
    return _repaired(desk, release, done)


def bake(desk: Desk, tag: str, *, base: str, push: bool) -> dict[str, Any]:
    """Make an image that holds the server and the named release, or the champion: one immutable unit."""
    from tasks.targets import docker_image

    now = desk.standing
    release = desk.named or now.champion
    if release is None:
        raise Refused(f"{desk.name} has no champion; name the release\n{_known(now)}")
    engines = {version: _origin(desk, release, version).record.materials["engine"] for version in release.versions}
    baked = docker_image.bake(
        tag,
        base=base,
        model=release.model,
        config=release.config(desk.store),
        versions={v: partial(desk.store.materialise, engine.content) for v, engine in engines.items()},
        labels={
            "release": str(release.ref),
            "record": str(release.ref.record),
            "config": release.config_digest,
            **{f"version.{version}": str(engine.content) for version, engine in engines.items()},
        },
        push=push,
    )
    return {
        "pipeline": desk.name,
        "release": str(release.ref),
        "image": baked.tag,
        "id": baked.id,
        "digest": baked.digest,
    }


def shadow(desk: Desk, *, requests: Path | None = None) -> dict[str, Any]:
    """Replay requests to the champion and to the named release or the candidate, on a staging server."""
    now = desk.standing
    champion, release = now.champion, desk.named or now.candidate
    if champion is None:
        raise Refused(f"{desk.name} has no champion to compare with\n{_known(now)}")
    if release is None or champion.version not in release.versions or champion.version == release.version:
        raise Refused(
            f"{desk.name} has no candidate that lists the champion's version {champion.version} beside its own\n"
            f"run the pipeline with --until publish to make one; {_known(now)}"
        )
    if requests is not None and not requests.is_file():
        raise ConfigError(Problem(f"{requests} does not exist", hint="name a file with one request a line"))
    candidate = candidate_of(desk.store, release)
    engine = release.record.materials["engine"]
    with verify.staged(
        candidate,
        target=desk.target,
        home=desk.home,
        model_folder=_observe(desk).folder,
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


def render(desk: Desk, image: str, *, replicas: int, gpus: int, kserve: bool, canary_percent: int | None) -> str:
    """Write Kubernetes manifests for the named release, or the champion, baked into `image`."""
    from tasks.targets import kubernetes

    now = desk.standing
    release = desk.named or now.champion
    if release is None:
        raise Refused(f"{desk.name} has no champion; name the release\n{_known(now)}")
    unit = kubernetes.Unit(
        name=kubernetes.object_name(release.model),
        image=image,
        model=release.model,
        version=release.version,
        release=str(release.ref),
        record=str(release.ref.record),
        config=release.config(desk.store),
        replicas=replicas,
        gpus=gpus,
    )
    objects = (
        kubernetes.inference_service(unit, canary_percent=canary_percent) if kserve else kubernetes.manifests(unit)
    )
    return kubernetes.to_yaml(objects)


def listing(desk: Desk) -> list[dict[str, Any]]:
    """Every release of the pipeline, oldest first."""
    now = desk.standing
    rows = []
    for release in now.releases:
        last = now.last_promotion(release)
        rows.append(
            {
                "release": str(release.ref),
                "state": now.state(release),
                "pinned": release.ref.record in now.pinned,
                "model": release.model,
                "version": release.version,
                "versions": list(release.versions),
                "repository": str(release.repository),
                "verified": release.record.finished,
                "promoted": None if last is None else last.record.finished,
                "by": None if last is None else last.record.actor,
                "override": release.override,
                "metrics": merged_metrics(release, now),
            }
        )
    return rows


def describe(desk: Desk) -> dict[str, Any]:
    """What exactly a release is, from which data and code, proven by which numbers, and who promoted it when."""
    now = desk.standing
    release = desk.named or now.champion or now.candidate
    if release is None:
        raise Refused(f"{desk.name} has no champion\n{_known(now)}")
    record = release.record
    engine, train = record.materials["engine"], _trained(desk.store, release)
    return {
        "release": str(release.ref),
        "record": str(release.ref.record),
        "state": now.state(release),
        "pinned": release.ref.record in now.pinned,
        "model": release.model,
        "version": release.version,
        "versions": list(release.versions),
        "repository": str(release.repository),
        "config": release.config(desk.store),
        "materials": {name: str(material.content) for name, material in record.materials.items()},
        "engine": [
            {"path": file.path, "size": file.size, "digest": str(file.digest)}
            for file in desk.store.content(engine.content).files
        ],
        "data": None if train is None else train.get("data"),
        "code": None if train is None else train.get("code"),
        "environment": None if train is None else train.get("environment"),
        "metrics": merged_metrics(release, now),
        "slices": record.details.get("slices", {}),
        "gates": record.details["gates"],
        "override": release.override,
        "verified": {"at": record.finished, "by": record.actor},
        "history": [
            {
                "action": step.action,
                "at": step.record.finished,
                "by": step.record.actor,
                "reason": step.reason,
                "servers": step.record.details["servers"],
            }
            for step in now.history
            if step.release == release.ref.record
        ],
        "pipeline_file": str(release.pipeline_file),
        "overrides": list(release.overrides),
    }


def merged_metrics(release: Release, now: Standing) -> dict[str, dict[str, float]]:
    """Per metric, per runtime: what was measured on staging, and on the live server when it was promoted."""
    merged = {name: dict(values) for name, values in release.metrics.items()}
    for step in now.history:
        if step.release == release.ref.record:
            for name, value in step.metrics.items():
                merged.setdefault(name, {})["live"] = value
    return merged


def candidate_of(store: ArtifactStore, release: Release) -> Candidate:
    """What a server has to show that serves the release; the metric is not measured again."""
    return Candidate(
        model=release.model,
        version=release.version,
        config=release.config(store),
        validation=store.path(release.record.materials["validate"].content),
        expected={name: values["staging"] for name, values in release.metrics.items() if "staging" in values},
    )


def retain(store: ArtifactStore, pipeline: Pipeline, listener: Listener) -> list[str]:
    """Remove the versions that only releases beyond `publish.keep` need; what was done, in words."""
    observed = publish.observe(publish.Repository(pipeline.repository), pipeline.model)
    gone = superfluous(
        standing(store, pipeline.name),
        model=pipeline.model,
        repository=pipeline.repository,
        keep=pipeline.publish.keep,
        listed=observed.listed,
        there=tuple(observed.versions),
    )
    if not gone:
        return []
    publish.remove_versions(observed, gone)
    text = f"removed version {', '.join(map(str, gone))} of {pipeline.model} from the repository (publish.keep)"
    note(listener, text)
    return [text]


def refuse_unfit(store: ArtifactStore, pipeline: Pipeline, name: str, engine: Digest, target: DeployTarget) -> None:
    """Raise `Refused` when the target's servers cannot load the engine, before anything is copied or started."""
    details = store.get_record(engine).details
    _refuse(f"{name} does not fit the server; nothing was copied", kind_of(pipeline).unfit(details, target.facts()))


def refuse_unfit_plan(pipeline: Pipeline, target: DeployTarget) -> None:
    """Raise `Refused` when the engine that the pipeline file describes would not fit, before an hour of training."""
    kind = kind_of(pipeline)
    if (details := kind.expected(pipeline)) is not None:
        what = f"the engine of {pipeline.name} would not fit the server; nothing was run"
        _refuse(what, kind.unfit(details, target.facts()))


def _refuse(what: str, unfit: Sequence[str]) -> None:
    if unfit:
        raise Refused(
            f"{what}:\n"
            + "\n".join(f"  {reason}" for reason in unfit)
            + "\nbuild it for what serves (engine.target, engine.compute_capability), or serve with what it is for"
        )


def _move(desk: Desk, release: Release, action: Action, *, measure: bool, reason: str | None) -> dict[str, Any]:
    pipeline = desk.pipeline
    if (release.model, release.repository) != (pipeline.model, pipeline.repository.resolve()):
        raise Refused(
            f"{release.ref} is of model {release.model} in {release.repository}, but the pipeline file says model "
            f"{pipeline.model} in {pipeline.repository.resolve()}\nmend the pipeline file, or name another release"
        )
    with deploy.release_lock(desk.home, pipeline.repository, pipeline.model):
        now = desk.standing
        observed = _observe(desk)
        candidate = candidate_of(desk.store, release)
        champion = now.champion is not None and now.champion.ref == release.ref
        if champion and observed.config == candidate.config and _settled(desk, release) is not None:
            return _report(desk, "unchanged", release)
        if why := observed.made_by_hand:
            raise Refused(f"{observed.folder} is a model made by hand ({why}), and stays as it is")
        engine = release.record.materials["engine"].record
        refuse_unfit(desk.store, pipeline, str(release.ref), engine, desk.target)
        _restore(desk, release)
        live, replicas = _bring(desk, release, observed.config, measure=measure)
        if not champion:
            record_promotion(desk.store, release, action=action, live=live, replicas=replicas, reason=reason)
        retain(desk.store, pipeline, desk.listener)
    return _report(desk, {"promote": "promoted", "roll back": "rolled back"}[action], release, replicas)


def _bring(
    desk: Desk, release: Release, committed: str | None, *, measure: bool
) -> tuple[Verification, Sequence[Replica]]:
    return deploy.move(
        desk.pipeline,
        candidate_of(desk.store, release),
        committed=committed,
        target=desk.target,
        home=desk.home,
        listener=desk.listener,
        measure=measure,
        override=release.override,
    )


def _restore(desk: Desk, release: Release) -> list[str]:
    """Put back the versions of a release that are not in the repository any more, or damaged, out of the store."""
    observed = _observe(desk)
    done = []
    for version in release.versions:
        if version in observed.versions:
            continue
        if version in observed.there and version not in observed.damaged:
            raise Refused(
                f"{observed.folder / str(version)}, which {release.ref} lists, was made by somebody else\n"
                "move it away, or promote another release"
            )
        origin = _origin(desk, release, version)
        engine = origin.record.materials["engine"]
        config = origin.record.materials["triton_config"]
        provenance = Provenance(
            pipeline=desk.name,
            model=release.model,
            version=version,
            engine=Origin(name=_name(desk.store, engine.record), content=engine.content, record=engine.record),
            config=Origin(name=_name(desk.store, config.record), content=config.content, record=config.record),
            files=(),
            created=origin.record.finished,
            actor=origin.record.actor,
        )
        publish.restore_version(
            observed,
            version,
            provenance,
            desk.store.content(engine.content).files,
            partial(desk.store.materialise, engine.content),
        )
        done.append(f"put version {version} of {release.model} back into the repository")
        note(desk.listener, done[-1])
    return done


def _origin(desk: Desk, release: Release, version: int) -> Release:
    """The release that made a version; another one may list it."""
    own = [r for r in desk.standing.releases if (r.version, r.repository) == (version, release.repository)]
    if not own:
        raise Refused(
            f"{release.ref} lists version {version} of {release.model}, which no release of {desk.name} made\n"
            "promote another release"
        )
    return own[-1]


def _name(store: ArtifactStore, record: Any) -> str:
    found = store.get_record(record)
    named = [ref for ref, _ in store.list(found.pipeline, found.stage) if ref.record == record]
    return str(named[0]) if named else f"{found.pipeline}/{found.stage}"


def _observe(desk: Desk) -> publish.ModelFolder:
    return publish.observe(publish.Repository(desk.pipeline.repository), desk.pipeline.model)


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


def _settled(desk: Desk, release: Release) -> Sequence[Replica] | None:
    try:
        return deploy.settled(candidate_of(desk.store, release), target=desk.target)
    except NotReady:
        return None


def _report(desk: Desk, state: str, release: Release, replicas: Sequence[Replica] | None = None) -> dict[str, Any]:
    now = desk.standing
    found = desk.target.observe() if replicas is None else replicas
    return {
        "pipeline": desk.name,
        "state": state,
        "release": str(release.ref),
        "model": release.model,
        "version": release.version,
        "versions": list(release.versions),
        "previous": None if now.previous is None else str(now.previous.ref),
        "servers": [replica.address.http_url for replica in found],
        "metrics": merged_metrics(release, now),
    }


def _repaired(desk: Desk, release: Release | None, done: Sequence[str]) -> dict[str, Any]:
    return {
        "pipeline": desk.name,
        "state": "repaired" if done else "unchanged",
        "release": None if release is None else str(release.ref),
        "done": list(done),
        "servers": [replica.address.http_url for replica in desk.target.observe()],
    }


def _trained(store: ArtifactStore, release: Release) -> Mapping[str, Any] | None:
    """The key of the training that the release's engine comes from."""
    record = store.get_record(release.record.materials["validate"].record)
    trained = record.materials.get("train")
    key = None if trained is None else store.get_record(trained.record).key
    return None if key is None else key.to_json()


def _known(now: Standing) -> str:
    names = ", ".join(f"{r.ref} ({now.state(r)})" for r in now.releases)
    return f"there are: {names}" if names else "nothing was released yet"
