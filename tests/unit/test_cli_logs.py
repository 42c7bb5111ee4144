"""The lines of a log that comes in parts, as `everstep logs -f` of a cluster reads it."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from everstep.jobs.cluster import MAX_LINE, lines


@given(st.lists(st.text("a\u00e4 ", max_size=8), max_size=20), st.lists(st.integers(0, 200), max_size=20))
def test_lines_are_the_same_wherever_the_parts_end(texts: list[str], cuts: list[int]) -> None:
    content = "".join(f"{text}\n" for text in texts).encode()
    ends = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    assert list(lines(content[a:b] for a, b in pairwise(ends))) == texts


def test_progress_bar_that_ends_no_line_is_shown_while_it_grows() -> None:
    parts = iter([b"start\r\n", b" 1%\r 2%", b"\r 3%\r", b"\nend"])
    shown = lines(parts)
    assert [next(shown) for _ in range(3)] == ["start", " 1%", " 2%"]
    assert next(parts) == b"\nend", "what has come is printed before more is read"
    assert list(shown) == [" 3%"]
    assert list(lines([b"a\r", b"\n", b"b"])) == ["a", "b"]


def test_line_without_an_end_is_printed_in_pieces_in_linear_time() -> None:
    began = time.process_time()
    printed = list(lines(b"x" * 100 for _ in range(200_000)))
    assert time.process_time() - began < 5  # CPU seconds; 20 MB, joined anew with each part, take minutes
    assert sum(map(len, printed)) == 20_000_000
    assert max(map(len, printed)) <= MAX_LINE + 100
