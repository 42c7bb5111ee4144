"""Holds of a commit and deletions of it that meet: several of each, in many orders of their calls."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint import Checkpointer, CheckpointError
from everstep.checkpoint.format.layout import is_deletion, save_folder
from everstep.checkpoint.format.manifest import CommitRecord, is_compacted
from everstep.checkpoint.keep import Kept
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.retention import pins
from everstep.checkpoint.retention.catalog import Catalog
from everstep.checkpoint.retention.cleaner import Compactor
from everstep.storage import MemoryStore, ObjectStore, StoreUnusable
from everstep.storage.backends.local import LocalStore
from everstep.storage.faults import Fail, FaultStore

KINDS = ["pin", "tag", "kept"]


def hold(store: Any, record: CommitRecord, kind: str, now: Callable[[], float] = time.time) -> bool:
    """Hold a commit; whether that was granted."""
    try:
        match kind:
            case "pin":
                pins.pin(store, record, "now", sleep=lambda _: None, now=now)
            case "tag":
                pins.tag(store, record, "good", "now", sleep=lambda _: None, now=now)
            case _:
                mark = Kept(record.save_id, record.n, 1, 0.0, {}, ("steps",))
                return pins.mark_kept(store, mark, record.shards, now)
    except CheckpointError:
        return False
    return True


def delete(store: Any, record: CommitRecord) -> bool:
    return pins.delete_save(store, record.save_id, [s.path for s in record.shards])


def deletions(store: ObjectStore, record: CommitRecord) -> list[str]:
    return [info.name for info in store.list(save_folder(record.save_id)) if is_deletion(info.name)]


def shards_left(store: ObjectStore, record: CommitRecord) -> list[bool]:
    return [store.size(s.path) == s.bytes for s in record.shards]


class Meanwhile:
    """A store, and what others do right before one of its calls: the first for which `when` says so."""

    def __init__(self, store: ObjectStore, when: Callable[[str, str], bool], what: Callable[[], object]) -> None:
        self._store, self._when, self._what = store, when, what
        self._done = False
        self.url = store.url

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Any:
            if not self._done and self._when(method, args[0]):
                self._done = True
                self._what()
            return getattr(self._store, method)(*args)

        return call


@pytest.fixture
def one(runs: Any, tmp_path: Path) -> tuple[LocalStore, CommitRecord]:
    """A store of files, and its commit that a clean-up would delete."""
    store = LocalStore(tmp_path / "run")
    runs(store).save(1, 2)
    return store, Catalog(store).find(1)


@pytest.mark.parametrize("kind", KINDS)
def test_deletion_that_gives_way_leaves_the_object_of_another_that_does_not(one: Any, kind: str) -> None:
    # G has looked and found no hold. P writes its own; before it looks for a deletion, W begins one and gives way.
    store, record = one
    told = {}

    def w() -> None:
        told["w"] = delete(store, record)

    def p() -> None:
        looks = Meanwhile(
            store, lambda method, name: method != "put" and name.startswith(save_folder(record.save_id)), w
        )
        told["p"] = hold(looks, record, kind)

    told["g"] = delete(Meanwhile(store, lambda method, _: method == "delete", p), record)
    assert told == {"w": False, "p": False, "g": True}
    assert (deletions(store, record), pins.held_saves(store), shards_left(store, record)) == ([], frozenset(), [False])


@pytest.mark.parametrize("kind", KINDS)
def test_hold_that_is_refused_leaves_one_that_was_granted_before(one: Any, kind: str) -> None:
    # P1's hold was granted. G begins to delete; P2 holds the commit too, is refused and withdraws before G looks.
    store, record = one
    told = {"p1": hold(store, record, kind)}

    def p2() -> None:
        told["p2"] = hold(store, record, kind)

    told["g"] = delete(Meanwhile(store, lambda method, _: method != "put", p2), record)
    assert told == {"p1": True, "p2": False, "g": False}
    assert (deletions(store, record), pins.held_saves(store)) == ([], {record.save_id})  # type: ignore[comparison-overlap]
    assert shards_left(store, record) == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_hold_that_is_taken_again_leaves_one_object_and_all_go_when_it_is_taken_back(one: Any, kind: str) -> None:
    store, record = one
    for _ in range(2):
        assert hold(store, record, kind)
        assert len(store.list("pins/")) == 1
        assert pins.held_saves(store) == {record.save_id}
        assert pins.held_commits(store, pins.holds(store)) == [1]
        assert not delete(store, record)
    if kind == "tag":
        assert pins.untag(store, "good")
    else:
        pins.unpin(store, record)
    assert store.list("pins/") == []
    assert delete(store, record)


def test_tag_that_two_move_at_once_holds_the_commits_of_both(one: Any) -> None:
    # One that is told that its tag was moved may rely on it: it is taken away by a later move, not by one beside it.
    store, record = one
    newest = Catalog(store).find(2)
    hold(Meanwhile(store, lambda method, _: method == "put", lambda: hold(store, record, "tag")), newest, "tag")
    assert pins.held_saves(store) == {record.save_id, newest.save_id}
    with pytest.raises(CheckpointError, match="tag 'good' is on steps 2 and 1"):
        Catalog(store).tagged("good")
    Catalog(store).tag("good", 1)
    assert pins.held_saves(store) == {record.save_id}


def test_what_deleters_that_died_left_goes_with_the_save(one: Any) -> None:
    store, record = one
    for at in (1, 1, 2):  # before it looks, and before its first deletion
        with pytest.raises(StoreUnusable):
            delete(FaultStore(store, {at: Fail(StoreUnusable("the cleaner dies here"))}), record)
    assert len(deletions(store, record)) == 3
    assert not hold(store, record, "pin")
    Catalog(store).gc(1)
    assert store.list(save_folder(record.save_id)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_deleter_that_died_refuses_holds_for_an_hour_and_no_longer(one: Any, kind: str) -> None:
    store, record = one
    with pytest.raises(StoreUnusable):  # after its mark, before its first deletion
        delete(FaultStore(store, {2: Fail(StoreUnusable("the cleaner dies here"))}), record)
    begun = time.time()
    assert not hold(store, record, kind, now=lambda: begun + pins.DEAD - 5), "it may be slow"
    assert hold(store, record, kind, now=lambda: begun + pins.DEAD + 5)
    assert not delete(store, record)
    assert (pins.held_saves(store), shards_left(store, record)) == (frozenset({record.save_id}), [True])
    assert hold(store, record, kind), "what was made void once is void for everybody"


@pytest.mark.parametrize("kind", KINDS)
def test_deleter_that_died_after_it_deleted_a_shard_leaves_nothing_to_hold(one: Any, kind: str) -> None:
    store, record = one
    with pytest.raises(StoreUnusable):
        delete(FaultStore(store, {3: Fail(StoreUnusable("the cleaner dies here"))}), record)
    assert (len(deletions(store, record)), shards_left(store, record)) == (1, [False])
    assert not hold(store, record, kind, now=lambda: time.time() + 2 * pins.DEAD)
    assert pins.held_saves(store) == frozenset()


@pytest.mark.parametrize("slow", ["now", "clock"])
@pytest.mark.parametrize("looks", [1, 2])
def test_deletion_that_takes_too_long_gives_way_and_the_next_one_ends_it(one: Any, slow: str, looks: int) -> None:
    store, record = one
    times = itertools.chain([0.0] * looks, itertools.repeat(pins.LASTS + 1))  # before or after its deletion
    names = [info.name for info in store.list(save_folder(record.save_id))]
    ended: list[int] = []
    options: dict[str, Any] = {slow: lambda: next(times)}
    assert not pins.delete_save(store, record.save_id, names, lambda: ended.append(1), **options)
    assert (deletions(store, record), shards_left(store, record), ended) == ([], [looks < 2], [])
    assert hold(store, record, "pin") == (looks < 2)
    pins.unpin(store, record)
    assert Catalog(store).gc(1)
    assert store.list(save_folder(record.save_id)) == []


def test_mark_whose_replacement_was_cut_off_says_what_both_say(one: Any) -> None:
    store, record = one
    names = []
    for why in ("steps", "best loss"):
        assert pins.mark_kept(store, Kept(record.save_id, record.n, 1, 5.0, {"loss": 1.0}, (why,)), record.shards)
        names += pins.holds(store).names(record.save_id, "kept")
        if why == "steps":
            first = store.get(names[0])
    store.put(names[0], first)  # as if its deletion had not been done
    mark = pins.read_kept(store, record.save_id, pins.holds(store).names(record.save_id, "kept"))
    assert mark == Kept(record.save_id, record.n, 1, 5.0, {"loss": 1.0}, ("best loss", "steps"))
    assert pins.mark_kept(store, Kept(record.save_id, record.n, 1, 0.0, {}, ()))
    assert store.list("pins/") == []


class Turns(MemoryStore):
    """Threads take turns at the store's calls, as a schedule says; the rest runs as it comes."""

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


