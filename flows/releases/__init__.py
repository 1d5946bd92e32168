"""What `enginehouse releases` does: looks at what was released, and moves what is served. No Prefect, no torch.

`open_desk` finds out whose releases are meant. Then, a module for each purpose: `moving` promotes and rolls back,
`repairing` brings together what a death left apart, `showing` lists and describes, `keeping` pins and retains,
`shadowing` compares a candidate with the champion, `packing` makes an image or manifests of a release, and `fit` asks
whether a server could load the engine at all. The command line of it is `flows/cli/releases.py`; the Prefect flows
are in `flows/release_flows.py`.
"""

from flows.releases.desk import Desk, open_desk, pipelines_with_releases
from flows.releases.fit import refuse_unfit, refuse_unfit_plan
from flows.releases.keeping import retain, set_pin
from flows.releases.moving import candidate_of, promote, roll_back
from flows.releases.packing import bake, render
from flows.releases.repairing import repair
from flows.releases.shadowing import shadow
from flows.releases.showing import describe, listing, merged_metrics, trained_on

__all__ = [
    "Desk",
    "bake",
    "candidate_of",
    "describe",
    "listing",
    "merged_metrics",
    "open_desk",
    "pipelines_with_releases",
    "promote",
    "refuse_unfit",
    "refuse_unfit_plan",
    "render",
    "repair",
    "retain",
    "roll_back",
    "set_pin",
    "shadow",
    "trained_on",
]
