"""NVIDIA's perf_analyzer: found, and tried, since its builds ask for libraries that are not everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tasks.errors import ToolMissing

VARIABLE = "ENGINEHOUSE_PERF_ANALYZER"


def find() -> Path | None:
    """The program that $ENGINEHOUSE_PERF_ANALYZER names, or else the one on the path, if it runs here.

    Raises `ToolMissing` where the variable names one that does not run.
    """
    named = os.environ.get(VARIABLE)
    found = named or shutil.which("perf_analyzer")
    if found is None:
        return None
    try:
        ended = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=20)
        why = None if ended.returncode == 0 else ended.stderr.strip() or f"it ends with status {ended.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why is None:
        return Path(found).absolute()
    if named is None:
        return None
    mend = f"mend or unset ${VARIABLE}; see docs/releases.md"
    raise ToolMissing(f"perf_analyzer ({named})", why=f"it does not run: {why}", mend=mend)


def missing() -> ToolMissing:
    """What to raise where it is asked for and there is none."""
    return ToolMissing(
        "perf_analyzer",
        why="`gates.load.tool` asks for it, and there is none on the path that runs here",
        mend=f"name it in ${VARIABLE}, or take `gates.load.tool: own`; see docs/releases.md",
    )
