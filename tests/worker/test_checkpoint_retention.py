"""Retention deletes what nobody can need, and nothing else."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.format.layout import owner_of, save_id, shard_name
from everstep.checkpoint.format.manifest import CommitRecord, Shard
from everstep.checkpoint.retention.cleaner import plan_retention

WRITER = "0123456789abcdef"


def commit(n: int, open_n: int, sequence: int) -> CommitRecord:
    identifier = save_id(open_n, WRITER, sequence)
    shard = Shard(shard_name(identifier, 0), 8, 64, ("0" * 32,))
    return CommitRecord(n, WRITER, 0, "", n, identifier, 1, "t", open_n, -1, (shard,), (), {})


def plan(saves: list[str], commits: list[CommitRecord], keep: int = 2, damaged: tuple[int, ...] = (), open_n: int = 0,
         sequence: int = 99) -> list[str]:  # fmt: skip
    found = plan_retention(saves, commits, keep=keep, damaged=frozenset(damaged), open_n=open_n, sequence=sequence)
    return [d.save_id for d in found]


def test_save_id_is_understood_by_its_own_reader_and_nothing_else_is() -> None:
    assert owner_of(save_id(7, WRITER, 12)) == (7, 12)
    for other in ("", "backup", "7-x-1", save_id(7, WRITER, 12) + "x", "../" + save_id(7, WRITER, 12)):
        assert owner_of(other) is None


def test_newest_commits_stay_and_older_ones_go() -> None:
    commits = [commit(n, 0, n) for n in (5, 4, 3, 2)]
    saves = [c.save_id for c in commits]
    assert plan(saves, commits, keep=2, sequence=5) == sorted(saves[2:])


def test_damaged_commit_does_not_count_as_kept() -> None:
    commits = [commit(n, 0, n) for n in (5, 4, 3, 2)]
    saves = [c.save_id for c in commits]
    assert plan(saves, commits, keep=2, damaged=(4,), sequence=5) == sorted([saves[1], saves[3]])


def test_shards_that_a_kept_commit_names_in_another_save_stay() -> None:
    newest, old = commit(5, 0, 5), commit(2, 0, 2)
    newest = replace(newest, shards=newest.shards + old.shards)
    assert plan([newest.save_id, old.save_id], [newest, old], keep=1, sequence=5) == []


def test_save_in_flight_and_saves_of_a_newer_open_are_never_touched() -> None:
    newest = commit(5, 3, 5)
    in_flight, newer = save_id(3, WRITER, 6), save_id(9, WRITER, 1)
    assert plan([newest.save_id, in_flight, newer], [newest], keep=1, open_n=3, sequence=5) == []


def test_abandoned_saves_of_this_and_earlier_opens_go() -> None:
    newest = commit(5, 3, 5)
    failed, zombie = save_id(3, WRITER, 4), save_id(1, WRITER, 70)
    assert plan([newest.save_id, failed, zombie], [newest], keep=1, open_n=3, sequence=5) == sorted([failed, zombie])


def test_folder_that_this_library_did_not_make_is_never_touched() -> None:
    newest = commit(5, 0, 5)
    assert plan(["backup", "my-model", newest.save_id], [newest], keep=1) == []


def test_keep_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="keep=0"):
        plan([], [], keep=0)


@given(st.integers(1, 5), st.lists(st.integers(1, 30), unique=True, min_size=1), st.sets(st.integers(1, 30)))
def test_newest_usable_commits_always_survive(keep: int, numbers: list[int], damaged: set[int]) -> None:
    commits = [commit(n, 0, n) for n in sorted(numbers, reverse=True)]
    gone = set(plan([c.save_id for c in commits], commits, keep, tuple(damaged), sequence=max(numbers)))
    usable = [c for c in commits if c.n not in damaged]
    assert not gone & {c.save_id for c in usable[:keep]}
    assert {c.save_id for c in usable[keep:]} <= gone
