"""`enginehouse init`: a new pipeline's folder from the template."""

from __future__ import annotations

import re
from pathlib import Path

from tasks.config.names import check_name
from tasks.errors import ConfigError, Problem, Refused, StoreUnusable

TEMPLATE = Path(__file__).parent / "template"
FILES = {
    "pipeline.yaml": "pipeline.yaml",
    "prefect.yaml": "prefect.yaml",
    "recipe.py": "recipe.py",
    "test_recipe.py": "test_recipe.py.txt",  # it imports a module `recipe`, which is there only beside the recipe
    "README.md": "README.md",
    ".gitignore": "gitignore",  # without its dot, so that it means nothing to this repository's tools
}
"""What a new folder holds, and the template's file for it."""
_NAME_IN_TEMPLATE = re.compile(r"\bmy-model\b")


def init(folder: Path, name: str | None = None) -> tuple[Path, ...]:
    """Write the files of a new pipeline into a folder that is empty or not there, and return them.

    The name is the folder's if none is given. Raises `ConfigError` for a name that is no pipeline name, `Refused` if
    the folder holds something, and `StoreUnusable` if it cannot be written; nothing is written then.
    """
    folder = folder.absolute()
    name = folder.name if name is None else name
    try:
        check_name(name)
    except ValueError as error:
        raise ConfigError(Problem(str(error), field="name", hint="such as my-model")) from None
    texts = {
        file: _NAME_IN_TEMPLATE.sub(name, (TEMPLATE / template).read_text(encoding="utf-8"))
        for file, template in FILES.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if found := sorted(path.name for path in folder.iterdir()):
            raise Refused(f"{folder} is not empty, it holds {', '.join(found[:3])}: name a folder that is not there")
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise Refused(f"{error.filename} is a file: name a folder that is not there") from error
    except OSError as error:
        raise StoreUnusable(f"{folder} cannot be written: {error.strerror}") from error
    return tuple(folder / file for file in FILES)
