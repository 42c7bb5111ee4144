"""The half of a save for which training waits: the state is taken apart, and this rank's part of it is copied.

Knows no store and no log. Invariant: nothing of the live state is needed once `copy` has returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from everstep.checkpoint.errors import CheckpointError, SaveFailed
from everstep.checkpoint.format.manifest import Entry
from everstep.checkpoint.handle import SaveHandle
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.save.parts import Staged
from everstep.checkpoint.save.shard import Plan, entries_of, plan_shard, slices
from everstep.checkpoint.state.alike import digests, digests_of_samples, digests_of_union
from everstep.checkpoint.state.capture import Captured
from everstep.checkpoint.state.finite import Checked, Nonfinite
from everstep.checkpoint.state.holders import Holders, Teams
from everstep.checkpoint.state.sharding import local_of
from everstep.torch_private.tensors import versions

# --- host memory
# How much host memory this process may still take, by the machine and by its container.

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def free_host_memory() -> int:
    """Bytes that this process may still allocate, as far as is known."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        known = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        free = int(known["MemAvailable"].split()[0]) * 1024
        most = (_CGROUP / "memory.max").read_text().strip()
        if most != "max":
            stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            used = int((_CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            free = min(free, int(most) - used)
    except (OSError, ValueError, KeyError):
        pass  # not Linux, no cgroup v2, or the root cgroup
    return max(free, 0)


# --- staging
# Host memory that holds a snapshot of the state while it is written: filled while training waits, so as fast as memory
# copies, and kept from save to save, because first touching memory costs several times the copy. Invariants: one
# buffer, never two at once; page-aligned, so that a store may write it around the page cache; what training changes
# after `fill` does not reach it.

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

    Not by torch's copy: its threads wait for each other after each tensor, so one that gets no core delays all of them.
    """
    total = sum(size for _, _, size in runs)
    threads = min(torch.get_num_threads(), MAX_THREADS, total // _BLOCK)
    blocks = _blocks(runs)
    if threads < 2:
        _move(blocks)
        return
    with ThreadPoolExecutor(threads - 1, thread_name_prefix="everstep-stage") as pool:
        queue = iter(list(blocks))  # several threads may share a list's iterator, but not a generator
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


# --- buffers
# The memory that saves are copied to, and used again when they are written. Invariants: no save is copied to memory
# that another one is still written from. There are never more than `MOST` buffers, and one beyond those of a single
# writer is taken only if there is room for it.

OF_A_WRITER: Final = 2  # one for the save that is written, and one for the save that waits for it
MOST: Final = 2 * OF_A_WRITER  # while one abandoned writer still reads its own


class Buffers:
    """The buffers of one Checkpointer. When the world changes, the writer of the last world is abandoned. It may still
    read from its buffers, until the store has taken what it writes.

    A signal handler may interrupt a save to begin another one. Both run in the same thread, so a lock cannot keep them
    apart. Instead each buffer is in one of the two lists, and a save takes a buffer by removing it from its list. A
    handler cannot interrupt the removal, so two saves never take the same buffer.
    """

    def __init__(self) -> None:
        self._read: list[tuple[SaveHandle, Staging]] = []  # writers may still read from these
        self._free: list[Staging] = []

    @property
    def size(self) -> int:
        """Bytes of host memory in all buffers."""
        return sum(s.size for s in [*(staging for _, staging in list(self._read)), *list(self._free)])

    def take(self, size: int, handle: SaveHandle) -> Staging:
        """A buffer for `size` bytes of this save, which no other save uses. There is more than one buffer only while
        saves come faster than the store takes them. Raises `SaveFailed` if abandoned saves use too much memory."""
        for buffer in list(self._read):
            if buffer[0].done():
                with contextlib.suppress(ValueError):  # a signal handler has moved it already
                    self._read.remove(buffer)
                    self._free.append(buffer[1])
        staging = self._any_free() or self._one_more(size)
        self._read.append((handle, staging))
        while (spare := self._any_free()) is not None:
            spare.release()
        return staging

    def _any_free(self) -> Staging | None:
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return None

    def _one_more(self, size: int) -> Staging:
        what = f"{len(self._read)} saves, abandoned ones among them, are still being written from {self.size} bytes"
        if len(self._read) >= MOST:
            raise SaveFailed(f"{what} of host memory, and no more than {MOST} may be: the store is too slow for them")
        if len(self._read) >= OF_A_WRITER and size > (room := free_host_memory()):
            raise SaveFailed(
                f"{what} of host memory, and of the {size} that this one needs {room} are free: it is left out, and "
                "the next one may have room. Give the pod more memory, or save less often than the store takes to write"
            )
        return Staging()


# --- arrangement
# Remembers the arrangement of this rank's shard from save to save: names, shapes and placements seldom change. For a
# state of many tensors, computing them again would delay training longer than the copy does. Invariant: an arrangement
# is used again only for a state that equals the one it was made for in everything that it depends on.


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The file's layout, the manifest's entries, and which spans hold parameters."""

    plan: Plan
    entries: tuple[Entry, ...]
    checked: tuple[Checked, ...]


@dataclass(frozen=True, slots=True)
class _View:
    """A part of this rank's local tensor: its shape and strides, and the index of its first element in there."""

    key: str
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int


class Arranger:
    """Arranges states one after another."""

    def __init__(self) -> None:
        self._signature: object = None
        self._views: tuple[_View, ...] = ()
        self._arrangement: Arrangement | None = None

    def arrange(
        self, captured: Captured, ranks: Ranks, teams: Teams | None = None
    ) -> tuple[Arrangement, dict[str, torch.Tensor]]:
        """The arrangement and the views of the live tensors, by their keys in the file."""
        local = {
            name: local_of(t) for tensors in (captured.tensors, captured.own_tensors) for name, t in tensors.items()
        }
        signature = (
            ranks.rank, ranks.world_size, captured.parameters, captured.buffers, teams,
            [_shape(name, t, local[name]) for name, t in captured.tensors.items()],
            [_shape(name, t, local[name]) for name, t in captured.own_tensors.items()],
        )  # fmt: skip
        if self._arrangement is None or signature != self._signature:
            self._arrangement, self._views = _arrange(captured, ranks, local, teams)
            self._signature = signature
        return self._arrangement, {v.key: _look(local[v.name], v) for v in self._views}


def _arrange(
    captured: Captured, ranks: Ranks, local: dict[str, torch.Tensor], teams: Teams | None
) -> tuple[Arrangement, tuple[_View, ...]]:
    mine = slices(
        captured.tensors, captured.own_tensors, ranks.rank, ranks.world_size, ranks.group, captured.buffers, teams
    )
    plan = plan_shard({s.key: s.data for s in mine})
    checked = tuple(Checked(s.name, s.data.dtype, *plan.spans[s.key]) for s in mine if s.name in captured.parameters)
    views = tuple(
        _View(s.key, s.name, tuple(s.data.shape), s.data.stride(), _offset(s.data) - _offset(local[s.name]))
        for s in mine
    )
    return Arrangement(plan, entries_of(plan, mine), checked), views


def _shape(name: str, tensor: Any, local: torch.Tensor) -> tuple[object, ...]:
    """Everything about a tensor that its arrangement depends on."""
    placed = (tensor.device_mesh, tensor.placements, tensor.shape) if tensor is not local else None
    return (name, local.dtype, local.shape, local.stride(), placed)


def _look(local: torch.Tensor, view: _View) -> torch.Tensor:
    if view.first == 0 and view.shape == local.shape:
        return local
    return local.as_strided(view.shape, view.stride, _offset(local) + view.first)


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


# --- versions
# Shows that a state changed while it was copied: another thread trains, or a hook of the script's.

_LAST_CHANGE: Final = 0.05  # seconds; torch counts a change when it ends, and one may be under way


class Versions:
    """How often each tensor of a state has been changed by now. `beside`: in a thread beside that of training."""

    def __init__(self, captured: Captured, *, beside: bool = False) -> None:
        self._tensors = {name: t for name, t in captured.tensors.items() if not t.is_inference()}  # these count nothing
        self._versions, self._beside = versions(self._tensors.values()), beside

    def changed(self) -> str | None:
        """A tensor that has changed since."""
        if self._beside:
            time.sleep(_LAST_CHANGE)
        pairs = zip(self._tensors, self._versions, versions(self._tensors.values()), strict=True)
        return next((name for name, before, after in pairs if before != after), None)


# --- snapshot


@dataclass(frozen=True, slots=True)
class Taken:
    """A state that is taken apart and not yet copied. The digests are empty where ranks do not compare them."""

    captured: Captured
    arranged: Arrangement
    tensors: Mapping[str, torch.Tensor]
    digests: Mapping[str, int]
    union_digests: Mapping[str, int]
    unchanged: Versions


class Snapshots:
    """Takes and copies the states of one Checkpointer. `holders` are those of one world."""

    def __init__(self, nonfinite: Nonfinite) -> None:
        self._nonfinite = nonfinite
        self._arranger = Arranger()
        self.buffers = Buffers()
        self.holders = Holders()

    def take(
        self, state: Mapping[str, Any], ranks: Ranks, problem: CheckpointError | None, *, turn: int | None,
        since: Versions | None = None,
    ) -> Taken:  # fmt: skip
        """Take a state apart that has not changed `since`. `turn`: the save's number among those of this run, if
        ranks compare. Raises `problem`, and as `Holders.capture` does."""
        captured, teams = self.holders.capture(state, ranks, problem)
        arranged, tensors = self._arranger.arrange(captured, ranks, teams)
        unchanged = since or Versions(captured)
        if turn is None:
            return Taken(captured, arranged, tensors, {}, {}, unchanged)
        if turn & (turn - 1):
            return Taken(captured, arranged, tensors, digests_of_samples(state, captured, turn), {}, unchanged)
        of_values, of_unions = digests(state, captured), digests_of_union(state, captured, teams)
        return Taken(captured, arranged, tensors, of_values, of_unions, unchanged)

    def copy(self, taken: Taken, ranks: Ranks, handle: SaveHandle, metrics: Mapping[str, float]) -> Staged:
        """Copy it to memory that no save in flight is written from, as the save of `handle`. Raises `SaveFailed` if
        there is none, and if the state has changed meanwhile."""
        staging = self.buffers.take(taken.arranged.plan.size if taken.tensors else 0, handle)
        captured, arranged = taken.captured, taken.arranged
        data = staging.fill(arranged.plan, taken.tensors) if taken.tensors else None
        if (changed := taken.unchanged.changed()) is not None:
            raise SaveFailed(
                f"step {handle.step} was not saved: {changed} changed while it was copied, and a commit would hold "
                "another step, or parts of two. Call save() in the thread that trains: it returns as soon as the state "
                "is copied, and writes in a thread of its own. Or let training wait until the other thread has saved"
            )
        return Staged(
            handle.step, handle.save_id, ranks.rank, ranks.world_size, data, arranged.entries,
            captured.own_values, {k: v for k, v in captured.values.items() if k not in captured.unions},
            arranged.checked, self._nonfinite, taken.digests,
            {k: captured.values[k] for k in sorted(captured.unions)}, taken.union_digests, metrics,
        )  # fmt: skip
