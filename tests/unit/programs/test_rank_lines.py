"""Which rank said what."""

import io
import sys

import pytest

from tasks.programs.rank_lines import RankLines


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["one\n", "two\n"], "[rank 1] one\n[rank 1] two\n"),
        (["one\ntwo\n\nthree"], "[rank 1] one\n[rank 1] two\n\n[rank 1] three"),
        (["on", "e", "\n", "two", "\n"], "[rank 1] one\n[rank 1] two\n"),
        (["", "one\n", ""], "[rank 1] one\n"),
        (['::progress {"done": 1}\n', "end\n"], '::progress {"done": 1}\n[rank 1] end\n'),
    ],
)
def test_each_line_names_its_rank_however_it_is_written(written, read):
    stream = io.StringIO()
    lines = RankLines(stream, 1)
    for text in written:
        assert lines.write(text) == len(text)
    assert stream.getvalue() == read


def test_the_rest_of_the_stream_is_its_own():
    lines = RankLines(sys.stderr, 0)
    assert lines.encoding == sys.stderr.encoding
    print("a", "b", file=lines, flush=True)
