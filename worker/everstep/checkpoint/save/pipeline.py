"""Turns staged bytes into a durable shard: its parts are written on a few threads while the caller's hashes its chunks.

Knows bytes and the store, no tensors. The threads wait in system calls or hash without the interpreter's lock, so the
training thread is not held up. Invariants: a shard's name is that of one attempt of one rank, so that a request of it
that arrives late, when the commit exists, writes the same bytes again; when `write_shard` returns or raises, nothing
reads the staged bytes any more; no memory is used beside them but what the store takes for the parts under way.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Final

from everstep.checkpoint.flag import Flag
from everstep.checkpoint.format.chunks import describe
from everstep.checkpoint.format.manifest import Shard
from everstep.storage import Capabilities, ObjectStore, Unsynced

log = logging.getLogger("everstep.checkpoint")

THREADS: Final = 4
_ATTEMPTS: Final = 3  # to write a shard whose bytes the disk has lost


def write_shard(store: ObjectStore, path: str, data: memoryview) -> Shard:
    """Write the shard and return the manifest's description of it. No other shard may ever have this path.

    Raises what the store raises.
    """
    # One request for the whole is better where a part is all there is, or where the store takes no parts.
    if len(data) <= store.capabilities.part_size or not store.capabilities.multipart:
        return _at_once(store, path, data)
    for _ in range(_ATTEMPTS - 1):
        try:
            return _in_parts(store, path, data)
        except Unsynced as e:
            log.warning("%s; it is written again", e)
    return _in_parts(store, path, data)


def _at_once(store: ObjectStore, path: str, data: memoryview) -> Shard:
    with ThreadPoolExecutor(1, thread_name_prefix="everstep-write") as pool:
        written = pool.submit(store.put, path, data)
        shard = describe(path, data)
        written.result()
        return shard


def _in_parts(store: ObjectStore, path: str, data: memoryview) -> Shard:
    upload = store.start_upload(path, len(data))
    starts = range(0, len(data), upload.part_size)
    parts: list[Future[None]] = []
    failed = Flag()

    def write(number: int, start: int) -> None:
        if failed.is_set():
            return
        try:
            upload.write_part(number, data[start : start + upload.part_size])
        except BaseException:
            failed.set()  # here: this thread may begin the next part before the caller's hears of it
            raise

    try:
        with ThreadPoolExecutor(_threads(store.capabilities), thread_name_prefix="everstep-write") as pool:
            parts = [pool.submit(write, number, start) for number, start in enumerate(starts)]
            try:
                shard = describe(path, data)
                done, _ = wait(parts, return_when=FIRST_EXCEPTION)
                for part in done:
                    part.result()
            finally:
                for part in parts:
                    part.cancel()  # those not begun, once one has failed
        upload.commit()
        return shard
    except BaseException:
        upload.abort()
        raise


def _threads(capabilities: Capabilities) -> int:
    # One thread takes them in order, which is what a store without parallel parts asks for.
    if not capabilities.parallel_parts:
        return 1
    # Each thread that writes a file keeps a core busy, and one core is left to training.
    return max(1, min(THREADS, _cores() - 1)) if capabilities.local else THREADS


def _cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
