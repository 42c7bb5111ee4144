"""Which saves' objects may be deleted: a pure function of what the log and the listing say.

Invariants: the newest `keep` usable commits keep every shard they name; what belongs to a newer open record than the
caller's, to a save that may be in flight, to a pinned one, or to nobody that `layout` knows is never touched. Log
records are never deleted, as finding the end of the log rests on that; those of deleted commits are compacted
(`compaction`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep.checkpoint.format.layout import folder_of, owner_of
from everstep.checkpoint.format.manifest import CommitRecord


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete every object of one save."""

    save_id: str
    reason: str


def plan_retention(
    save_ids: Iterable[str],
    commits: Sequence[CommitRecord],
    *,
    keep: int,
    damaged: frozenset[int],
    open_n: int,
    sequence: int,
    pinned: frozenset[str] = frozenset(),
    marked: frozenset[int] = frozenset(),
) -> tuple[Delete, ...]:
    """The saves to delete, sorted by id.

    `save_ids` are the folders that exist, `commits` the newest commits, newest first and at least `keep` of them not
    in `damaged` if there are so many; `open_n` is the caller's own open record and `sequence` that of its newest
    commit; `pinned` are the save ids that somebody pinned. `marked` are commits of a diverged state, and those that
    runs died of: the newest `keep` of them stay for whoever looks into it, but no run goes on from them, so they do
    not count. Raises `ValueError` for `keep` < 1.

    A save of an earlier open that is in no kept commit can never become one, because the caller's open fences it. A
    save of the caller's own open is finished, one way or the other, once a later one has been committed.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least 1 commit must be kept")
    usable = [c for c in commits if c.n not in damaged | marked]
    kept = [*usable[:keep], *[c for c in commits if c.n in marked - damaged][:keep]]
    needed = {folder_of(s.path) for c in kept for s in c.shards} | {c.save_id for c in kept}
    retired = {c.save_id for c in commits}
    plan = []
    for identifier in sorted(set(save_ids) - needed - pinned):
        owner = owner_of(identifier)
        if owner is None or owner[0] > open_n or (owner[0] == open_n and owner[1] >= sequence):
            continue
        what = f"older than the newest {keep} commits" if identifier in retired or owner[0] == open_n else "abandoned"
        plan.append(Delete(identifier, what))
    return tuple(plan)
