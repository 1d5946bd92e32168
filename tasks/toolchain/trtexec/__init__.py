"""`trtexec`, TensorRT's command-line builder: its options per version, its command line, its output, its failures.

    options.py         which option each version has: a table with the source of every line
    command.py         the typed request, and the command line that it becomes
    extra_flags.py     which further arguments a pipeline file may give
    output.py          what a log says: the version, the outcome, sizes and times
    known_failures.py  the known failures, and how a log shows each
    failures.py        the typed errors that they become, with the mend
    plan_file.py       the header of a plan, readable without a GPU
    place.py           where it runs: a program on this machine, or inside NVIDIA's image

Nothing in here starts a process: the engine kind `tensorrt` does, through its stage.
"""

from tasks.toolchain.trtexec.command import (
    BuildRequest,
    OptimizationProfile,
    Precision,
    carried_by_graph,
    profile_of,
    shapes_text,
    trtexec_command,
)
from tasks.toolchain.trtexec.extra_flags import flag_problems
from tasks.toolchain.trtexec.options import (
    Option,
    Version,
    flag_problem,
    generation_problem,
    parse_version,
    version_text,
)
from tasks.toolchain.trtexec.output import TrtexecOutput, read_output
from tasks.toolchain.trtexec.plan_file import PlanHeader, read_plan_header

__all__ = [
    "BuildRequest",
    "OptimizationProfile",
    "Option",
    "PlanHeader",
    "Precision",
    "TrtexecOutput",
    "Version",
    "carried_by_graph",
    "flag_problem",
    "flag_problems",
    "generation_problem",
    "parse_version",
    "profile_of",
    "read_output",
    "read_plan_header",
    "shapes_text",
    "trtexec_command",
    "version_text",
]
