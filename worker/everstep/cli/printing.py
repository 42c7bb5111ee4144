"""The one place from which the commands print what others wrote: records, pods, scripts, stores.

Such a text may hold sequences that move the cursor, change the title of the window or type into it, and words in
brackets that look like rich's markup. Invariant: what is printed here reaches the terminal as text. Control characters
and halves of characters become U+FFFD; colours and cursor movements are those of the tables alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

REPLACED: Final = "\ufffd"
# C0 but for tab and line feed, DEL, C1, what turns the direction of text around, and halves of characters.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_COLOUR: Final = re.compile("\x1b\\[[0-9;]{0,20}m")


def safe(text: str) -> str:
    """The text with nothing in it that a terminal would obey."""
    return _CONTROL.sub(REPLACED, text)


def safe_line(text: str) -> str:
    """A line of a program's output: its colours stay, all else is as in `safe`."""
    parts, at = [], 0
    for match in _COLOUR.finditer(text):
        parts += [safe(text[at : match.start()]), match[0]]
        at = match.end()
    return "".join([*parts, safe(text[at:])])


def say(text: object = "", *, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """`print`, of text that may be anybody's."""
    print(safe(str(text)), file=file, end=end, flush=flush)


def say_error(text: object) -> None:
    """The one line of a command that fails."""
    say(text, file=sys.stderr)


def cell(text: str, style: str = "") -> Text:
    """A text of a table, replaced before the table is laid out: what has no width would be cut off at the end."""
    return Text(safe(text), style)


@contextmanager
def byte_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr of so many bytes, which grows by what it is called with and goes at its end; nothing where stderr
    is no terminal."""
    from rich.progress import (  # noqa: PLC0415  most commands have none
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=SafeConsole(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


class SafeConsole(Console):
    """A console on which texts are texts: no markup, no emoji codes, and no control characters but its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """The segments of what is printed; those that rich itself makes to control the terminal are marked as such."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(safe(segment.text), segment.style)
