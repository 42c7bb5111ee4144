"""The memory that saves are copied to, and used again when they are written.

Invariant: no save is copied to memory that another one is still written from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from everstep.checkpoint.handle import SaveHandle
from everstep.checkpoint.save.staging import Staging


@dataclass(slots=True)
class Buffer:
    """Memory that a save was copied to, and the save that is written from it."""

    staging: Staging = field(default_factory=Staging)
    handle: SaveHandle | None = None


class Buffers:
    """One for the save that is written, and one for the save that waits for it."""

    def __init__(self) -> None:
        self._all = [Buffer(), Buffer()]

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._all)

    def free(self) -> Buffer:
        """One that no save is written from. The second is there only while saves come faster than the store is."""
        free = [b for b in self._all if b.handle is None or b.handle.done()]
        if not free:  # writers that were abandoned still read theirs
            self._all = free = [Buffer(), Buffer()]
        for spare in free[1:]:
            spare.staging.release()
        return free[0]
