"""Damage to the log's own objects lets no older round in, fences no living owner, and deletes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.errors import CheckpointError, Fenced, Occupied, OwnerUnknown
from everstep.checkpoint.format import wire
from everstep.checkpoint.format.layout import OPENS, alive_name, deletion_name, record_name, save_id, shard_name
from everstep.checkpoint.format.manifest import NONE, CommitRecord, OpenRecord, Shard, encode_record
from everstep.checkpoint.log import decisions as log
from everstep.checkpoint.log.alive import Process, wait_for_owner
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.decisions import Append, Claim, Head, Refuse, Unreadable
from everstep.checkpoint.retention import pins
from everstep.checkpoint.retention.catalog import Catalog
from everstep.checkpoint.retention.cleaner import LOOK_SECONDS, Cleaner, Tenure, clean, sizes_in
from everstep.storage import MemoryStore


def claim(writer: str, round: int, job_uid: str = "job-a", created: int = 0, rendezvous: str = "") -> Claim:
    return Claim(writer, round, job_uid, 1, "2026-11-28T00:00:00Z", created, rendezvous)


def commit(store: MemoryStore, own: OpenRecord, head: Head, step: int) -> tuple[Head, CommitRecord]:
    identifier = save_id(own.n, f"{own.writer:0<8}", step)
    shard = Shard(shard_name(identifier, 0), 4, 64, ("0" * 32,))
    store.put(shard.path, b"data")
    draft = CommitRecord(
        NONE, own.writer, own.round, own.job_uid, step, identifier, 1, "t", own.n, NONE, (shard,), (), {"state": {}}
    )
    return CommitLog(store).commit(head, own, draft)


def flipped(data: bytes) -> bytes:
    return data[:150] + bytes([data[150] ^ 1]) + data[151:]


def emptied(data: bytes) -> bytes:
    return b""


def other_json(data: bytes) -> bytes:
    return wire.encode({"hello": "world"})


def swapped(data: bytes) -> bytes:
    return encode_record(OpenRecord(7, "zz", 0, "", 1, "t", (), NONE, NONE))


def of_a_commit(data: bytes) -> bytes:
    """A write that came to the wrong object, or an object that was restored from another's copy."""
    store = MemoryStore()
    own = CommitLog(store).open(claim("aa", 1))
    head = Head(0, own)
    for step in range(1, 6):
        head, written = commit(store, own, head, step)
    return encode_record(written)


DAMAGE = pytest.mark.parametrize("damage", [flipped, emptied, other_json, swapped, of_a_commit])


def two_rounds(store: MemoryStore) -> tuple[OpenRecord, OpenRecord]:
    old = CommitLog(store).open(claim("aa", 1))
    commit(store, old, Head(0, old), 1)
    return old, CommitLog(store).open(claim("bb", 2))


def damage_record(store: MemoryStore, n: int, how: Callable[[bytes], bytes]) -> None:
    store.put(record_name(n), how(store.get(record_name(n))))


@DAMAGE
@pytest.mark.parametrize("commits", [0, 1])
def test_damaged_newest_open_lets_no_older_round_in_and_its_own_job_goes_on(
    damage: Callable[[bytes], bytes], commits: int
) -> None:
    store = MemoryStore()
    _, new = two_rounds(store)
    head = Head(new.n, new, new.commit)
    if commits:
        head, _ = commit(store, new, head, 2)
    damage_record(store, new.n, damage)
    with pytest.raises(Fenced, match="round 1 is older than round 2"):
        CommitLog(store).open(claim("cc", 1))
    head, record = commit(store, new, head, 3)  # the living one commits
    again = CommitLog(store).open(claim("dd", 3))
    assert (again.open, again.commit) == (new.n, record.n)
    with pytest.raises(Fenced):
        commit(store, new, head, 4)


@DAMAGE
def test_damaged_newest_open_of_an_earlier_release_lets_nobody_in_and_names_the_remedy(
    damage: Callable[[bytes], bytes],
) -> None:
    store = MemoryStore()
    _, new = two_rounds(store)
    for info in store.list(OPENS):
        store.delete(info.name)
    head, _ = commit(store, new, Head(new.n, new, new.commit), 2)
    damage_record(store, new.n, damage)
    for round_ in (1, 2, 3):
        with pytest.raises(OwnerUnknown, match=r"record 2 is damaged.*ckpt restore"):
            CommitLog(store).open(claim("cc", round_))
    assert commit(store, new, head, 3)[1].step == 3, "the living one commits"


