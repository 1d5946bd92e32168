"""`enginehouse init`: a new pipeline's folder from the template."""

from __future__ import annotations

from pathlib import Path


def init(folder: Path, name: str) -> tuple[Path, ...]:
    """Write the files of a new pipeline into a folder that is empty or not there, and return them.

    `Refused` if the folder holds something, `ConfigError` for a name that is no pipeline name.
    """
    raise NotImplementedError
