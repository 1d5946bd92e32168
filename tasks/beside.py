"""A candidate under a name of its own beside its champion, on a live server, for the time of a comparison.

Its folder in the model repository, `<model>-candidate`, holds nothing but a link to the version: no copy is made, and
without a `config.pbtxt` no server that starts again serves it. So a comparison that was killed leaves memory in use on
one server until `clear_beside`, and nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasks.errors import Refused, StoreUnusable
from tasks.served import Candidate
from tasks.targets import Replica
from tasks.toolchain import triton_client
from tasks.toolchain.config_pbtxt import parse, print_config
from tasks.toolchain.model_repository import Repository


def name_beside(model: str) -> str:
    """The name under which a candidate of `model` is served beside it."""
    return f"{model}-candidate"


@contextmanager
def served_beside(candidate: Candidate, *, repository: Repository, replica: Replica) -> Iterator[str]:
    """Load the candidate's version, which lies in the repository, on a live server; unload it at the end.

    Gives the name that it answers to. Raises `NotReady` when it does not load, `Refused` when a model of that name is
    there: both leave the champion as it is.
    """
    clear_beside(repository, candidate.model, [replica])
    name = name_beside(candidate.model)
    folder = repository.folder(name)
    if folder.exists():
        raise Refused(f"{folder} is a model of that name\nmove it away, or compare on a staging server")
    try:
        folder.mkdir()
        (folder / str(candidate.version)).symlink_to(Path("..") / candidate.model / str(candidate.version))
    except OSError as error:
        raise StoreUnusable(f"the model repository cannot be written: {error.strerror}: {error.filename}") from error
    try:
        config = parse(candidate.config)
        config.name = name
        config.version_policy.specific.versions[:] = [candidate.version]
        text = print_config(config, header="")
        triton_client.load(replica.address, name, config_text=text, log=replica.log)
        yield name
    finally:
        clear_beside(repository, candidate.model, [replica])


def clear_beside(repository: Repository, model: str, replicas: Sequence[Replica]) -> list[str]:
    """Unload a candidate that a comparison has left, and remove its folder; what was done, in words."""
    name, done = name_beside(model), []
    folder = repository.folder(name)
    if not _is_ours(folder, model):
        return []
    for replica in replicas:
        address = replica.address
        if triton_client.server_live(address) and triton_client.ready_versions(address, name):
            triton_client.unload(address, name, log=replica.log)
            done.append(f"{address.http_url} serves {name} no more, which a comparison has left")
    shutil.rmtree(folder)
    return [*done, f"removed {folder}"]


def _is_ours(folder: Path, model: str) -> bool:
    """Whether there is nothing in it but links to versions of the model, of which there is one."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    return all(entry.is_symlink() and entry.readlink() == Path("..") / model / entry.name for entry in folder.iterdir())
