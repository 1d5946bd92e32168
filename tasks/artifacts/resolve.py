"""From what a person types to an artifact, with the nearest name when there is none."""

from __future__ import annotations

import difflib
import re

from tasks.artifacts.graph import corruption
from tasks.artifacts.layout import is_name
from tasks.artifacts.ledger import Lost
from tasks.artifacts.names import Name
from tasks.artifacts.record import ArtifactRef
from tasks.artifacts.vault import Vault
from tasks.errors import ConfigError, Problem

_FORMS = "pipeline/stage@number, pipeline/stage (the last one), pipeline@alias or sha256:… is expected"
_NUMBERED = re.compile(r"[^/@]+/[^/@]+@\d+")
_DIGEST = re.compile(r"sha256:([0-9a-f]{8,64})")


def resolve(vault: Vault, text: str) -> ArtifactRef:
    """The artifact that `text` names, pinned. Raises ConfigError when there is none, ArtifactCorrupt for a lost one."""
    try:
        ref = _find(vault, text)
        vault.pins.pin("record", ref.record)
        vault.ledger.record(ref.record)
    except Lost as lost:
        raise corruption(vault, [lost.fault]) from None
    return ref


def last(vault: Vault, pipeline: str, stage: str) -> Name | None:
    """The name with the highest number that is not retired; raises Lost for a damaged one."""
    for number in reversed(vault.names.numbers(pipeline, stage)):
        name = vault.names.read(pipeline, stage, number)
        if name is not None and name.retired is None:
            return name
    return None


def numbered(vault: Vault, text: str) -> ArtifactRef:
    """What `pipeline/stage@number` stands for, also when that is lost. Raises as `resolve`."""
    if not _NUMBERED.fullmatch(text):
        raise ConfigError(Problem(f"{text!r} is no artifact's name: pipeline/stage@number is expected"))
    return _find(vault, text)


def _find(vault: Vault, text: str) -> ArtifactRef:
    if match := _DIGEST.fullmatch(text):
        return _by_digest(vault, text, match[1])
    name, at, version = text.partition("@")
    pipeline, slash, stage = name.partition("/")
    well_formed = is_name(pipeline) and (is_name(stage) if slash else at) and (is_name(version) if at else True)
    if not well_formed or (slash and at and not version.isdecimal()):
        raise ConfigError(Problem(f"{text!r} is no artifact's name: {_FORMS}", hint=_near(vault, text)))
    if not slash:
        found = vault.names.alias(pipeline, version)
    elif not at:
        newest = last(vault, pipeline, stage)
        found = None if newest is None else newest.ref
    else:
        named = vault.names.read(pipeline, stage, int(version))
        if named is not None and named.retired is not None:
            raise ConfigError(Problem(f"{text} was removed at {named.retired}", hint=_near(vault, name)))
        found = None if named is None else named.ref
    if found is None:
        raise ConfigError(Problem(f"there is no {text} in this store", hint=_near(vault, text)))
    return found


def _by_digest(vault: Vault, text: str, digits: str) -> ArtifactRef:
    names = [name.ref for name in vault.names.all()[0] if name.retired is None]
    found = [ref for ref in names if ref.record.hex.startswith(digits)] or [
        ref for ref in names if ref.content.hex.startswith(digits)
    ]
    if len({(ref.record if ref.record.hex.startswith(digits) else ref.content) for ref in found}) > 1:
        raise ConfigError(Problem(f"{text} begins several digests", hint=f"such as {', '.join(map(str, found[:3]))}"))
    if not found:
        raise ConfigError(Problem(f"no record and no content in this store begins with {text}"))
    return found[-1]


def _near(vault: Vault, text: str) -> str | None:
    refs = [name.ref for name in vault.names.all()[0] if name.retired is None]
    known = (
        {f"{ref.pipeline}/{ref.stage}" for ref in refs} | {str(ref) for ref in refs} | set(vault.names.all_aliases()[0])
    )
    near = difflib.get_close_matches(text, sorted(known), n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return "enginehouse artifacts ls lists what there is" if known else "the store is empty"
