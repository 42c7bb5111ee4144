"""Uploads for stores that take an object only in one piece: the parts wait in an unnamed file on the local disk.

Memory stays at what the caller holds; the disk holds one object. The file has no name, so a crash leaves nothing.
"""

from __future__ import annotations

import mmap
import os
import tempfile

from everstep.storage.errors import TerminalError
from everstep.storage.upload import Data, Whole


class SpooledUpload:
    """Parts in a temporary file; `commit` makes the object of it."""

    def __init__(self, store: Whole, name: str, part_size: int) -> None:
        self._store = store
        self._name = name
        self._part_size = part_size
        self._file = tempfile.TemporaryFile(prefix="everstep-upload-", buffering=0)  # noqa: SIM115  closed by the end

    @property
    def part_size(self) -> int:
        return self._part_size

    def write_part(self, number: int, data: Data) -> None:
        offset, view = number * self._part_size, memoryview(data).cast("B")
        try:
            while view:
                count = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[count:], offset + count
        except (OSError, ValueError) as e:
            raise TerminalError(
                f"{self._store.url}: {self._name}: cannot keep part {number} in {tempfile.gettempdir()} until the "
                f"object is whole: {e}. Make room there, or set TMPDIR to a larger disk"
            ) from e

    def commit(self) -> None:
        if self._file.closed:
            return
        size = os.fstat(self._file.fileno()).st_size
        with mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) as pages, memoryview(pages) as data:
            self._store.put(self._name, data)
        self._file.close()

    def abort(self) -> None:
        self._file.close()
