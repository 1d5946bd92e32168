"""Says of each line that a rank prints which rank it was: their output arrives mixed."""

from __future__ import annotations

import sys
from typing import Any, TextIO

PROGRESS = "::progress "
"""Lines that begin so are for the orchestrator, not for people (see notes.py)."""


class RankLines:
    """A stream that puts `[rank 1] ` before each line; all else is the stream's own."""

    def __init__(self, stream: TextIO, rank: int) -> None:
        self._stream, self._mark = stream, f"[rank {rank}] "
        self._in_line = False

    def write(self, text: str) -> int:
        """Write as the stream does; one call of it, so that short lines of several ranks do not mix."""
        first, *others = text.split("\n")
        marked = [first if self._in_line else self._marked(first), *map(self._marked, others)]
        self._stream.write("\n".join(marked))
        self._in_line = bool(others[-1]) if others else self._in_line or bool(first)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def _marked(self, line: str) -> str:
        return line if not line or line.startswith(PROGRESS) else self._mark + line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mark_lines(rank: int, ranks: int) -> None:
    """From now on, what this process prints carries its rank, if it is one of several."""
    if ranks > 1:
        sys.stdout, sys.stderr = RankLines(sys.stdout, rank), RankLines(sys.stderr, rank)
