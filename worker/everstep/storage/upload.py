"""One object on its way to a store, and what its writers ask of the store: less than a store has, which opens them.

Knows no store.
"""

from __future__ import annotations

import enum
import logging
import mmap
import os
import tempfile
from types import TracebackType
from typing import Protocol

from everstep.storage.errors import StorageError, TerminalError

# --- spool
# Uploads for stores that take an object only in one piece: the parts wait in an unnamed file on the local disk. Memory
# stays at what the caller holds; the disk holds one object. The file has no name, so a crash leaves nothing.


class SpooledUpload:
    """Parts in a temporary file; `commit` makes the object of it."""

    def __init__(self, store: Whole, name: str, part_size: int) -> None:
        self._store = store
        self._name = name
        self.part_size = part_size
        self._file = tempfile.TemporaryFile(prefix="everstep-upload-", buffering=0)  # noqa: SIM115  closed by the end

    def write_part(self, number: int, data: Data) -> None:
        offset, view = number * self.part_size, memoryview(data).cast("B")
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


# --- writer
# Streams bytes of unknown length into one object, a part at a time, with one part in memory. Invariant: the object
# exists after `commit` returned and at no time before; a writer that is left without `commit` leaves nothing visible.

log = logging.getLogger("everstep.storage")


class _State(enum.Enum):
    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    BROKEN = "broken"


class ObjectWriter:
    """A context manager that aborts unless `commit` was called. One thread at a time.

    An object that fits in one part costs one request, `put`; a larger one is a multipart upload, begun with its
    first full part.
    """

    def __init__(self, store: InParts, name: str, part_size: int, size_hint: int | None = None) -> None:
        self._store = store
        self._name = name
        self._size_hint = size_hint
        self._part_size = part_size
        self._rest = bytearray()  # less than one part
        self._upload: Upload | None = None
        self._parts = 0
        self._state = _State.OPEN

    def write(self, data: Data) -> None:
        """Append `data`, which may be reused when this returns. Whole parts are sent from it without a copy."""
        self._check()
        try:
            view = memoryview(data).cast("B")
            if len(self._rest) + len(view) > self._part_size:
                view = self._send_parts(view)
            self._rest += view
        except BaseException:
            self._state = _State.BROKEN
            raise

    def commit(self) -> None:
        """Make the object exist, replacing what had its name."""
        self._check()
        self._state = _State.BROKEN
        if self._upload is None:
            self._store.put(self._name, self._rest)
        else:
            if self._rest:
                self._send(self._rest)
            self._upload.commit()
        self._state = _State.COMMITTED
        self._rest = bytearray()

    def abort(self) -> None:
        """Drop what was written; nothing of it becomes visible. Harmless after `commit` or another `abort`."""
        if self._state in (_State.COMMITTED, _State.ABORTED):
            return
        self._state = _State.ABORTED
        self._rest = bytearray()
        if self._upload is not None:
            self._upload.abort()

    def __enter__(self) -> ObjectWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.abort()
        except StorageError as abort_error:
            if e is None:
                raise
            # The body's error is the one to raise; `sweep_uploads` removes the parts that stay.
            log.warning("%s: the upload of %s was not removed: %s", self._store.url, self._name, abort_error)

    def _send_parts(self, view: memoryview) -> memoryview:
        """Send every whole part but what may be the last one; what remains of `view`."""
        if self._upload is None:
            self._upload = self._store.start_upload(self._name, self._size_hint)
            self._part_size = self._upload.part_size
        if self._rest:
            missing = self._part_size - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) == self._part_size and view:
                self._send(self._rest)
                self._rest = bytearray()
        while len(view) > self._part_size:
            self._send(view[: self._part_size])
            view = view[self._part_size :]
        return view

    def _send(self, data: Data) -> None:
        assert self._upload is not None
        self._upload.write_part(self._parts, data)
        self._parts += 1

    def _check(self) -> None:
        if self._state is not _State.OPEN:
            raise TerminalError(f"{self._store.url}: the writer of {self._name} is {self._state.value}, not open")


# --- upload

Data = bytes | bytearray | memoryview


class Upload(Protocol):
    """One object on its way to a store, in numbered parts. Nothing is visible before `commit`.

    Every part but the last has exactly `part_size` bytes; the last has 1 to `part_size`. A part may be written again
    (after a lost answer): the same number means the same bytes. All methods raise `StorageError`.
    """

    part_size: int

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
