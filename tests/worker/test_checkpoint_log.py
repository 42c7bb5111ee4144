"""The pure decisions of the commit log: who may append what, and with which reason."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.errors import Fenced, SaveFailed
from everstep.checkpoint.format.layout import record_name
from everstep.checkpoint.format.manifest import (
    NONE,
    CommitRecord,
    OpenRecord,
    Owner,
    compacted,
    decode_record,
    encode_record,
    is_compacted,
)
from everstep.checkpoint.log import decisions as log
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.decisions import Again, Append, Claim, Done, Head, Refuse, Unknown, Unreadable
from everstep.storage import MemoryStore, ObjectInfo, RetryableError
from everstep.storage.faults import FaultStore, LoseResponse


def claim(writer: str = "aa", round: int = 1, job_uid: str = "job-a") -> Claim:
    return Claim(writer, round, job_uid, 2, "2026-11-21T00:00:00.000Z")


def draft(own: OpenRecord, step: int = 1) -> CommitRecord:
    return CommitRecord(
        NONE, own.writer, own.round, own.job_uid, step, f"{own.n:012d}-{own.writer:0<8}-{step:08d}", 2,
        "2026-11-21T00:00:01.000Z", own.n, NONE, (), (), {},
    )  # fmt: skip


def test_compacted_record_is_decided_about_as_the_one_that_it_was() -> None:
    head, own = opened(Head(), claim())
    after, record = committed(head, own)
    short = compacted(record)
    assert (is_compacted(record), is_compacted(short)) == (False, True)
    assert decode_record(encode_record(short), short.n, "it") == short
    assert log.advance(head, short) == after
    assert isinstance(log.after_conflict(head, record, short), Done), "a lost response, heard of very late"
    another = replace(record, save_id="000000000000-aa000000-00000002")
    assert isinstance(log.after_conflict(head, another, short), Again)
    assert isinstance(log.after_conflict(head, replace(own, writer="bb", n=1), short), Again)


def opened(head: Head, by: Claim) -> tuple[Head, OpenRecord]:
    decision = log.decide_open(head, by)
    assert isinstance(decision, Append), decision
    assert isinstance(decision.record, OpenRecord)
    return log.advance(head, decision.record), decision.record


def committed(head: Head, own: OpenRecord, step: int = 1) -> tuple[Head, CommitRecord]:
    decision = log.decide_commit(head, own, draft(own, step))
    assert isinstance(decision, Append), decision
    assert isinstance(decision.record, CommitRecord)
    return log.advance(head, decision.record), decision.record


def test_first_claim_opens_record_zero() -> None:
    _, record = opened(Head(), claim())
    assert (record.n, record.open, record.commit, record.owners) == (0, NONE, NONE, (Owner("job-a", 1),))


def test_records_link_to_the_newest_open_and_commit_below() -> None:
    head, first = opened(Head(), claim("aa"))
    head, one = committed(head, first, 1)
    head, two = committed(head, first, 2)
    head, second = opened(head, claim("bb"))
    head, third = opened(head, claim("cc"))
    assert [(r.n, r.open, r.commit) for r in (one, two, second, third)] == [
        (1, 0, NONE),
        (2, 0, 1),
        (3, 0, 2),
        (4, 3, 2),
    ]


def test_older_round_of_the_owning_job_is_refused_and_told_why() -> None:
    head, _ = opened(Head(), claim("aa", round=3))
    decision = log.decide_open(head, claim("bb", round=2))
    assert isinstance(decision, Refuse)
    assert "round 2 is older than round 3" in decision.reason


def test_same_round_of_the_owning_job_takes_over() -> None:
    # torchrun restarted the processes in their pods: same round, new writer.
    head, _ = opened(Head(), claim("aa", round=3))
    _, record = opened(head, claim("bb", round=3))
    assert record.writer == "bb"


def test_recreated_job_with_a_lower_round_takes_over() -> None:
    head, _ = opened(Head(), claim("aa", round=9, job_uid="job-a"))
    _, record = opened(head, claim("bb", round=1, job_uid="job-b"))
    assert record.owners == (Owner("job-a", 9), Owner("job-b", 1))


def test_deleted_job_never_takes_the_log_back_from_its_successor() -> None:
    head, _ = opened(Head(), claim("aa", round=9, job_uid="job-a"))
    head, _ = opened(head, claim("bb", round=1, job_uid="job-b"))
    decision = log.decide_open(head, claim("cc", round=10, job_uid="job-a"))
    assert isinstance(decision, Refuse)
    assert "job-b" in decision.reason


def test_pod_of_an_older_job_that_starts_late_does_not_take_the_log_from_its_successor() -> None:
    head, _ = opened(Head(), replace(claim("bb", job_uid="job-b"), created=200))
    decision = log.decide_open(head, replace(claim("aa", round=7, job_uid="job-a"), created=100))
    assert isinstance(decision, Refuse)
    assert "job job-a is older than job job-b" in decision.reason
    _, newer = opened(head, replace(claim("cc", job_uid="job-c"), created=300))
    assert newer.owners == (Owner("job-b", 1, 200), Owner("job-c", 1, 300))


def counted(writer: str, round: int, rendezvous: str, job_uid: str = "") -> Claim:
    return replace(claim(writer, round, job_uid), rendezvous=rendezvous)


@pytest.mark.parametrize("uid", ["", "job-a"], ids=["no-kubernetes", "etcd"])
def test_rounds_of_one_rendezvous_have_an_order_and_those_of_two_have_none(uid: str) -> None:
    head, _ = opened(Head(), counted("aa", 7, "x", uid))
    older = log.decide_open(head, counted("bb", 6, "x", uid))
    assert isinstance(older, Refuse)
    # A job's rendezvous id is not its user's to choose.
    assert ("start the run under a new rendezvous id" in older.reason) == (not uid)
    head, _ = opened(head, counted("cc", 8, "x", uid))
    # The rendezvous lost what it held, with all who knew its count.
    head, record = opened(head, counted("dd", 1, "y", uid))
    assert record.owners == (Owner(uid, 8, 0, "x"), Owner(uid, 1, 0, "y"))
    decision = log.decide_open(head, counted("ee", 9, "x", uid))
    assert isinstance(decision, Refuse)
    assert "rendezvous x lost the log to" in decision.reason
    assert "new rendezvous id" in decision.reason


def test_deleted_job_never_takes_the_log_back_through_another_rendezvous() -> None:
    head, _ = opened(Head(), counted("aa", 9, "x", "job-a"))
    head, _ = opened(head, counted("bb", 1, "y", "job-b"))
    assert isinstance(log.decide_open(head, counted("cc", 1, "z", "job-a")), Refuse)


def test_run_outside_of_kubernetes_may_follow_any_other_run() -> None:
    head, _ = opened(Head(), claim("aa", round=9, job_uid="job-a"))
    head, _ = opened(head, counted("bb", 1, "x"))
    head, record = opened(head, counted("cc", 1, "y"))
    assert [o.rendezvous for o in record.owners] == ["", "x", "y"]
    assert isinstance(log.decide_open(head, claim("dd", round=10, job_uid="job-a")), Refuse)


def test_plain_run_takes_over_and_the_job_may_come_back_but_not_in_an_older_round() -> None:
    head, _ = opened(Head(), claim("aa", round=2, job_uid="job-a"))
    head, plain = opened(head, claim("bb", round=0, job_uid=""))
    assert plain.owners == (Owner("job-a", 2),)
    assert isinstance(log.decide_open(head, claim("cc", round=1, job_uid="job-a")), Refuse)
    _, back = opened(head, claim("cc", round=2, job_uid="job-a"))
    assert back.writer == "cc"


def test_owners_are_bounded_and_keep_the_newest() -> None:
    head = Head()
    for n in range(100):
        head, record = opened(head, claim("aa", job_uid=f"job-{n}"))
    assert len(record.owners) == log.MAX_OWNERS
    assert record.owners[-1].job_uid == "job-99"


def test_commit_under_a_newer_open_is_fenced() -> None:
    head, old = opened(Head(), claim("aa", round=1))
    head, _ = opened(head, claim("bb", round=2))
    decision = log.decide_commit(head, old, draft(old))
    assert isinstance(decision, Refuse)
    assert "writer bb" in decision.reason


def test_commit_that_meets_a_newer_open_at_its_number_is_fenced() -> None:
    head, old = opened(Head(), claim("aa"))
    attempt = log.decide_commit(head, old, draft(old))
    _, newer = opened(head, claim("bb", round=2))
    assert isinstance(attempt, Append)
    assert isinstance(log.after_conflict(head, attempt.record, newer), Refuse)


def test_conflict_with_the_same_record_is_done() -> None:
    head, own = opened(Head(), claim())
    _, record = committed(head, own)
    assert isinstance(log.after_conflict(head, record, record), Done)
    assert isinstance(log.after_conflict(Head(), own, own), Done)


def test_open_that_meets_another_record_moves_on_past_it() -> None:
    head, first = opened(Head(), claim("aa"))
    attempt = log.decide_open(head, claim("bb", round=2))
    assert isinstance(attempt, Append)
    _, commit = committed(head, first)
    moved = log.after_conflict(head, attempt.record, commit)
    assert isinstance(moved, Again)
    _, record = opened(moved.head, claim("bb", round=2))
    assert (record.n, record.commit) == (2, 1)


def test_commit_past_a_damaged_record_above_its_open_is_not_decided() -> None:
    head, own = opened(Head(), claim())
    head = log.advance(head, Unreadable(1, "flipped"))
    assert isinstance(log.decide_commit(head, own, draft(own)), Unknown)


def test_commit_with_a_head_that_ends_before_its_own_open_is_not_decided() -> None:
    head, _ = opened(Head(), claim("aa"))
    _, own = opened(head, claim("bb"))
    assert isinstance(log.decide_commit(head, own, draft(own)), Unknown)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from(["", "a", "b"])), max_size=12))
def test_rounds_of_one_job_never_go_down_and_a_lost_job_never_returns(claims: list[tuple[int, int, str]]) -> None:
    head, accepted = Head(), []
    for number, (writer, round, uid) in enumerate(claims):
        decision = log.decide_open(head, claim(f"{writer}-{number}", round, uid))
        if isinstance(decision, Append):
            assert isinstance(decision.record, OpenRecord)
            head = log.advance(head, decision.record)
            accepted.append((uid, round))
    jobs = [uid for uid, _ in accepted if uid]
    changes = [uid for i, uid in enumerate(jobs) if i == 0 or jobs[i - 1] != uid]
    assert len(changes) == len(set(changes)), "a job came back after another had taken the log"
    for job in ("a", "b"):
        rounds = [r for uid, r in accepted if uid == job]
        assert rounds == sorted(rounds)


# The same decisions driven against a store.


class StaleListing(MemoryStore):
    """Lists the log as it was `behind` records ago."""

    behind = 0

    def list(self, folder: str = "") -> list[ObjectInfo]:
        found = super().list(folder)
        return found[: max(0, len(found) - self.behind)]


def test_stale_listing_still_finds_the_end() -> None:
    store = StaleListing()
    commits = CommitLog(store)
    own = commits.open(claim())
    head = commits.head()
    for step in range(1, 6):
        head, _ = commits.commit(head, own, draft(own, step))
    store.behind = 4
    assert commits.head().last == 5
    assert commits.head().commit == 5


def test_lost_response_to_a_commit_appends_it_once() -> None:
    from everstep.storage import RetryingStore  # noqa: PLC0415

    inner = MemoryStore()
    own = CommitLog(inner).open(claim())
    faulty = RetryingStore(FaultStore(inner, {0: LoseResponse()}), sleep=lambda _: None)
    _, record = CommitLog(faulty).commit(Head(0, own), own, draft(own))
    assert record.n == 1
    assert [i.name for i in inner.list("log/")] == [record_name(0), record_name(1)]


def test_lost_response_to_an_open_opens_once() -> None:
    from everstep.storage import RetryingStore  # noqa: PLC0415

    inner = MemoryStore()
    # Calls of an open on an empty log: list, size, put of the copy, create.
    faulty = RetryingStore(FaultStore(inner, {3: LoseResponse()}), sleep=lambda _: None)
    assert CommitLog(faulty).open(claim()).n == 0
    assert [name for name in inner.objects if name.startswith("log/")] == [record_name(0)]


def test_zombie_of_an_older_round_can_neither_commit_nor_open() -> None:
    store = MemoryStore()
    zombie, successor = CommitLog(store), CommitLog(store)
    old = zombie.open(claim("aa", round=1))
    head, _ = zombie.commit(Head(0, old), old, draft(old, 1))
    new = successor.open(claim("bb", round=2))
    with pytest.raises(Fenced, match="writer bb"):
        zombie.commit(head, old, draft(old, 2))
    with pytest.raises(Fenced, match="round 1 is older"):
        zombie.open(claim("cc", round=1))
    _, record = successor.commit(Head(2, new, 1), new, draft(new, 2))
    assert record.n == 3


def test_damaged_record_at_the_end_is_passed_by_the_next_open_and_reported() -> None:
    store = MemoryStore()
    commits = CommitLog(store)
    own = commits.open(claim("aa"))
    head, _ = commits.commit(commits.head(), own, draft(own, 1))
    head, _ = commits.commit(head, own, draft(own, 2))
    store.put(record_name(2), store.get(record_name(2))[:-40])
    newer = commits.open(claim("bb"))
    assert newer.n == 3
    found = list(commits.commits(newer.n))
    assert [type(r) for r in found] == [Unreadable, CommitRecord]
    assert record_name(2) in str(found[0])
    with pytest.raises((Fenced, SaveFailed)):
        commits.commit(head, own, draft(own, 3))


def test_missing_record_in_the_middle_is_walked_past() -> None:
    store = MemoryStore()
    commits = CommitLog(store)
    own = commits.open(claim())
    head = commits.head()
    for step in range(1, 5):
        head, _ = commits.commit(head, own, draft(own, step))
    store.delete(record_name(3))
    assert [getattr(r, "step", None) for r in commits.commits(5)] == [4, None, 2, 1]


def test_store_that_is_away_is_retryable_not_fenced() -> None:
    from everstep.storage.faults import Fail  # noqa: PLC0415

    store = MemoryStore()
    own = CommitLog(store).open(claim())
    away = CommitLog(FaultStore(store, {0: Fail(RetryableError("503"))}))
    with pytest.raises(RetryableError):
        away.commit(Head(0, own), own, draft(own))
    assert replace(CommitLog(store).head(), open=None) == Head(0)