@pytest.mark.parametrize("damage", [flipped, emptied])
def test_damaged_newest_commit_is_no_open_and_stops_nobody(damage: Callable[[bytes], bytes]) -> None:
    store = MemoryStore()
    _, new = two_rounds(store)
    _, record = commit(store, new, Head(new.n, new, new.commit), 2)
    damage_record(store, record.n, damage)
    with pytest.raises(Fenced):
        CommitLog(store).open(claim("cc", 1))
    assert CommitLog(store).open(claim("dd", 2)).open == new.n


def test_commit_that_meets_a_damaged_open_of_another_is_fenced() -> None:
    store = MemoryStore()
    old = CommitLog(store).open(claim("aa", 1))
    CommitLog(store).open(claim("bb", 2))
    damage_record(store, 1, emptied)
    with pytest.raises(Fenced, match="writer bb"):
        commit(store, old, Head(0, old), 1)


def test_copies_of_opens_do_not_pile_up() -> None:
    store = MemoryStore()
    for n in range(20):
        CommitLog(store).open(claim(f"{n:02}", n))
    assert len(store.list(OPENS)) <= 3


def test_log_in_which_every_record_is_damaged_has_an_owner_still() -> None:
    store = MemoryStore()
    own = CommitLog(store).open(claim("aa", 5))
    damage_record(store, own.n, emptied)
    with pytest.raises(Fenced, match="round 4 is older"):
        CommitLog(store).open(claim("bb", 4))
    store.delete(store.list(OPENS)[0].name)
    with pytest.raises(OwnerUnknown):
        CommitLog(store).open(claim("bb", 6))


def test_writers_that_raced_for_a_damaged_record_leave_it_without_an_owner_only_if_they_have_no_order() -> None:
    reason = Unreadable(4, "cut")

    def opens(*claims: Claim) -> list[OpenRecord | None]:
        decisions = [log.decide_open(Head(3), c) for c in claims]
        return [d.record for d in decisions if isinstance(d, Append) and isinstance(d.record, OpenRecord)]

    def owner(*claims: Claim) -> str | None:
        found = log.resolve(reason, opens(*claims), kind="", known=True)
        return found.writer if isinstance(found, OpenRecord) else None

    assert owner(claim("aa", 1), claim("bb", 2)) == "bb"
    assert owner(claim("aa", 9, "job-a", 5), claim("bb", 1, "job-b", 6)) == "bb"
    assert owner(claim("aa", 9, "job-a"), claim("bb", 1, "job-b")) is None
    assert owner(claim("aa", 1, "", 0, "r1"), claim("bb", 1, "", 0, "r2")) is None
    assert isinstance(log.resolve(reason, [None], kind="", known=True), Unreadable)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 150)), min_size=66, max_size=200))
def test_owner_that_lost_the_log_never_takes_it_back_however_many_came_since(who: list[tuple[bool, int]]) -> None:
    """Without `created` nothing but the owners themselves tells that a job is an old one."""
    head, seen, last = Head(), set[tuple[bool, int]](), None
    for n, one in enumerate(who):
        is_job, number = one
        mine = claim(f"{n}", 1, f"job-{number}") if is_job else claim(f"{n}", 1, "", 0, f"run-{number}")
        decision = log.decide_open(head, mine)
        assert isinstance(decision, Refuse) == (one in seen and one != last), (n, one)
        if isinstance(decision, Append):
            head, last = log.advance(head, decision.record), one
            seen.add(one)
    assert head.open is not None
    assert len(head.open.owners) <= log.MAX_OWNERS


def test_damaged_sign_of_life_that_is_renewed_is_a_living_owner() -> None:
    store, time_ = MemoryStore(), [0.0]
    own = CommitLog(store).open(claim("aa", 1, ""))
    store.put(alive_name(own.n), b"damaged")

    def sleep(seconds: float) -> None:
        time_[0] += seconds
        if time_[0] > 3:
            who = Process("host", "another machine", 1, "1")
            body: dict[str, Any] = {"version": 1, "n": 0, "beat": int(time_[0]), "host": who.host,
                                    "machine": who.machine, "pid": who.pid, "started": who.started}  # fmt: skip
            store.put(alive_name(own.n), wire.encode(body))

    with pytest.raises(Occupied):
        wait_for_owner(store, lambda: own, claim("bb", 1, ""), clock=lambda: time_[0], sleep=sleep)


