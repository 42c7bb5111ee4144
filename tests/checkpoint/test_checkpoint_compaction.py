"""The log of a long run stays small: records of deleted commits are compacted, in their places, and nothing is lost."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint import CheckpointError, NoCommit
from everstep.checkpoint.format.layout import LOG, record_name
from everstep.checkpoint.format.manifest import (
    SMALL_BYTES,
    CommitRecord,
    OpenRecord,
    compacted,
    encode_record,
    is_compacted,
)
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.retention.catalog import Catalog
from everstep.checkpoint.retention.cleaner import Compactor
from everstep.storage import MemoryStore, RetryableError
from everstep.storage.faults import FaultStore
from everstep.storage.upload import Data


def wide(step: int = 0) -> dict[str, Any]:
    """A state of many small tensors: what is large is its description."""
    return {"weights": {f"layer.{i}": torch.full((2,), float(step)) for i in range(40)}, "step": step}


def train(store: Any, *steps: int, **options: Any) -> int | None:
    """A run that restores, saves these steps and ends in order; what it restored."""
    with everstep.Checkpointer(store=store, **options) as checkpointer:
        state = wide()
        start = checkpointer.restore(state)
        assert set(state["weights"]["layer.7"].tolist()) == {float(start or 0)}
        for step in steps:
            checkpointer.save(step, wide(step)).wait(30)
    return start


def large(store: MemoryStore) -> list[int]:
    """The numbers of the records that are not small."""
    sizes = {name: len(data) for name, data in store.objects.items() if name.startswith(LOG)}
    return [n for n in range(len(sizes)) if sizes[record_name(n)] > SMALL_BYTES]


def test_log_of_a_long_run_holds_whole_records_of_the_kept_commits_only() -> None:
    store = MemoryStore()
    train(store, *range(1, 21), keep=2)
    assert large(store) == [19, 20]
    assert train(store) == 20
    assert CommitLog(store).head().last == 21, "the log has each of its records still"


def test_records_that_earlier_releases_and_crashes_left_are_compacted_too() -> None:
    store = MemoryStore()
    train(store, *range(1, 7), keep=1)
    old = {n: CommitLog(store).read(n) for n in range(1, 6)}
    newest = CommitLog(store).read(6)
    assert isinstance(newest, CommitRecord)
    for n, record in old.items():
        assert isinstance(record, CommitRecord)
        shards = tuple(replace(s, path=record.shards[0].path) for s in newest.shards)
        whole = replace(record, shards=shards, entries=newest.entries, values=newest.values)
        store.objects[record_name(n)] = encode_record(whole)
    assert large(store) == [1, 2, 3, 4, 5, 6]
    train(store, 7, keep=1)
    assert large(store) == [8]
    assert {n: CommitLog(store).read(n) for n in range(1, 6)} == old, "and they are what they were"


def test_gc_compacts_what_it_deletes_and_what_was_deleted_before() -> None:
    store = MemoryStore()
    train(store, *range(1, 6), keep=5)
    assert large(store) == [1, 2, 3, 4, 5]
    Catalog(store).gc(2, really=False)
    assert large(store) == [1, 2, 3, 4, 5]
    Catalog(store).gc(2)
    assert large(store) == [4, 5]
    assert train(store) == 5


def test_pinned_commit_keeps_its_record_until_it_is_unpinned_and_old() -> None:
    store = MemoryStore()
    train(store, 1, keep=1)
    Catalog(store).pin(1)
    train(store, 2, 3, keep=1)
    assert large(store) == [1, 4]
    assert everstep.load(store=store, step=1).state["step"] == 1
    Catalog(store).unpin(1)
    train(store, 4, keep=1)
    train(store, 5, keep=1)
    assert large(store) == [8]


def test_commits_without_tensors_are_kept_over_restarts_like_others() -> None:
    store = MemoryStore()
    listed = []
    for steps in ((1, 2, 3), (4,), (5,)):
        with everstep.Checkpointer(store=store, keep=3) as run:
            run.restore({"note": ""})
            for step in steps:
                run.save(step, {"note": str(step) * 2000}).wait(30)
        listed.append([found.step for found in Catalog(store).list()])
    assert listed == [[3, 2, 1], [4, 3, 2], [5, 4, 3]]
    assert everstep.load(store=store, step=3).state["note"] == "3" * 2000


@pytest.mark.parametrize("pinned", [True, False])
def test_state_without_tensors_is_all_in_its_record_and_goes_with_it_unless_it_is_pinned(pinned: bool) -> None:
    store = MemoryStore()
    with everstep.Checkpointer(store=store, keep=1) as run:
        run.restore({"note": ""})
        run.save(1, {"note": "1" * 2000}).wait(30)
        run.wait(30)
        if pinned:
            Catalog(store).pin(1)
        for step in (2, 3):
            run.save(step, {"note": str(step) * 2000}).wait(30)
    if pinned:
        assert everstep.load(store=store, step=1).state["note"] == "1" * 2000
    else:
        with pytest.raises(NoCommit, match="no commit of step 1: it was deleted, and record 1 is compacted"):
            everstep.load(store=store, step=1)
    with pytest.raises(NoCommit, match=r"step 2 .record 2. was deleted, and its record is compacted"):
        everstep.load(store=store, n=2)
    assert everstep.load(store=store).state["note"] == "3" * 2000


@pytest.mark.parametrize("how", ["pin", "tag"])
def test_record_of_a_held_commit_stays_while_its_shards_are_away(how: str) -> None:
    """A folder that was moved to other storage, or is still being restored from a backup."""
    store = MemoryStore()
    train(store, *range(1, 4), keep=10)
    catalog = Catalog(store)
    record = catalog.find(1)
    if how == "tag":
        catalog.tag("good", 1)
    else:
        catalog.pin(1)
    away = {s.path: store.objects.pop(s.path) for s in record.shards}
    train(store, 4, 5, keep=1)
    catalog.gc(1)
    compactor = Compactor(store)
    compactor.retire([record])
    assert compactor.run(()) == 0
    store.objects |= away
    assert catalog.verify(1) == ()
    assert catalog.find(1) == record


def test_pin_that_meets_a_compaction_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    with everstep.Checkpointer(store=store) as run:
        run.restore({"note": ""})
        run.save(1, {"note": "1"}).wait(30)
    catalog = Catalog(store)
    record = catalog.find(1)
    find = catalog.find

    def found_just_before(step: int | None = None, n: int | None = None) -> CommitRecord:
        del step, n
        CommitLog(store).compact(record)
        return record

    monkeypatch.setattr(catalog, "find", found_just_before)
    with pytest.raises(CheckpointError, match=r"step 1 .record 1. cannot be pinned: it was deleted"):
        catalog.pin(1)
    assert not [name for name in store.objects if name.startswith("pins/")]
    with pytest.raises(NoCommit):
        find(1)


def test_commits_that_are_gone_are_never_an_empty_state(events: Any) -> None:
    """All that is kept was lost; behind it are only compacted records."""
    store = MemoryStore()
    train(store, *range(1, 7), keep=1)
    for name in [name for name in store.objects if name.startswith("data/")]:
        del store.objects[name]
    run = everstep.Checkpointer(store=store, on_event=events)
    with pytest.raises(CheckpointError, match="none of the 1 commits that were tried can be read whole"):
        run.restore(wide())
    told = [e["error"] for e in events.of("stepped-over")]
    assert [("is missing" in text, "compacted" in text) for text in told] == [(True, False), (False, True)]
    with pytest.raises(CheckpointError, match="none of the commits that were tried can be read whole"):
        everstep.load(store=store)
    del store.objects[record_name(6)]
    with pytest.raises(CheckpointError, match=r"the log holds records, but no commit can be taken: .*compacted"):
        everstep.Checkpointer(store=store).restore(wide())


def test_reader_that_knew_the_log_before_reads_the_newest_commit_anew() -> None:
    store = MemoryStore()
    train(store, 1, 2, keep=1)

    class Slow(FaultStore):
        def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
            if not moved:
                moved.append(True)
                train(store, 3, 4, keep=1)
            super().get_into(name, start, *buffers)

    moved: list[bool] = []
    assert everstep.load(store=Slow(store)).step == 4


def test_compaction_that_fails_costs_no_save_and_is_done_later(caplog: Any) -> None:
    store = MemoryStore()

    class Refusing(FaultStore):
        def put(self, name: str, data: Data) -> None:
            if name.startswith(LOG):
                raise RetryableError("the store has a bad day")
            super().put(name, data)

    assert train(Refusing(store), 1, 2, 3, keep=1) is None
    assert "clean-up after a commit failed" in caplog.text
    assert large(store) == [1, 2, 3]
    assert train(store, 4, keep=1) == 3
    assert large(store) == [5]


def test_compacted_record_is_the_same_for_everybody_and_small() -> None:
    store = MemoryStore()
    train(store, 1, 2, keep=1)
    record = CommitLog(store).read(1)
    assert isinstance(record, CommitRecord)
    assert is_compacted(record)
    assert compacted(record) == record
    assert (record.n, record.step, record.open, record.commit) == (1, 1, 0, -1)
    assert len(encode_record(record)) < SMALL_BYTES
    assert isinstance(opened := CommitLog(store).read(0), OpenRecord)
    assert not is_compacted(opened)
