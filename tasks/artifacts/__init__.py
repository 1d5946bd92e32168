"""Immutable artifacts: what bytes there are, how they came to be, and what was asked.

A guided tour, from the bottom to the top:

- `digest.Digest` and `digest.canonical_json`: the one name of some bytes, and the one spelling of some JSON.
- `content.Content`: the files of a product by path, size and digest; its own digest is what keys are made of.
- `key.StageKey`: everything that decides a stage's product. `record.BuildRecord`: how a content came to be.
- `store.ArtifactStore`: keeps all three, and names records for people (`record.ArtifactRef`).

        store = ArtifactStore.open(home / "store")
        with store.claim(key, pipeline="digits") as claim:       # waits for another builder of the same key
            if claim.built is not None:
                return claim.built
            build_into(claim.product, checkpoints=claim.work)    # a crash here loses nothing in claim.work
            return claim.commit(materials={"train": trained}, metrics={"accuracy": 0.97})

How it holds together, each in a module that says why it is safe: `durable` (writes that are whole or not there),
`objects` (the bytes), `ledger` and `names` (what is written about them), `lease` and `claim` (one builder at a time),
`intake` (the order of a commit), `pins`, `needed` and `garbage` (gc beside running builds), `verify` and `graph`
(damage, and who it concerns). `vault.Vault` is what they share. The format on disk: docs/artifacts.md.
"""

from tasks.artifacts.claim import Claim
from tasks.artifacts.content import Content, FileEntry
from tasks.artifacts.digest import JSON, Digest, canonical_json, digest_of
from tasks.artifacts.garbage import Garbage
from tasks.artifacts.key import StageKey, differences
from tasks.artifacts.lineage import Lineage
from tasks.artifacts.record import RELEASE_STAGE, ArtifactRef, BuildRecord, Material
from tasks.artifacts.store import ArtifactStore
from tasks.artifacts.verify import Corrupt

__all__ = [
    "JSON",
    "RELEASE_STAGE",
    "ArtifactRef",
    "ArtifactStore",
    "BuildRecord",
    "Claim",
    "Content",
    "Corrupt",
    "Digest",
    "FileEntry",
    "Garbage",
    "Lineage",
    "Material",
    "StageKey",
    "canonical_json",
    "differences",
    "digest_of",
]
