"""One object on its way to a store, and what its writers ask of the store: less than a store has, which opens them.

Knows no store.
"""

from __future__ import annotations

from typing import Protocol

Data = bytes | bytearray | memoryview


class Upload(Protocol):
    """One object on its way to a store, in numbered parts. Nothing is visible before `commit`.

    Every part but the last has exactly `part_size` bytes; the last has 1 to `part_size`. A part may be written again
    (after a lost answer): the same number means the same bytes. All methods raise `StorageError`.
    """

    @property
    def part_size(self) -> int: ...

    def write_part(self, number: int, data: Data) -> None:
        """Part `number`, from 0. `data` may be reused when this returns. Other threads may write other parts."""

    def commit(self) -> None:
        """Make the object exist, whole, replacing what had its name. It may be called again after a lost answer."""

    def abort(self) -> None:
        """Remove the parts. Harmless if there are none, or after `commit`."""


class Whole(Protocol):
    """Takes objects in one piece."""

    @property
    def url(self) -> str: ...

    def put(self, name: str, data: Data) -> None: ...


class InParts(Whole, Protocol):
    """Takes them in parts too."""

    def start_upload(self, name: str, size_hint: int | None = None) -> Upload: ...
