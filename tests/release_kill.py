"""Promotes or rolls back in a lab, and dies by SIGKILL just before the step that is named.

release_kill.py ROOT promote|rollback RELEASE load|commit|record|history|aliases
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import release_lab

from tasks import releases, rollout
from tasks.artifacts.store import ArtifactStore


def die(*_args, **_options):
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    root, act, release, step = sys.argv[1:]
    lab = release_lab.Lab(Path(root))
    alias = ArtifactStore.alias

    def at_alias(store, pipeline, name, ref):
        if step == "history" or name != releases.HISTORY:
            die()
        alias(store, pipeline, name, ref)

    match step:
        case "load":
            rollout.triton_client.load = die
        case "commit":
            rollout.commit_config = die
        case "record":
            ArtifactStore.record = die
        case "history" | "aliases":
            ArtifactStore.alias = at_alias
    if act == "promote":
        lab.promote(lab.desk(release).named)
    else:
        lab.roll_back()


if __name__ == "__main__":
    main()
