"""Which saves of earlier writers are commits: what a writer has to know that deletes before its first commit.

A save of an earlier open that is in no record can never become a commit: the newer open fences its writer. A damaged
record may be a commit's, and until a newer commit exists that may be all that is left of the newest state. Invariant:
records are read one by one, without a jump over any, and what lies below a damaged one counts as unknown.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from everstep.checkpoint.format.layout import owner_of, shard_owner
from everstep.checkpoint.format.manifest import CommitRecord, OpenRecord
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.retention.pins import saves_of

MOST: Final = 256  # records read; more of them only where many writers in a row died before their first save


@dataclass(frozen=True, slots=True)
class Survey:
    """The newest commits below an open record, newest first, and the saves of which the log did not tell. What is in
    neither is no commit."""

    commits: tuple[CommitRecord, ...]
    unknown: frozenset[str]


def survey(log: CommitLog, below: int, saves: Collection[str]) -> Survey:
    """Read the log down from record `below` until it tells of each of `saves`. Save ids grow with the log."""
    left = {identifier: order for identifier in saves if (order := owner_of(identifier)) is not None}
    commits = []
    for n in range(below - 1, max(-1, below - 1 - MOST), -1):
        if not left:
            break
        match log.read(n):
            case CommitRecord() as record:
                commits.append(record)
                order = owner_of(record.save_id)
                named = saves_of(record)
                left = {i: o for i, o in left.items() if i not in named and (order is None or o < order)}
            case OpenRecord():
                left = {i: o for i, o in left.items() if o[0] < n}
            case _:
                break
    return Survey(tuple(commits), frozenset(left))


def is_absent(log: CommitLog, save: str) -> bool:
    """Whether the log tells now that this save is no commit."""
    found = survey(log, log.head().last + 1, [save])
    return save not in found.unknown and not any(save in saves_of(record) for record in found.commits)


def is_fenced(name: str, open_n: int) -> bool:
    """Whether the object of this name is a shard of a save that began before record `open_n` opened the log: only its
    own writer writes it, and that one can commit no more."""
    owner = shard_owner(name)
    return owner is not None and owner < open_n
