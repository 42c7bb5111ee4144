"""Writes bytes that are all in memory as the parts of an upload, several at a time where the store allows it."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from everstep.storage.errors import StorageError

if TYPE_CHECKING:
    from everstep.storage.base import Data, ObjectStore, Upload

THREADS: Final = 4


def in_one_piece(store: ObjectStore, data: Data) -> bool:
    """Whether the store takes `data` in one request."""
    limit = store.capabilities.one_piece
    return limit is None or memoryview(data).nbytes <= limit


def create_in_parts(store: ObjectStore, name: str, data: Data) -> None:
    """`create` by an upload. What is not committed is removed."""
    upload = store.start_upload(name, memoryview(data).nbytes)
    write_parts(upload, data, THREADS if store.capabilities.parallel_parts else 1)


def write_parts(upload: Upload, data: Data, threads: int) -> None:
    """Write all of `data` and commit; abort if that fails. `data` is not copied."""
    view, size = memoryview(data).cast("B"), upload.part_size

    def send(number: int) -> None:
        upload.write_part(number, view[number * size : (number + 1) * size])

    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="everstep-part") as pool:
            tasks = [pool.submit(send, number) for number in range(-(-len(view) // size))]
            try:
                for task in tasks:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
        upload.commit()
    except BaseException:
        with contextlib.suppress(StorageError):  # the parts that stay are `sweep_uploads`' to remove
            upload.abort()
        raise