def act(store: MemoryStore, schedule: list[int], bodies: list[Callable[[Any], bool]]) -> list[bool]:
    """The answers of all bodies when their calls come in this order."""
    turns = Turns(store, schedule)
    result: dict[int, bool] = {}

    def run(actor: int, body: Callable[[Any], bool]) -> None:
        try:
            result[actor] = body(turns.as_actor(actor))
        finally:
            turns.done(actor, ended=True)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [result[i] for i in range(len(bodies))]


def check(store: ObjectStore, record: CommitRecord, granted: bool, deleted: bool, why: object) -> None:
    assert not (granted and deleted), why
    assert (record.save_id in pins.held_saves(store)) == granted, why
    assert not deletions(store, record), why
    assert all(shards_left(store, record)) != deleted, why


def in_every_order(
    original: MemoryStore, one: Callable[[Any], bool], other: Callable[[Any], bool]
) -> Iterator[tuple[tuple[int, ...], MemoryStore, bool, bool]]:
    """Of the first ten calls of the two: which are the other's, the store afterwards, and both answers."""
    for ones in itertools.chain.from_iterable(itertools.combinations(range(10), k) for k in range(11)):
        store = MemoryStore()
        store.objects = dict(original.objects)
        yield ones, store, *act(store, [int(i in ones) for i in range(10)], [one, other])


