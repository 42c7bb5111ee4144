"""Host memory that holds a snapshot of the state while it is written: filled while training waits, so as fast as memory
copies, and kept from save to save, because first touching memory costs several times the copy.

Knows tensors and one file's layout, nothing of stores. Invariants: one buffer, never two at once; page-aligned, so that
a store may write it around the page cache; what training changes after `fill` does not reach it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from everstep.checkpoint.save.shard import Plan

log = logging.getLogger("everstep.checkpoint")

MAX_THREADS: Final = 8
_BLOCK: Final = 8 * 2**20
_WIPE_ON_FORK: Final = 18  # MADV_WIPEONFORK of madvise(2), which `mmap` does not name


class Staging:
    """One reused host buffer. Its content belongs to the caller of `fill` until the next `fill`.

    Grows when a state does, and shrinks when one needs less than half. A forked child (a DataLoader worker) sees zeros
    in it and does not make the parent copy its pages.
    """

    def __init__(self) -> None:
        self._pages: mmap.mmap | None = None
        self._process = 0
        self._pinned = False

    def fill(self, plan: Plan, tensors: Mapping[str, torch.Tensor]) -> memoryview:
        """The bytes of the shard: a snapshot of the tensors, which may change as soon as this returns."""
        data = self._room(plan.size, any(t.is_cuda for t in tensors.values()))
        data[: len(plan.header)] = plan.header
        base = ctypes.addressof(ctypes.c_char.from_buffer(data))
        whole = torch.frombuffer(data, dtype=torch.uint8)
        plain, devices = [], set()
        for name, (begin, end) in plan.spans.items():
            tensor = tensors[name]
            if begin == end:
                continue
            if _plain(tensor):
                plain.append((base + begin, tensor.data_ptr(), end - begin))
                continue
            # Device memory goes to pinned pages without waiting for each copy; strides and lazy conjugates are torch's.
            whole[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
        _copy(plain)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return data

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return 0 if self._pages is None else len(self._pages)

    def release(self) -> None:
        """Give the memory back. What `fill` returned before must not be used any more."""
        if self._pages is not None and self._pinned:
            _cuda_runtime().cudaHostUnregister(self._address())
        self._pages, self._pinned = None, False

    def _room(self, size: int, pinned: bool) -> memoryview:
        """`size` writable bytes of the buffer, made anew if it does not fit."""
        if self._process != os.getpid():
            self._pages, self._pinned = None, False  # the parent's, and empty here
        if self._pages is None or not size <= len(self._pages) <= max(2 * size, _BLOCK):
            self.release()
            rounded = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
            self._pages = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._process = os.getpid()
            try:
                self._pages.madvise(_WIPE_ON_FORK)
            except OSError as e:
                log.debug("the kernel cannot keep the staging buffer out of forked children: %s", e)
        if pinned and not self._pinned:
            self._pin()
        return memoryview(self._pages)[:size]

    def _pin(self) -> None:
        assert self._pages is not None
        error = _cuda_runtime().cudaHostRegister(self._address(), len(self._pages), 0)
        self._pinned = int(error) == 0
        if not self._pinned:
            log.warning("%d bytes of staging cannot be pinned (%s): saves copy slower", len(self._pages), error)

    def _address(self) -> int:
        assert self._pages is not None
        return ctypes.addressof(ctypes.c_char.from_buffer(self._pages))


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes lie in host memory just as the file wants them."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy(runs: list[tuple[int, int, int]]) -> None:
    """Copy runs of bytes (to, from, size), on as many threads as torch's own operators may use.

    Not by torch's copy: its threads meet after each tensor, and one that has to wait for a core delays all of them.
    """
    total = sum(size for _, _, size in runs)
    threads = min(torch.get_num_threads(), MAX_THREADS, total // _BLOCK)
    blocks = _blocks(runs)
    if threads < 2:
        _move(blocks)
        return
    with ThreadPoolExecutor(threads - 1, thread_name_prefix="everstep-stage") as pool:
        queue = iter(list(blocks))  # which several threads may draw from; a generator they may not
        others = [pool.submit(_move, queue) for _ in range(threads - 1)]
        _move(queue)
        for other in others:
            other.result()


def _move(blocks: Iterable[tuple[int, int, int]]) -> None:
    for to, source, size in blocks:
        ctypes.memmove(to, source, size)  # without the interpreter's lock


def _blocks(runs: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    for to, source, size in runs:
        for at in range(0, size, _BLOCK):
            yield to + at, source + at, min(_BLOCK, size - at)
