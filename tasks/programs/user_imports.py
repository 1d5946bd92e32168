"""Imports from the recipe's folder: first on the path, and always from the source that lies there."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType


class SourceOnlyLoader(SourceFileLoader):
    """Reads and writes no bytecode.

    Python takes a cached file for current if size and whole second of change agree, so an edit within a second of the
    last run would run the old code under the new code's key. Nor does a run leave `__pycache__` in the user's folder.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def put_first(folder: Path) -> None:
    """Make `folder` the first place of imports, as Python does for a script in it."""

    def hook(entry: str) -> FileFinder:
        if not Path(entry).is_relative_to(folder) or "site-packages" in entry or not Path(entry).is_dir():
            raise ImportError
        return FileFinder(entry, (SourceOnlyLoader, SOURCE_SUFFIXES), (ExtensionFileLoader, EXTENSION_SUFFIXES))

    if sys.path[:1] == [str(folder)]:
        return
    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.pop(str(folder), None)
    sys.path.insert(0, str(folder))


def load_file(file: Path) -> ModuleType:
    """The module of one file, under its plain name, so that modules beside it and loading workers find it too."""
    loader = SourceOnlyLoader(file.stem, str(file))
    spec = importlib.util.spec_from_file_location(file.stem, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[file.stem]
        raise
    return module
