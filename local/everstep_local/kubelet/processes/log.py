"""Reads a container's log as the guard writes it: lines of `<time> <stream> <F|P> <text>`, in two files at most.

Invariant: a reader that follows misses no line, even over a rotation, unless it falls behind by half of the log's
bound.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from everstep_operator.runtime.clock import Clock

POLL_SECONDS = 0.1
CHUNK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LogLine:
    """`time` is RFC 3339 with nanoseconds, `stream` stdout or stderr; `text` has no end of line."""

    time: str
    stream: str
    text: str


def read(path: Path) -> Iterator[LogLine]:
    """All lines of the log, with only a part in memory at a time."""
    lines = _Lines()
    for file in (_older(path), path):
        if (opened := _open(file)) is not None:
            with opened:
                while data := opened.read(CHUNK):
                    yield from lines.feed(data)
    yield from lines.finish()


def tail(path: Path, count: int) -> list[LogLine]:
    """The last `count` lines. This reads no more of the log than necessary."""
    size = 64 * 1024
    while True:
        data, whole = _end(path, size)
        lines = _Lines()
        complete = lines.feed(data) + lines.finish()
        if whole or len(complete) >= count:
            return complete[max(0, len(complete) - count) :]
        size *= 4


def last_text(path: Path, lines: int, size: int) -> str:
    """The last `lines` lines in at most `size` bytes, as a kubelet quotes them in a status."""
    text = "".join(line.text + "\n" for line in tail(path, lines))
    return text.encode()[-size:].decode("utf-8", "ignore")


async def follow(
    path: Path, clock: Clock, ended: Callable[[], bool], count: int | None = None
) -> AsyncIterator[LogLine]:
    """The lines of `read`, or of `tail` with `count`, and then each new line until `ended`."""
    lines = _Lines()
    last = ended()  # checked before reading, so that all earlier lines are read
    file = _open(path)
    try:
        for line in _so_far(lines, path, file, count):
            yield line
        while not last:
            await clock.sleep(POLL_SECONDS)
            last = ended()
            file = file or _open(path)
            for line in lines.feed(file.read()) if file is not None else ():
                yield line
            while file is not None and _rotated(path, file):
                # Read once more: lines may have been written between the read and the rotation.
                complete = lines.feed(file.read())
                file.close()
                file = _open(path)
                for line in complete + (lines.feed(file.read()) if file is not None else []):
                    yield line
        for line in lines.finish():
            yield line
    finally:
        if file is not None:
            file.close()


def _so_far(lines: _Lines, path: Path, file: BinaryIO | None, count: int | None) -> Iterable[LogLine]:
    """The existing lines. This leaves `file` at its end."""
    tail_lines: deque[LogLine] = deque(maxlen=count)
    if (older := _open(_older(path))) is not None:
        with older:
            while data := older.read(CHUNK):
                tail_lines.extend(lines.feed(data))
    while file is not None and (data := file.read(CHUNK)):
        tail_lines.extend(lines.feed(data))
    return tail_lines


class _Lines:
    """Makes lines from pieces of bytes. Each of the two streams has its own unfinished line."""

    def __init__(self) -> None:
        self._rest = b""
        self._begun: dict[str, LogLine] = {}

    def feed(self, data: bytes) -> list[LogLine]:
        *rows, self._rest = (self._rest + data).split(b"\n")
        complete = []
        for row in rows:
            fields = row.split(b" ", 3)
            if len(fields) != 4:
                continue
            time, stream, tag = (f.decode("ascii", "replace") for f in fields[:3])
            begun = self._begun.pop(stream, LogLine(time, stream, ""))
            line = LogLine(begun.time, stream, begun.text + fields[3].decode("utf-8", "replace"))
            if tag == "F":
                complete.append(line)
            else:
                self._begun[stream] = line
        return complete

    def finish(self) -> list[LogLine]:
        complete = list(self._begun.values())
        self._begun.clear()
        return complete


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _end(path: Path, size: int) -> tuple[bytes, bool]:
    """About the last `size` bytes, from the beginning of a line, and whether that is the whole file."""
    data = b""
    for file in (path, _older(path)):
        if (opened := _open(file)) is None:
            continue
        with opened:
            begin = max(0, opened.seek(0, 2) - (size - len(data)))
            opened.seek(begin)
            part = opened.read(size)
            if begin > 0:
                return part.partition(b"\n")[2] + data, False
            data = part + data
    return data, True


def _open(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _rotated(path: Path, file: BinaryIO) -> bool:
    try:
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False
