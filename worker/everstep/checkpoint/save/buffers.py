"""The memory that saves are copied to, and used again when they are written.

Invariants: no save is copied to memory that another one is still written from. There are never more than `MOST`
buffers, and one beyond those of a single writer is taken only if there is room for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from everstep.checkpoint.errors import SaveFailed
from everstep.checkpoint.handle import SaveHandle
from everstep.checkpoint.save.host_memory import free_host_memory
from everstep.checkpoint.save.staging import Staging

OF_A_WRITER: Final = 2  # one for the save that is written, and one for the save that waits for it
MOST: Final = 2 * OF_A_WRITER  # while one abandoned writer still reads its own


@dataclass(slots=True)
class Buffer:
    """Memory that a save was copied to, and the save that is written from it."""

    staging: Staging = field(default_factory=Staging)
    handle: SaveHandle | None = None


class Buffers:
    """Those of one Checkpointer. A world that changes abandons the writer of the one before, whose saves may still be
    written for as long as the store takes."""

    def __init__(self) -> None:
        self._all = [Buffer() for _ in range(OF_A_WRITER)]

    @property
    def held(self) -> int:
        """Bytes of host memory."""
        return sum(b.staging.size for b in self._all)

    def free(self, size: int) -> Buffer:
        """One for `size` bytes that no save is written from. The second is there only while saves come faster than the
        store is. Raises `SaveFailed` if saves that were abandoned hold too much."""
        read = [b for b in self._all if b.handle is not None and not b.handle.done()]
        free = [b for b in self._all if b not in read] or [self._one_more(size)]
        for spare in free[1:]:
            spare.staging.release()
        self._all = [*read, *free[: max(1, OF_A_WRITER - len(read))]]
        return free[0]

    def _one_more(self, size: int) -> Buffer:
        what = f"{len(self._all)} saves, abandoned ones among them, are still being written from {self.held} bytes"
        if len(self._all) >= MOST:
            raise SaveFailed(f"{what} of host memory, and no more than {MOST} may be: the store is too slow for them")
        if len(self._all) >= OF_A_WRITER and size > (room := free_host_memory()):
            raise SaveFailed(
                f"{what} of host memory, and of the {size} that this one needs {room} are free: it is left out, and "
                "the next one may have room. Give the pod more memory, or save less often than the store takes to write"
            )
        return Buffer()
