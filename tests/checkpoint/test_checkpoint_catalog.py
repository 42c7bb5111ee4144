"""Commits seen from outside of training: listed, found, pinned and cleaned up beside the run that has the log."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

import everstep
from everstep.checkpoint import CheckpointError, pins
from everstep.checkpoint.catalog import Catalog
from everstep.checkpoint.keep import Kept
from everstep.checkpoint.layout import DATA, deletion_name, kept_name, pin_name, tag_name
from everstep.storage import MemoryStore, StoreUnusable
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
    for ask, text in (
        ({"step": 11}, "no commit of step 11; there are 30, 20, 20, 10"),
        ({"n": 3}, "record 3 is no commit"), ({"n": 9}, "record 9 cannot be read"),
        ({"n": 2, "step": 30}, "record 2 is of step 20, not 30"),
    ):  # fmt: skip
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
    assert pins.held(store) == frozenset()


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


class Turns(MemoryStore):
    """Two threads take turns at the store's calls, as a schedule says; the rest runs as it comes."""

    def __init__(self, inner: MemoryStore, schedule: list[int]) -> None:
        super().__init__()
        self.objects = inner.objects
        self._schedule = list(schedule)
        self._turn = threading.Condition()
        self._ended = set[int]()

    def as_actor(self, actor: int) -> "Actor":
        return Actor(self, actor)

    def wait(self, actor: int) -> None:
        with self._turn:
            while True:
                while self._schedule and self._schedule[0] in self._ended:
                    self._schedule.pop(0)
                if not self._schedule or self._schedule[0] == actor:
                    break
                assert self._turn.wait(10)

    def done(self, actor: int, *, ended: bool = False) -> None:
        with self._turn:
            if ended:
                self._ended.add(actor)
            elif self._schedule:
                self._schedule.pop(0)
            self._turn.notify_all()


class Actor:
    def __init__(self, turns: Turns, actor: int) -> None:
        self._turns, self._actor = turns, actor
        self.url = "memory://turns"

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._turns.wait(self._actor)
            try:
                return getattr(self._turns, name)(*args)
            finally:
                self._turns.done(self._actor)

        return call


@pytest.mark.parametrize("hold", ["pin", "tag", "kept"])
def test_hold_and_deletion_that_meet_never_both_succeed_in_any_order(runs: Any, hold: str) -> None:
    # Case 84, exhaustively: every order of the first ten calls of the two.
    original = MemoryStore()
    runs(original).save(1, 2)
    record = Catalog(original).find(1)
    identifier = record.save_id
    name = {"pin": pin_name(identifier), "tag": tag_name(identifier, "good"), "kept": kept_name(identifier)}[hold]
    seen = set[tuple[bool, bool]]()
    for ones in itertools.chain.from_iterable(itertools.combinations(range(10), k) for k in range(11)):
        store = MemoryStore()
        store.objects = dict(original.objects)
        turns = Turns(store, [int(i in ones) for i in range(10)])
        result: dict[int, bool] = {}

        def act(actor: int, body: Callable[[Any], bool], turns: Turns = turns, result: Any = result) -> None:
            try:
                result[actor] = body(turns.as_actor(actor))
            finally:
                turns.done(actor, ended=True)

        def pin(view: Any) -> bool:
            try:
                match hold:
                    case "pin":
                        pins.pin(view, record, "now", sleep=lambda _: None)
                    case "tag":
                        pins.tag(view, record, "good", "now", sleep=lambda _: None)
                    case "kept":
                        return pins.mark_kept(
                            view, Kept(record.save_id, record.n, 1, 0.0, {}, ("steps",)), record.shards
                        )
            except CheckpointError:
                return False
            return True

        def delete(view: Any) -> bool:
            return pins.delete_save(view, record.save_id, [s.path for s in record.shards])

        threads = [threading.Thread(target=act, args=(0, pin)), threading.Thread(target=act, args=(1, delete))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        granted, deleted = result[0], result[1]
        seen.add((granted, deleted))
        assert not (granted and deleted), ones
        assert (name in store.objects) == granted, ones
        assert deletion_name(record.save_id) not in store.objects, ones
        assert all(s.path in store.objects for s in record.shards) != deleted, ones
    assert {(True, False), (False, True)} <= seen


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


def test_gc_sweeps_uploads_too_and_a_dry_run_does_not(runs: Any) -> None:
    store = FaultStore(MemoryStore())
    runs(store).save(1)
    before = store.calls.count("sweep ")
    Catalog(store).gc(1, really=False)
    assert store.calls.count("sweep ") == before
    Catalog(store).gc(1)
    assert store.calls.count("sweep ") == before + 1
