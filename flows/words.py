"""How the command is called on this machine, for the lines that a person copies into the next one."""

import shutil
import sys
from pathlib import Path


def invoked() -> list[str]:
    """`enginehouse` where the shell finds this installation's command under that name, else the command's path."""
    ours = Path(sys.executable).with_name("enginehouse")
    found = shutil.which("enginehouse")
    if not ours.exists() or (found is not None and Path(found).samefile(ours)):
        return ["enginehouse"]
    return [str(ours)]
