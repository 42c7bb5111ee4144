"""Agreements among the ranks of one world before and between saves, over torch.distributed or alone.

Called from the training thread only, at points that every rank reaches in the same order; the thread that writes never
uses a process group, because a save must survive the death of a peer. Bytes travel as tensors: no pickle here either.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from everstep.checkpoint.errors import SettingUnusable

log = logging.getLogger("everstep.checkpoint")

_LENGTH = 8  # bytes in front of a rank's data, which tell its length
PATIENCE = 20.0  # seconds after which a rank logs that it waits


class Ranks(Protocol):
    """This rank's view of its world."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def from_first(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""

    def from_each(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""

    def maximum(self, value: int) -> int:
        """The greatest of all ranks' values."""

    def broadcast(self, data: torch.Tensor, source: int) -> Any:
        """Begin to copy rank `source`'s `data` into every other rank's; the `wait()` of what is returned ends it."""

    @property
    def group(self) -> Any:
        """The process group whose ranks these are; None for the default one, or none."""


class Alone:
    """A world of one."""

    rank = 0
    world_size = 1
    group = None

    def from_first(self, data: bytes) -> bytes:
        return data

    def from_each(self, data: bytes) -> list[bytes]:
        return [data]

    def maximum(self, value: int) -> int:
        return value

    def broadcast(self, data: torch.Tensor, source: int) -> Any:
        raise AssertionError("a world of one has nobody to broadcast to")


class Broadcasting:
    """Bytes to all ranks, over whatever collectives a world has."""

    rank: int

    def broadcast(self, data: torch.Tensor, source: int) -> Any:
        raise NotImplementedError

    def maximum(self, value: int) -> int:
        raise NotImplementedError

    def all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order. All have one shape and type."""
        raise NotImplementedError

    def from_first(self, data: bytes) -> bytes:
        return self.from_rank(0, data)

    def from_rank(self, source: int, data: bytes) -> bytes:
        """Rank `source`'s bytes, on every rank."""
        length = torch.tensor([len(data)], dtype=torch.int64)
        self.broadcast(length, source).wait()
        buffer = bytearray(data) if self.rank == source else bytearray(int(length.item()))
        if buffer:
            self.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), source).wait()
        return bytes(buffer)

    def from_each(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order: two collectives, however many ranks there are."""
        mine = torch.zeros(_LENGTH + self.maximum(len(data)), dtype=torch.uint8)
        framed = bytearray(len(data).to_bytes(_LENGTH, "little") + data)
        mine[: len(framed)] = torch.frombuffer(framed, dtype=torch.uint8)
        frames = (frame.numpy() for frame in self.all_gather(mine))
        return [frame[_LENGTH:][: int.from_bytes(frame[:_LENGTH].tobytes(), "little")].tobytes() for frame in frames]


class _Patience:
    """Logs a warning when a rank waits long for the others: maybe they do not make the same calls. One thread looks now
    and then, so the cost for a collective is two assignments."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._rank = 0
        self._watching = 0  # the process

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        if self._watching != os.getpid():
            self._watching = os.getpid()
            threading.Thread(target=self._watch, name="everstep-patience", daemon=True).start()
        self._rank, self._since = rank, time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def _watch(self) -> None:
        logged: float | None = None  # the beginning of the wait that a warning was logged for
        while True:
            time.sleep(PATIENCE / 4)
            since = self._since
            if since is not None and since != logged and time.monotonic() - since > PATIENCE:
                logged = since
                log.warning(
                    "rank %d has waited %.0f s for the other ranks: every rank calls restore(), should_save(), save() "
                    "and load(). If only some do, take `if rank == 0` away",
                    self._rank, PATIENCE,
                )  # fmt: skip


_patience = _Patience()


class Group(Broadcasting):
    """A world over a process group that moves CPU tensors. None is the default group."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def maximum(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64)
        with _patience.of(self.rank):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return int(tensor.item())

    def from_rank(self, source: int, data: bytes) -> bytes:
        with _patience.of(self.rank):
            return super().from_rank(source, data)

    def all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(data) for _ in range(self.world_size)]
        with _patience.of(self.rank):
            dist.all_gather(gathered, data, group=self._group)
        return gathered

    def broadcast(self, data: torch.Tensor, source: int) -> Any:
        from_rank = source if self._group is None else dist.get_global_rank(self._group, source)
        return dist.broadcast(data, from_rank, group=self._group, async_op=True)


def join(process_group: Any, rank: int | None, world_size: int | None) -> Ranks:
    """The world this process is in. Collective where there is a process group.

    Raises `SettingUnusable` if a world of several ranks is asked for, and no process group connects them.
    """
    if dist.is_available() and dist.is_initialized():
        group = process_group
        if group is None and "gloo" not in str(dist.get_backend_config()):
            group = dist.new_group(backend="gloo")  # NCCL moves no CPU tensors
        ranks: Ranks = Group(group)
    else:
        size = world_size if world_size is not None else int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1:
            raise SettingUnusable(
                f"WORLD_SIZE is {size} but torch.distributed is not initialised: call "
                "torch.distributed.init_process_group() before restore() or save()"
            )
        ranks = Alone()
    for name, passed, actual in (("rank", rank, ranks.rank), ("world_size", world_size, ranks.world_size)):
        if passed is not None and passed != actual:
            raise SettingUnusable(f"{name}={passed} was passed, but the process group says {actual}")
    return ranks
