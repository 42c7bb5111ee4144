"""Host memory of saves that a change of the world abandons while the store is stuck."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import everstep
from everstep.checkpoint import SaveFailed
from everstep.checkpoint.handle import SaveHandle
from everstep.checkpoint.in_session import InSession
from everstep.checkpoint.ranks import Alone
from everstep.checkpoint.save import snapshot
from everstep.storage import MemoryStore
from everstep.storage.upload import Data

SIZE = 2**22  # bytes of a state


class Stuck(MemoryStore):
    """Takes no shard until `opened`."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def put(self, name: str, data: Data) -> None:
        if name.startswith("data/"):
            assert self.opened.wait(60)
        super().put(name, data)


@pytest.fixture
def store() -> Iterator[Stuck]:
    stuck = Stuck()
    yield stuck
    stuck.opened.set()


def state(value: float) -> dict[str, object]:
    return {"t": {"w": torch.full((SIZE // 4,), float(value))}}


def abandon(run: everstep.Checkpointer, worlds: range) -> list[SaveHandle]:
    """A save in each of these worlds, of which each abandons that of the world before."""
    saves = []
    for n in worlds:
        InSession(run).move(Alone(), n)
        saves.append(run.save(n, state(n)))
    return saves


def test_abandoned_saves_hold_a_bounded_memory_and_what_comes_then_is_left_out_with_words(store: Stuck) -> None:
    run = everstep.Checkpointer(store=store)
    run.restore(state(0))
    saves = abandon(run, range(1, 11))
    held = run._snapshots.buffers.size
    assert held <= snapshot.MOST * (SIZE + 2**16), "whatever the number of abandoned saves"
    assert [save.done() for save in saves] == [False] * snapshot.MOST + [True] * (10 - snapshot.MOST)
    with pytest.raises(SaveFailed, match=rf"4 saves, abandoned ones among them, .* {held} bytes"):
        saves[-1].wait(0)
    store.opened.set()
    for save in saves[: snapshot.MOST]:
        save._done.wait(60)
    (last,) = abandon(run, range(11, 12))
    last.wait(60)
    assert run._snapshots.buffers.size <= snapshot.OF_A_WRITER * (SIZE + 2**16), "the memory is given back"
    run.close()
    found = state(0)
    with everstep.Checkpointer(store=store) as reader:
        assert reader.restore(found) == 11


def test_save_beside_abandoned_ones_is_left_out_where_its_memory_is_not_free(
    store: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "free_host_memory", lambda: SIZE // 2)
    run = everstep.Checkpointer(store=store)
    run.restore(state(0))
    *first, third = abandon(run, range(1, 4))
    assert [save.done() for save in first] == [False, False], "those of one writer need no look"
    with pytest.raises(SaveFailed, match=rf"{SIZE // 2} are free: it is left out, and the next one may"):
        third.wait(0)
    store.opened.set()
    for save in first:
        save._done.wait(60)
    (last,) = abandon(run, range(4, 5))
    last.wait(60)
    run.close()
