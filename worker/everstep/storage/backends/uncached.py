"""Writes whole pages of a file around the page cache (O_DIRECT), where the file system and the memory allow it.

A checkpoint is written once and seldom read, and copying it into the page cache costs a training machine more CPU time
than everything else in a save: measured on ext4, 20 times as much. What cannot go around is left to the caller, who
writes it as usual; the two may be mixed in one file. Invariant: nothing is counted as written that the kernel did not
take. Durability is still `fsync`'s.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

# Offsets, sizes and addresses have to be multiples of the device's block; no disk has larger ones.
BLOCK: Final = 4096
# Below this the page cache costs less than waiting for the disk.
LEAST: Final = 2**20


class UncachedWriter:
    """A second descriptor of the file at `path`. Several threads may write."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None
        try:
            self._descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._descriptor = None  # the file system has no such thing
        self._usable = self._descriptor is not None and hasattr(os, "O_DIRECT")

    def write(self, offset: int, view: memoryview) -> int:
        """Write the beginning of `view` at `offset`; how many bytes of it, which may be none. Raises `OSError`."""
        done, end = 0, len(view) // BLOCK * BLOCK
        if offset % BLOCK or end < LEAST:
            return 0
        while done < end and self._usable:
            assert self._descriptor is not None
            try:
                count = os.pwrite(self._descriptor, view[done:end], offset + done)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self._usable = False  # this memory is not aligned, or the file system changed its mind
                break
            done += count // BLOCK * BLOCK  # what is left of a broken-off block is written again
            if count % BLOCK:
                break
        return done

    def close(self) -> None:
        """The other methods must not be called afterwards."""
        self._usable = False
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
