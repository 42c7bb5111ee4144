"""How what each rank says of a save comes together: by reads at the same time, and by one exchange."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint.errors import FormatError, SaveFailed
from everstep.checkpoint.flag import Flag
from everstep.checkpoint.format.layout import part_name
from everstep.checkpoint.format.manifest import Part, PartFailed, encode_part
from everstep.checkpoint.ranks import Broadcasting
from everstep.checkpoint.save.parts import Staged, Wait, gather_parts
from everstep.checkpoint.state.holders import Holders
from everstep.storage import MemoryStore, TerminalError

SAVE = "3-w0-1"
RANKS = 64
LATENCY = 0.05  # seconds
TOGETHER = 8  # reads that have to be in flight at a time


class Distant(MemoryStore):
    """A store of 50 ms latency, in which a read waits until `together` reads are in flight."""

    def __init__(self, together: int = 1) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._together = together
        self._now = self.most = self.reads = 0

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        with self._changed:
            self._now, self.reads = self._now + 1, self.reads + 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self.most >= self._together, 30):
                raise TerminalError(f"{name}: {self.most} reads at a time, and no more")
        try:
            time.sleep(LATENCY)
            return super().get(name, start, end)
        finally:
            with self._changed:
                self._now -= 1


def part(rank: int) -> Part:
    return Part(rank, SAVE, None, (), {})


def gathered(store: MemoryStore, said: Callable[[int], bytes] = lambda rank: encode_part(part(rank))) -> list[Part]:
    for rank in range(1, RANKS):
        store.put(part_name(SAVE, rank), said(rank))
    staged = Staged(7, SAVE, 0, RANKS, None, (), {}, {})
    return gather_parts(store, staged, part(0), Wait(60.0), Flag())


def test_parts_are_read_several_at_a_time_and_come_in_the_ranks_order() -> None:
    store = Distant(TOGETHER)
    assert [found.rank for found in gathered(store)] == list(range(RANKS))
    assert store.reads == RANKS - 1
    assert TOGETHER <= store.most <= 16, "bounded, whatever the number of ranks"


def test_damaged_part_is_named_and_most_of_the_others_are_left_unread() -> None:
    store = Distant()
    with pytest.raises(FormatError, match=part_name(SAVE, 5)):
        gathered(store, lambda rank: b"{" if rank == 5 else encode_part(part(rank)))
    assert store.reads < RANKS - 1
    assert store._now == 0, "no read goes on behind the save"


def test_rank_that_gave_up_is_named_with_its_reason_the_first_of_several() -> None:
    def said(rank: int) -> bytes:
        return encode_part(PartFailed(rank, SAVE, "its disk is full") if rank in (9, 3) else part(rank))

    with pytest.raises(SaveFailed, match="step 7: rank 3 gave up: its disk is full"):
        gathered(Distant(), said)


class Threads:
    """What the ranks, threads of this process, tell each other."""

    def __init__(self, size: int) -> None:
        self._all = threading.Barrier(size, timeout=60)
        self._told: list[Any] = [None] * size

    def tell(self, rank: int, value: Any) -> list[Any]:
        self._told[rank] = value
        self._all.wait()
        found = list(self._told)
        self._all.wait()
        return found


class Rank(Broadcasting):
    def __init__(self, rank: int, threads: Threads, world_size: int = 1) -> None:
        self.rank, self.world_size, self.group = rank, world_size, None
        self._threads = threads
        self.collectives = 0

    def maximum(self, value: int) -> int:
        self.collectives += 1
        return int(max(self._threads.tell(self.rank, value)))

    def all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        self.collectives += 1
        found: list[torch.Tensor] = self._threads.tell(self.rank, data)
        assert len({each.shape for each in found}) == 1, "a collective of tensors of one shape"
        return found


@pytest.mark.parametrize("said", [[b""], [b"", b""], [b"a", b"", b"\x00" * 3, bytes(range(256)) * 40]])
def test_ranks_tell_each_other_bytes_of_any_length_in_one_exchange(said: list[bytes]) -> None:
    threads = Threads(len(said))
    ranks = [Rank(i, threads) for i in range(len(said))]
    with ThreadPoolExecutor(len(said)) as pool:
        found = list(pool.map(lambda one: one.from_each(said[one.rank]), ranks))
    assert found == [said] * len(said)
    assert {one.collectives for one in ranks} == {2}, "however many ranks there are"


@pytest.mark.parametrize("size", [2, 5])
def test_saves_of_a_union_take_as_many_collectives_however_many_ranks_there_are(size: int) -> None:
    """Three in the first save, of which two exchange who holds what; one in each that follows."""
    threads = Threads(size)

    def save(rank: int) -> list[int]:
        one, holders, found = Rank(rank, threads, size), Holders(), []
        state = {"experts": everstep.Union({f"expert{rank}": torch.ones(4), "shared": torch.ones(2)})}
        assert holders.agree_on_unions(state, one)
        for _ in range(3):
            before = one.collectives
            _, teams = holders.capture(state, one, None)
            assert teams["experts/shared"] == tuple(range(size))
            found.append(one.collectives - before)
        return found

    with ThreadPoolExecutor(size) as pool:
        assert list(pool.map(save, range(size))) == [[3, 1, 1]] * size
