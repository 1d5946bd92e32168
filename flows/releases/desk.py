"""One pipeline's releases and all that it takes to act on them: where each command begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tasks import publish
from tasks.artifacts.store import ArtifactStore
from tasks.config import Pipeline
from tasks.errors import ConfigError, Problem
from tasks.events import Listener, note
from tasks.home import Home, find_home
from tasks.pipeline_file import load
from tasks.releases import RELEASE, Release, Standing, standing
from tasks.targets import DeployTarget, target_of

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

    def observe(self) -> publish.ModelFolder:
        """What lies in the model repository now."""
        return publish.observe(publish.Repository(self.pipeline.repository), self.pipeline.model)

    def release(self, text: str | None) -> Release:
        """The release that `text` names (`digits/release@3`, or its number alone). Raises `ConfigError`."""
        if text is None:
            assert self.named is not None
            return self.named
        name = f"{self.name}/{RELEASE}@{text}" if text.isdecimal() else text
        ref = self.store.resolve(name)
        found = self.standing.of(ref.record)
        if found is None:
            raise ConfigError(Problem(f"{text} is no release of {self.name}", hint=known(self.standing)))
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


def known(now: Standing) -> str:
    """The releases that there are, in words, for whoever named none or a wrong one."""
    names = ", ".join(f"{r.ref} ({now.state(r)})" for r in now.releases)
    return f"there are: {names}" if names else "nothing was released yet"
