"""Reading a container's log as the guard writes it: `<time> <stream> <F|P> <text>` a line, in two files at most.

Invariant: a reader that follows misses nothing that is written while it reads, a rotation included, unless it is slower
than half of the log's bound.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from everstep_operator.runtime.clock import Clock

POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class LogLine:
    """`time` is RFC 3339 with nanoseconds, `stream` stdout or stderr; `text` has no end of line."""

    time: str
    stream: str
    text: str


def read(path: Path, tail: int | None = None) -> list[LogLine]:
    """The lines of the log, or the last `tail` of them."""
    lines = _Lines()
    found = lines.feed(_older(path))
    if (file := _open(path)) is not None:
        with file:
            found += lines.feed(file.read())
    return _last(found + lines.finish(), tail)


def last_text(path: Path, lines: int, size: int) -> str:
    """The last `lines` lines in at most `size` bytes, as a kubelet quotes them in a status."""
    text = "".join(line.text + "\n" for line in read(path, lines))
    return text.encode()[-size:].decode("utf-8", "ignore")


async def follow(
    path: Path, clock: Clock, ended: Callable[[], bool], tail: int | None = None
) -> AsyncIterator[LogLine]:
    """What `read` gives, then each new line until `ended`."""
    lines = _Lines()
    last = ended()  # asked before reading: what was written until then is read
    file = _open(path)
    try:
        found = lines.feed(_older(path)) + lines.feed(file.read() if file is not None else b"")
        for line in _last(found, tail):
            yield line
        while not last:
            await clock.sleep(POLL_SECONDS)
            last = ended()
            file = file or _open(path)
            for line in lines.feed(file.read()) if file is not None else ():
                yield line
            while file is not None and _rotated(path, file):
                # Once more: something may have been written between the read and the rotation.
                found = lines.feed(file.read())
                file.close()
                file = _open(path)
                for line in found + (lines.feed(file.read()) if file is not None else []):
                    yield line
        for line in lines.finish():
            yield line
    finally:
        if file is not None:
            file.close()


class _Lines:
    """From bytes, cut anywhere, to lines; of two streams each has a beginning of its own."""

    def __init__(self) -> None:
        self._rest = b""
        self._begun: dict[str, LogLine] = {}

    def feed(self, data: bytes) -> list[LogLine]:
        *rows, self._rest = (self._rest + data).split(b"\n")
        found = []
        for row in rows:
            fields = row.split(b" ", 3)
            if len(fields) != 4:
                continue
            time, stream, tag = (f.decode("ascii", "replace") for f in fields[:3])
            begun = self._begun.pop(stream, LogLine(time, stream, ""))
            line = LogLine(begun.time, stream, begun.text + fields[3].decode("utf-8", "replace"))
            if tag == "F":
                found.append(line)
            else:
                self._begun[stream] = line
        return found

    def finish(self) -> list[LogLine]:
        found = list(self._begun.values())
        self._begun.clear()
        return found


def _last(lines: list[LogLine], tail: int | None) -> list[LogLine]:
    return lines if tail is None else lines[max(0, len(lines) - tail) :]


def _older(path: Path) -> bytes:
    try:
        return path.with_name(path.name + ".1").read_bytes()
    except FileNotFoundError:
        return b""


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
