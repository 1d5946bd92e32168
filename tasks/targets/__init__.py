"""Deploy targets: where a model is served. One module per kind, found by `deploy.kind` through entry points.

A kind is a class with the attributes of `DeployTarget`, named in the entry point group `enginehouse.deploy_targets`;
nothing else has to know of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, cast

from tasks.artifacts.digest import Digest
from tasks.config import DEPLOY_TARGETS, DeployConfig, Pipeline, load_kind
from tasks.engines.passport import ServerFacts
from tasks.events import Listener
from tasks.home import Home
from tasks.toolchain import triton_client
from tasks.toolchain.triton_client import Address


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One running server of a target."""

    name: str
    address: Address
    log: Path | None
    """The server's log, where this machine has it."""


class DeployTarget(Protocol):
    """What a kind of target provides. Loading models and judging the answers is the deploy stage's, for every kind."""

    Config: ClassVar[type[DeployConfig]]
    """The fields of the pipeline file's `deploy`."""

    def __init__(self, pipeline: Pipeline, home: Home) -> None: ...

    @property
    def size(self) -> int:
        """How many servers there should be."""

    @property
    def reads_repository(self) -> bool:
        """Whether its servers see the model repository, so that a load call can bring in whatever lies there."""

    def check(self) -> None:
        """Raise `ToolMissing` when this target cannot work here; called before anything is built."""

    def facts(self) -> ServerFacts:
        """Return what is known of the servers that this target has or would start, as far as an engine cares."""

    def observe(self) -> Sequence[Replica]:
        """Return the servers that run now. Cheap: a run in which nothing changed asks it too."""

    def plan(self) -> Sequence[str]:
        """What `ensure` would change, in words, a step each; empty where it would change nothing. Changes nothing."""

    def ensure(self, models: Sequence[str], listener: Listener) -> Sequence[Replica]:
        """Return ready servers; those that do not run yet are started, serving `models` as the repository says.

        Raises `NotReady` with the end of the server's log.
        """

    def move(self, replica: Replica, model: str, config: str | None, *, timeout: float) -> None:
        """Bring one server to what `config`, the text of a `config.pbtxt`, lists of the model; with `None`, to serve it
        no more. The versions lie in the repository. Raises `NotReady` when it does not follow within `timeout` seconds.
        """

    def staging(self, repository: Path, model: str, folder: Path) -> AbstractContextManager[Replica]:
        """A ready server of the same kind on another repository, which ends with the `with` and with us; its files and
        its log lie in `folder`. Raises `NotReady` when it does not load the model."""

    def clear_leftovers(self) -> Sequence[str]:
        """Remove what staging servers left whose makers were killed; what was done, in words."""

    def forget(self, model: str, versions: Mapping[int, Digest]) -> Sequence[str]:
        """Remove what is kept here of versions, given with their contents, that the model repository has no more; what
        was done, in words."""

    def stop(self) -> Sequence[Replica]:
        """End the servers and return those that ran."""


def load_call(replica: Replica, model: str, config: str | None, *, timeout: float) -> None:
    """The `move` of servers that read the model repository: a load call that carries the config, or an unload call."""
    if config is None:
        triton_client.unload(replica.address, model)
    else:
        triton_client.load(replica.address, model, config_text=config, log=replica.log, timeout=timeout)


def target_of(pipeline: Pipeline, home: Home) -> DeployTarget:
    """Return the pipeline's deploy target."""
    kind = cast("type[DeployTarget]", load_kind(DEPLOY_TARGETS, pipeline.deploy.kind))
    return kind(pipeline, home)
