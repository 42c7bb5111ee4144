"""A write that was given up as lost arrives late: a shard's after the commit, or after the save was deleted; that of a
deletion's object after the deletion gave way."""

from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint.retention import pins
from everstep.checkpoint.retention.catalog import Catalog
from everstep.storage import Data, MemoryStore, RetryableError, RetryingStore, RetryPolicy

FAST = RetryPolicy(first=0.001, most=0.01, outage=10.0)


class Slow(MemoryStore):
    """The first write of each object whose name has `part` gets no answer; it is done when `arrive` is called."""

    def __init__(self, part: str = ".safetensors") -> None:
        super().__init__()
        self.part = part
        self.under_way: dict[str, bytes] = {}
        self.arrived: set[str] = set()

    def put(self, name: str, data: Data) -> None:
        if self.part in name and name not in self.under_way | dict.fromkeys(self.arrived):
            self.under_way[name] = bytes(data)
            raise RetryableError(f"no answer to {name}")
        super().put(name, data)

    def arrive(self) -> None:
        for name, data in self.under_way.items():
            super().put(name, data)
        self.arrived |= self.under_way.keys()
        self.under_way = {}


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((100,), float(step))}


@pytest.mark.parametrize("saves", [1, 4])
def test_shard_that_arrives_late_changes_no_commit_and_is_cleaned_up(saves: int) -> None:
    store = Slow()
    steps = range(1, saves + 1)
    with everstep.Checkpointer(store=RetryingStore(store, FAST), keep=1) as run:
        run.restore(state_of(0))
        for step in steps:
            run.save(step, state_of(step)).wait(30)
    newest = Catalog(store).find()
    before = {info.name for info in store.list("data/")}
    assert len(store.under_way) == saves
    store.arrive()  # also those of saves that are deleted by now
    assert len({info.name for info in store.list("data/")}) == len(before) + saves - 1
    assert Catalog(store).verify(newest.step) == ()
    with everstep.Checkpointer(store=RetryingStore(store, FAST), keep=1) as run:
        found = state_of(0)
        assert run.restore(found) == saves
        assert torch.equal(found["w"], state_of(saves)["w"])
        run.save(saves + 1, state_of(saves + 1)).wait(30)
    (left,) = {info.name.split("/")[1] for info in store.list("data/")}
    assert left == Catalog(store).find().save_id


def test_deletion_that_gave_way_and_arrives_late_refuses_no_pin_and_no_clean_up() -> None:
    store = Slow(part="/deleting-")
    retried = RetryingStore(store, FAST)
    with everstep.Checkpointer(store=store, keep=2) as run:
        run.restore(state_of(0))
        for step in (1, 2):
            run.save(step, state_of(step)).wait(30)
    old = Catalog(store).find(1)
    Catalog(store).pin(1)
    assert not pins.delete_save(retried, old.save_id, [shard.path for shard in old.shards])
    store.arrive()
    Catalog(store).tag("good", 1)
    Catalog(store).unpin(1)
    assert Catalog(store).tagged("good").step == 1
    Catalog(store).untag("good")
    Catalog(store).pin(1)
    assert Catalog(store).verify(1) == ()
    Catalog(store).unpin(1)
    Catalog(retried).gc(1)
    store.arrive()  # of the second deletion, which was carried out
    Catalog(retried).gc(1)
    assert {info.name.split("/")[1] for info in store.list("data/")} == {Catalog(store).find(2).save_id}
