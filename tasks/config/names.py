"""Names that become parts of paths, model folders or Python arguments, and what is allowed in them."""

from __future__ import annotations

import keyword
import re
from typing import Annotated

from pydantic import AfterValidator

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(value: str) -> str:
    """A name that is one path part on every file system, a Triton model's folder, and free of `/`, `@` and spaces."""
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"expected up to 100 letters, digits, '.', '_' and '-', the first a letter or digit, got {value!r}"
        )
    return value


def check_identifier(value: str) -> str:
    """The name of an input is the name of an argument of the model's `forward`."""
    if not value.isascii() or not value.isidentifier() or keyword.iskeyword(value):
        raise ValueError(
            f"expected a Python identifier (the name of an argument of the model's forward), got {value!r}"
        )
    return value


def check_metric(value: str) -> str:
    """A metric's name is a key of `gates.metrics`, reachable by `--set`, which separates names by dots."""
    if not value.strip() or "." in value or value != value.strip():
        raise ValueError(f"expected a name without '.' and outer spaces, got {value!r}")
    return value


def check_text(value: str) -> str:
    """Text that says something."""
    if not value.strip():
        raise ValueError("expected a text that is not empty")
    return value


def check_path(value: str) -> str:
    """A path as written in the pipeline file: no variables and no `~` are expanded in it."""
    check_text(value)
    if value.startswith("~") or "$" in value:
        raise ValueError(f"expected a plain path, got {value!r}: '~' and variables are not expanded")
    return value


def check_folder(value: str) -> str:
    """A folder on this machine: what looks like the address of a bucket would become a folder of that name."""
    if "://" in value:
        raise ValueError(f"expected a folder, got {value!r}: mount the bucket, and name the folder where it is")
    return check_path(value)


def check_recipe(value: str) -> str:
    """`FILE.py:CLASS`."""
    file, colon, attribute = value.rpartition(":")
    if not colon or not file.endswith(".py") or not attribute.isidentifier():
        raise ValueError(f"expected FILE.py:CLASS such as recipe.py:Digits, got {value!r}")
    check_path(file)
    return value


def check_endpoint(value: str) -> str:
    """`HOST:PORT`."""
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"expected HOST:PORT such as trainer-1:29400, got {value!r}")
    return value


Name = Annotated[str, AfterValidator(check_name)]
Identifier = Annotated[str, AfterValidator(check_identifier)]
MetricName = Annotated[str, AfterValidator(check_metric)]
Text = Annotated[str, AfterValidator(check_text)]
EndpointText = Annotated[str, AfterValidator(check_endpoint)]
PathText = Annotated[str, AfterValidator(check_path)]
FolderText = Annotated[str, AfterValidator(check_folder)]
RecipeText = Annotated[str, AfterValidator(check_recipe)]
