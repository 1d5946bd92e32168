"""How a program says what a user can mend, and how an exception of the user's code becomes that: without our frames."""

from __future__ import annotations

import difflib
import json
import linecache
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .jobs import Failure, FailureKind

OUT_OF_MEMORY = re.compile(r"out of memory|(can't|cannot) allocate memory|not enough memory", re.IGNORECASE)
PROGRAMS = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file."""

    file: Path
    line: int
    function: str | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def described(self) -> str:
        """With the function and the line's text, as a person reads a frame."""
        function = f" in {self.function}" if self.function and not self.function.startswith("<") else ""
        source = linecache.getline(str(self.file), self.line).strip()
        return f"  {self}{function}" + (f": {source}" if source else "")


class ProgramFailed(Exception):
    """Something that the user can mend; becomes `error.json`."""

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        hint: str | None = None,
        where: str | None = None,
        place: Place | None = None,
    ) -> None:
        self.kind, self.message, self.hint, self.place = kind, message, hint, place
        self.where = where or (str(place) if place else None)
        first = f"{self.where}: {message}" if self.where else message
        super().__init__(first + (f"\n{hint}" if hint else ""))


def to_json(failure: ProgramFailed) -> Failure:
    rank = os.environ.get("RANK")
    return {
        "kind": failure.kind,
        "message": failure.message,
        "hint": failure.hint,
        "where": failure.where,
        "file": str(failure.place.file) if failure.place else None,
        "line": failure.place.line if failure.place else None,
        "rank": int(rank) if rank is not None else None,
    }


def write_failure(failure: ProgramFailed, folder: Path) -> None:
    """Write `error.json`; of several ranks the first one wins, since the others are mostly its victims."""
    temporary = folder / f".error.{os.getpid()}.json"
    temporary.write_text(json.dumps(to_json(failure), indent=2) + "\n", encoding="utf-8")
    try:
        os.link(temporary, folder / "error.json")
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def nearest(name: str, known: Iterable[str]) -> str | None:
    """`did you mean "..."?`, if a known name is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f'did you mean "{close[0]}"?' if close else None


def names(values: Iterable[str]) -> str:
    """Names for a message: `"a", "b"`, or `nothing`."""
    return ", ".join(f'"{value}"' for value in values) or "nothing"


def places_within(error: BaseException, folder: Path) -> list[Place]:
    """The lines of the user's folder that an exception passed through, outermost first.

    Exceptions that crossed a process (a loading worker) or the exporter hold their frames as text only.
    """
    return users_places(traceback.extract_tb(error.__traceback__), folder) or places_in_text(str(error), folder)


def users_places(stack: traceback.StackSummary, folder: Path) -> list[Place]:
    """The frames of the user's folder, outermost first."""
    walked = [Place(Path(frame.filename), frame.lineno or 0, frame.name) for frame in stack]
    return [place for place in walked if _is_users(place.file, folder)]


def places_in_text(text: str, folder: Path) -> list[Place]:
    """The lines of the user's folder that a text names, in the two ways in which torch writes them."""
    pattern = re.compile(
        rf'(?:File "(?P<a>{re.escape(str(folder))}/[^"]+)", line (?P<b>\d+)(?:, in (?P<c>\S+))?)'
        rf"|(?:(?P<d>{re.escape(str(folder))}/[^\s:\"]+\.py):(?P<e>\d+)(?: in (?P<f>\w+))?)"
    )
    places = [
        Place(Path(match["a"] or match["d"]), int(match["b"] or match["e"]), match["c"] or match["f"])
        for match in pattern.finditer(text)
    ]
    return [place for place in places if _is_users(place.file, folder)]


def _is_users(file: Path, folder: Path) -> bool:
    """Not ours, and not of an environment that lies inside the user's folder."""
    return file.is_relative_to(folder) and not file.is_relative_to(PROGRAMS) and "site-packages" not in file.parts


def users_failure(error: BaseException, what: str, folder: Path, *, hint: str | None = None) -> ProgramFailed:
    """What the user's code raised, with the user's frames and the last one of a library, without ours."""
    if isinstance(error, SyntaxError) and error.filename and _is_users(Path(error.filename), folder):
        place = Place(Path(error.filename), error.lineno or 1)
        source = f"\n{place.described()}" if error.text else ""
        return ProgramFailed("configuration", f"{type(error).__name__}: {error.msg}{source}", hint=hint, place=place)
    places = places_within(error, folder)
    lines = [place.described() for place in places]
    last = traceback.extract_tb(error.__traceback__)[-1:]
    if lines and last and not Path(last[0].filename).is_relative_to(PROGRAMS):
        library = Place(Path(last[0].filename), last[0].lineno or 0, last[0].name)
        if not _is_users(library.file, folder):
            lines.append(library.described())
    told = str(error).strip()
    if "Traceback (most recent call last)" in told:  # a loading worker's; its frames are in `lines`
        told = told.splitlines()[-1]
        message = f"{what} raised {told}"
    else:
        message = f"{what} raised {type(error).__name__}" + (f": {told}" if told else "")
    return ProgramFailed("configuration", "\n".join([message, *lines]), hint=hint, place=places[-1] if places else None)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the host or of a GPU; torch has several words for it."""
    return isinstance(error, MemoryError) or bool(OUT_OF_MEMORY.search(str(error)))


@contextmanager
def users_code(what: str, folder: Path, *, always: bool = True, hint: str | None = None) -> Iterator[None]:
    """Turn what the user's code raises into a failure of the kind `configuration`.

    With `always=False` only if the exception passed through the user's folder: what fails elsewhere (a lost peer, the
    machine's memory) is none of the user's and goes on as it is.
    """
    try:
        yield
    except ProgramFailed:
        raise
    except (Exception, SystemExit) as error:
        if not always and (is_out_of_memory(error) or not places_within(error, folder)):
            raise
        raise users_failure(error, what, folder, hint=hint) from error