@pytest.mark.long_but("pin")
@pytest.mark.parametrize("kind", KINDS)
def test_hold_and_deletion_that_meet_never_both_succeed_in_any_order(runs: Any, kind: str) -> None:
    # Case 84, exhaustively.
    original = MemoryStore()
    runs(original).save(1, 2)
    record = Catalog(original).find(1)
    seen = set[tuple[bool, bool]]()
    held, gone = (lambda s: hold(s, record, kind)), (lambda s: delete(s, record))
    for ones, store, granted, deleted in in_every_order(original, held, gone):
        seen.add((granted, deleted))
        check(store, record, granted, deleted, ones)
    assert {(True, False), (False, True)} <= seen


@pytest.mark.long_but("tag-1")
@pytest.mark.parametrize("holders", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_holds_and_two_deletions_that_meet_never_both_succeed(runs: Any, kind: str, holders: int) -> None:
    # By chance from a seed: each goes a few calls, then another; at the end one after the other. Where there are two
    # holders, one more hold was granted before all of it in half of the cases.
    original = MemoryStore()
    runs(original).save(1, 2)
    record = Catalog(original).find(1)
    bodies: list[Callable[[Any], bool]] = [lambda s: hold(s, record, kind)] * holders
    bodies += [lambda s: delete(s, record)] * 2
    seen = set[tuple[bool, bool]]()
    for seed in range(600):
        chance = random.Random(seed)
        store = MemoryStore()
        store.objects = dict(original.objects)
        before = holders > 1 and bool(seed % 2) and hold(store, record, kind)
        actors = range(len(bodies))
        schedule = [a for _ in range(chance.randint(3, 6)) for a in [chance.choice(actors)] * chance.randint(1, 4)]
        for actor in chance.sample(actors, len(actors)):
            schedule += [actor] * 40
        told = act(store, schedule, bodies)
        granted, deleted = any(told[:holders]), any(told[holders:])
        seen.add((granted, deleted))
        check(store, record, before or granted, deleted, seed)
    assert {(True, False), (False, True)} <= seen


def without_shards(store: MemoryStore) -> CommitRecord:
    """A commit whose state is all in its record, below a newer one."""
    with Checkpointer(store=store) as checkpointer:
        checkpointer.restore({"epoch": 0})
        for step in (1, 2):
            checkpointer.save(step, {"epoch": step}).wait(30)
    record = Catalog(store).find(1)
    assert record.shards == ()
    return record


def compact(store: Any, record: CommitRecord) -> bool:
    compactor = Compactor(store)
    compactor.retire([record])
    return bool(compactor.run(()))


@pytest.mark.long_but("kept")
@pytest.mark.parametrize("kind", KINDS)
def test_hold_and_compaction_of_a_commit_without_shards_never_both_succeed_in_any_order(kind: str) -> None:
    original = MemoryStore()
    record = without_shards(original)
    seen = set[tuple[bool, bool]]()
    held, gone = (lambda s: hold(s, record, kind)), (lambda s: compact(s, record))
    for ones, store, granted, deleted in in_every_order(original, held, gone):
        seen.add((granted, deleted))
        read = CommitLog(store).read(record.n)
        assert isinstance(read, CommitRecord), ones
        assert (granted, is_compacted(read)) in {(True, False), (False, True), (False, False)}, ones
        assert deleted == is_compacted(read), ones
        assert (record.save_id in pins.held_saves(store)) == granted, ones
        assert not deletions(store, record), ones
    assert {(True, False), (False, True)} <= seen
