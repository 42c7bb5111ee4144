"""The memory that saves are copied to, and used again when they are written.

Invariants: no save is copied to memory that another one is still written from. There are never more than `MOST`
buffers, and one beyond those of a single writer is taken only if there is room for it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

from everstep.checkpoint.errors import SaveFailed
from everstep.checkpoint.handle import SaveHandle
from everstep.checkpoint.save.host_memory import free_host_memory
from everstep.checkpoint.save.staging import Staging

OF_A_WRITER: Final = 2  # one for the save that is written, and one for the save that waits for it
MOST: Final = 2 * OF_A_WRITER  # while one abandoned writer still reads its own


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory that a save was copied to, and the save that is written from it."""

    handle: SaveHandle
    staging: Staging


class Buffers:
    """Those of one Checkpointer. A world that changes abandons the writer of the one before, whose saves may still be
    written for as long as the store takes.

    A handler of signals may save in the middle of a save. So a buffer is in one list or the other, and taking it out,
    which is done at once, is what gives it to a save.
    """

    def __init__(self) -> None:
        self._read: list[Buffer] = []  # saves may be written from them
        self._free: list[Staging] = []

    @property
    def held(self) -> int:
        """Bytes of host memory."""
        return sum(b.staging.size for b in list(self._read)) + sum(s.size for s in list(self._free))

    def take(self, size: int, handle: SaveHandle) -> Staging:
        """Memory for `size` bytes of this save, from which no other save is written. A second one is there only while
        saves come faster than the store is. Raises `SaveFailed` if saves that were abandoned hold too much."""
        for buffer in list(self._read):
            if buffer.handle.done():
                with contextlib.suppress(ValueError):  # a handler has done it
                    self._read.remove(buffer)
                    self._free.append(buffer.staging)
        staging = self._any_free() or self._one_more(size)
        self._read.append(Buffer(handle, staging))
        while (spare := self._any_free()) is not None:
            spare.release()
        return staging

    def _any_free(self) -> Staging | None:
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return None

    def _one_more(self, size: int) -> Staging:
        what = f"{len(self._read)} saves, abandoned ones among them, are still being written from {self.held} bytes"
        if len(self._read) >= MOST:
            raise SaveFailed(f"{what} of host memory, and no more than {MOST} may be: the store is too slow for them")
        if len(self._read) >= OF_A_WRITER and size > (room := free_host_memory()):
            raise SaveFailed(
                f"{what} of host memory, and of the {size} that this one needs {room} are free: it is left out, and "
                "the next one may have room. Give the pod more memory, or save less often than the store takes to write"
            )
        return Staging()
