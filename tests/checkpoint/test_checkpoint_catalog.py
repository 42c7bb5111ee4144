"""Commits seen from outside of training: listed, found, pinned and cleaned up beside the run that has the log."""

from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.checkpoint import CheckpointError
from everstep.checkpoint.format.layout import DATA
from everstep.checkpoint.retention import pins
from everstep.checkpoint.retention.catalog import Catalog
from everstep.storage import MemoryStore, StoreUnusable
from everstep.storage.backends.local import LocalStore
from everstep.storage.faults import Fail, FaultStore


def steps_of(store: Any) -> list[int]:
    return [found.step for found in Catalog(store).list()]


def test_list_gives_the_commits_that_have_their_data_newest_first(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2, 3, 4, 5)
    found = Catalog(store).list()
    assert [f.step for f in found] == [5, 4, 3]
    assert [f.n for f in found] == [5, 4, 3]
    assert found[0].bytes == sum(len(v) for k, v in store.objects.items() if k.startswith(f"data/{found[0].save_id}/"))
    assert (found[0].pinned, found[0].missing, found[0].world_size) == (False, (), 1)


def test_list_of_an_empty_store_is_empty_and_finding_says_so() -> None:
    catalog = Catalog(MemoryStore("empty"))
    assert (catalog.list(), catalog.latest()) == ((), None)
    with pytest.raises(CheckpointError, match="memory://empty: there is no commit"):
        catalog.find()


def test_list_names_the_shards_that_are_missing_or_of_another_size(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2, 3)
    two, three = sorted(k for k in store.objects if k.startswith(DATA))[1:]
    store.objects[two] = store.objects[two][:-1]
    store.objects[three.replace("safetensors", "txt")] = store.objects.pop(three)
    assert [(f.step, f.missing) for f in Catalog(store).list()] == [(3, (three,)), (2, (two,)), (1, ())]


def test_state_without_tensors_is_listed_too() -> None:
    store = MemoryStore()
    with everstep.Checkpointer(store=store) as checkpointer:
        checkpointer.restore({"epoch": 0})
        for step in (1, 2):
            checkpointer.save(step, {"epoch": step}).wait(30)
    assert steps_of(store) == [2, 1]


