"""The tables of docs/tensorrt.md, made from the data that the planner uses.

`python -m tasks.toolchain.trtexec.reference docs/tensorrt.md` puts them between their marks; a test fails when they are
not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tasks.toolchain.triton_releases import RELEASES
from tasks.toolchain.trtexec.options import TABLE, V10, V11, Option, Version, version_text


def options_that_differ() -> Iterator[str]:
    """The options that some version refuses, ignores or does not have yet."""
    yield "| Option | 10.x | 11.x | In its place | Source |"
    yield "|---|---|---|---|---|"
    for option in TABLE:
        if option.removed is None and option.no_effect is None and option.since == V10:
            continue
        ten, eleven = _state(option, V10), _state(option, V11)
        yield f"| `{option.name}` | {ten} | {eleven} | {option.instead or ''} | {option.source} |"


def _state(option: Option, version: Version) -> str:
    if option.removed is not None and version >= option.removed:
        return "refused"
    if option.no_effect is not None and version >= option.no_effect:
        return "no effect"
    if option.since > version:
        return f"from {version_text(option.since)}" if option.since[0] == version[0] else "refused"
    return "yes"


def options_that_do_not() -> Iterator[str]:
    """The names of all others."""
    same = [o.name for o in TABLE if o.removed is None and o.no_effect is None and o.since == V10]
    yield ", ".join(f"`{name}`" for name in same) + "."


def releases() -> Iterator[str]:
    """Newest first."""
    yield "| Release | Triton | TensorRT | ONNX Runtime | CUDA | Driver | Opset of TensorRT, of ONNX Runtime | Source |"
    yield "|---|---|---|---|---|---|---|---|"
    for release in reversed(RELEASES):
        limits = release.onnxruntime_limits
        opsets = f"{release.tensorrt_opset or '?'}, {limits[0] if limits else '?'}"
        tensorrt = "?" if release.tensorrt is None else version_text(release.tensorrt)
        cells = [release.name, release.server, tensorrt, release.onnxruntime, release.cuda, release.minimum_driver]
        yield f"| {' | '.join(cell or '?' for cell in cells)} | {opsets} | {release.source} |"


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "options that differ": options_that_differ,
    "other options": options_that_do_not,
    "releases": releases,
}


def with_tables(page: str) -> str:
    """The page with every table made anew. Law: `with_tables(with_tables(p)) == with_tables(p)`."""
    for name, make in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->\n"
        before, _, rest = page.partition(begin)
        page = before + begin + "\n".join(make()) + "\n" + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_tables(file.read_text(encoding="utf-8")), encoding="utf-8")