def test_damaged_deletion_mark_ends_like_any_other() -> None:
    store, hours = MemoryStore(), 3600.0
    own = CommitLog(store).open(claim("aa", 1))
    _, record = commit(store, own, Head(0, own), 1)
    store.put(deletion_name(record.save_id, "0" * 16), b"damaged")
    for now in (0.0, 0.5 * hours):
        with pytest.raises(CheckpointError, match="has begun"):
            pins.pin(store, record, "t", lambda _: None, lambda now=now: now)  # type: ignore[misc]
    pins.pin(store, record, "t", lambda _: None, lambda: 1.1 * hours)
    assert pins.held_saves(store) == {record.save_id}


def test_damaged_tag_still_names_its_commit() -> None:
    store = MemoryStore()
    own = CommitLog(store).open(claim("aa", 1))
    _, record = commit(store, own, Head(0, own), 1)
    Catalog(store).tag("best", 1)
    (name,) = (info.name for info in store.list("pins/"))
    store.put(name, b"damaged")
    assert Catalog(store).tagged("best") == record


# -- a fenced writer that wakes


def fenced_with_six_commits() -> tuple[MemoryStore, Cleaner, OpenRecord]:
    """A writer that would keep one of six commits, and has just committed the newest; and another's newer open."""
    store = MemoryStore()
    own = CommitLog(store).open(claim("aa", 1))
    head = Head(0, own)
    cleaner = Cleaner(store, own, 1, frozenset())
    for step in range(1, 7):
        head, record = commit(store, own, head, step)
        cleaner.committed(record)
    return store, cleaner, own


@pytest.mark.parametrize("damage", [None, emptied])
def test_fenced_writer_that_wakes_deletes_nothing(damage: Callable[[bytes], bytes] | None) -> None:
    store, cleaner, _ = fenced_with_six_commits()
    newer = CommitLog(store).open(claim("bb", 2))
    if damage is not None:
        damage_record(store, newer.n, damage)
    before = dict(store.objects)
    cleaner.clean()
    assert store.objects == before


def test_owner_deletes_what_it_does_not_keep() -> None:
    store, cleaner, _ = fenced_with_six_commits()
    cleaner.clean()
    assert [found.step for found in Catalog(store).list()] == [6]


def test_writer_that_is_fenced_between_two_deletions_stops_within_the_bound() -> None:
    store, _, own = fenced_with_six_commits()
    commits = [r for r in CommitLog(store).commits(7) if isinstance(r, CommitRecord)]
    time_ = [0.0]
    tenure = Tenure(CommitLog(store), commits[0].n, lambda: time_[0], lambda: time_[0])
    assert tenure.lasts()
    CommitLog(store).open(claim("bb", 2))
    asked: list[bool] = []

    def may() -> bool:
        time_[0] += LOOK_SECONDS / 2  # each deletion takes as long, or the process is stopped
        asked.append(tenure.lasts())
        return asked[-1]

    deleted = clean(store, sizes_in(store), commits, 1, frozenset(), own.n, 6, may=may)
    assert asked.index(False) <= 1, "half of the bound has passed at the first question, all of it at the second"
    assert not any(asked[1:])
    assert len(deleted) <= 1
    assert len(Catalog(store).list()) >= 5


def test_deletion_that_is_stopped_in_the_middle_of_a_save_says_so() -> None:
    clock = [0.0]

    class Slow(MemoryStore):
        def delete(self, name: str) -> None:
            super().delete(name)
            clock[0] += LOOK_SECONDS + 1

    store = Slow()
    own = CommitLog(store).open(claim("aa", 1))
    _, record = commit(store, own, Head(0, own), 1)
    tenure = Tenure(CommitLog(store), record.n, lambda: clock[0], lambda: clock[0])
    assert tenure.lasts()
    CommitLog(store).open(claim("bb", 2))
    names = [info.name for info in store.list(f"data/{record.save_id}/")]
    assert not pins.delete_save(store, record.save_id, [*names, f"data/{record.save_id}/x.bin"], may=tenure.lasts)
    assert [i.name for i in store.list("data/") if "withdrawn" in i.name]