def test_commit_is_found_by_step_and_by_number_and_by_nothing_else(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(10, 20, keep=9)
    runs(store).save(20, 30, keep=9)
    catalog = Catalog(store)
    assert (catalog.find().step, catalog.find(10).n, catalog.find(20).n, catalog.find(n=2).step) == (30, 1, 4, 20)
    asked: tuple[tuple[dict[str, Any], str], ...] = (
        ({"step": 11}, "no commit of step 11; there are steps 30, 20, 20, 10"),
        ({"n": 3}, "record 3 is no commit"), ({"n": 9}, "record 9 cannot be read"),
        ({"n": 2, "step": 30}, "record 2 is of step 20, not 30"),
    )  # fmt: skip
    for ask, text in asked:
        with pytest.raises(CheckpointError, match=text):
            catalog.find(**ask)


def test_checkpointer_looks_without_taking_the_log(runs: Any) -> None:
    store = MemoryStore()
    run, _ = runs(store).begin()
    run.save(1, runs.state(1)).wait(30)
    other = everstep.Checkpointer(store=store)
    assert [f.step for f in other.list()] == [1]
    assert other.verify(1) == ()
    assert other.pin(1).pinned
    assert other.gc() == ()
    run.save(2, runs.state(2)).wait(30)  # it is not fenced
    latest = other.latest()
    assert latest is not None
    assert latest.step == 2


def test_pinned_commit_outlives_every_clean_up_until_it_is_unpinned(runs: Any) -> None:
    # Case 84: of this writer, of a later one, and of the command line.
    store = MemoryStore()
    run, _ = runs(store).begin()
    run.save(1, runs.state(1)).wait(30)
    catalog = Catalog(store)
    catalog.pin(1)
    for step in range(2, 6):
        run.save(step, runs.state(step)).wait(30)
    run.close()
    runs(store).save(6, 7, 8, 9)
    catalog.gc(1)
    assert steps_of(store) == [9, 1]
    assert [f.pinned for f in catalog.list()] == [False, True]
    assert catalog.verify(1) == ()
    catalog.unpin(1)
    assert [d.reason for d in catalog.gc(1)] == ["abandoned"]
    assert steps_of(store) == [9]


def test_pin_of_a_commit_whose_data_is_gone_is_refused_and_leaves_nothing(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2, 3)
    for name in [name for name in store.objects if name.startswith(f"{DATA}{Catalog(store).find(1).save_id}/")]:
        del store.objects[name]
    with pytest.raises(CheckpointError, match=r"step 1 .* cannot be pinned.*is missing"):
        Catalog(store).pin(1)
    assert pins.held_saves(store) == frozenset()


def test_pin_during_a_deletion_that_died_is_refused_and_the_next_clean_up_ends_it(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    identifier = Catalog(store).find(1).save_id
    faulty = FaultStore(store, {2: Fail(StoreUnusable("the cleaner dies here"))})
    with pytest.raises(StoreUnusable):
        pins.delete_save(faulty, identifier, [n for n in store.objects if identifier in n])
    with pytest.raises(CheckpointError, match="the deletion of step 1"):
        pins.pin(store, Catalog(store).find(1), "now", sleep=lambda _: None)
    Catalog(store).gc(1)
    assert not [n for n in store.objects if identifier in n]


def test_gc_beside_a_run_spares_the_save_in_flight_and_tells_what_it_would_do(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2, 3)
    run, _ = runs(store).begin()
    run.save(4, runs.state(4)).wait(30)
    runs.settle(run)
    store.put("data/000000000004-aaaaaaaa-00000009/00001.safetensors", b"of a save in flight")
    store.put("data/000000000000-aaaaaaaa-00000009/00001.safetensors", b"of a writer that is fenced")
    before = dict(store.objects)
    catalog = Catalog(store)
    planned = catalog.gc(1, really=False)
    assert store.objects == before
    assert catalog.gc(1) == planned
    assert steps_of(store) == [4]
    assert [n for n in store.objects if "aaaaaaaa" in n] == ["data/000000000004-aaaaaaaa-00000009/00001.safetensors"]


def test_gc_does_not_count_commits_whose_shards_are_not_there(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2, 3)
    newest = Catalog(store).list()[0]
    for name in [n for n in store.objects if newest.save_id in n]:
        del store.objects[name]
    Catalog(store).gc(1)
    assert steps_of(store) == [2]
    assert runs(store).restored() == 2


def test_gc_of_no_commit_at_all_is_refused(runs: Any) -> None:
    with pytest.raises(CheckpointError, match="keep=0"):
        Catalog(MemoryStore()).gc(0)
    assert Catalog(MemoryStore()).gc(1) == ()


def test_uploads_that_dead_writers_left_are_swept_once_by_the_next_one(runs: Any) -> None:
    # Case 70: the bound is a day, because a younger upload may still be somebody's.
    store = FaultStore(MemoryStore())
    runs(store).save(1, 2, 3)
    assert store.calls.count("sweep ") == 1


def test_gc_removes_unfinished_uploads_of_fenced_writers_and_a_dry_run_names_them(tmp_path: Path, runs: Any) -> None:
    store = LocalStore(tmp_path, part_size=2**20)
    runs(store).save(1)
    runs(store).save(2)  # record 2 opens the log
    dead, own = "000000000000-aaaaaaaa-00000009", "000000000002-aaaaaaaa-00000009"
    for save in (dead, own):
        store.start_upload(f"data/{save}/00000.safetensors").write_part(0, bytes(2**20))
    unfinished = sorted(tmp_path.rglob(".tmp-*"))
    planned = Catalog(store).gc(3, really=False)
    assert [(d.save_id, d.reason) for d in planned] == [(dead, "left unfinished by a killed writer")]
    assert sorted(tmp_path.rglob(".tmp-*")) == unfinished
    assert Catalog(store).gc(3) == planned
    assert [path.parent.name for path in tmp_path.rglob(".tmp-*")] == [own]
    assert Catalog(store).gc(3) == ()
