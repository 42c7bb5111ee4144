"""From what each member of a new round holds of a sharded state, who gives which shard to whom. Pure.

Of `shards` shards, rank r has number r % shards. A state is whole if all of its shards are among the members, in
whatever replicas. A version of it is (step, made): completed steps, and the round in which the last of them was
made, because members that were parted may have made the same step twice, of other sums.

Invariant: afterwards all members hold shards of one version, the newest that is whole, or nobody trains on from memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everstep.recovery.validity import Validity

NEW = -1  # made in no round: by the script


@dataclass(frozen=True, slots=True)
class MemberShard:
    """One member: its version, the number of the shard that it holds, and a digest of its parameters. For one that has
    voted (`Validity.VOTED`) `made` is the round of the vote."""

    step: int
    made: int
    validity: Validity
    shard: int
    digest: int


@dataclass(frozen=True, slots=True)
class ShardTransferPlan:
    """Version (step, made) is what all go on with. `transfers`: (receiver, sender), by receiver. `diverged`: receivers
    that believed to hold just what the sender does."""

    step: int
    made: int
    transfers: tuple[tuple[int, int], ...]
    diverged: tuple[int, ...] = ()


def undecided(members: Sequence[MemberShard]) -> bool:
    """Whether a member has yet to hear what became of the step that it voted for."""
    return any(m.validity is Validity.VOTED for m in members)


def was_made(voter: MemberShard, members: Sequence[MemberShard]) -> bool:
    """Whether any member has made the step that `voter` voted for. If so the voter must make it too; if not it must
    not, for the others repeat it."""
    return any(_trained(m) and (m.step, m.made) == (voter.step + 1, voter.made) for m in members)


def fresh(members: Sequence[MemberShard]) -> bool:
    """Whether nobody has trained: the state is what the scripts made, unless storage has one."""
    return all(m.validity is Validity.NONE for m in members)


def plan_transfers(members: Sequence[MemberShard], shards: int) -> ShardTransferPlan | None:
    """By rank. None if no version is whole among them."""
    new = fresh(members)
    holders = [rank for rank, m in enumerate(members) if new or _trained(m)]
    versions = sorted({(members[rank].step, members[rank].made) for rank in holders}, reverse=True)
    for version in versions:
        by_shard: list[list[int]] = [[] for _ in range(shards)]
        for rank in holders:
            if (members[rank].step, members[rank].made) == version:
                by_shard[members[rank].shard].append(rank)
        if all(by_shard):
            return _transfers(members, by_shard, version)
    return None


def missing(members: Sequence[MemberShard], shards: int) -> tuple[int, ...]:
    """The shards that no member holds, of any version."""
    usable = {m.shard for m in members if fresh(members) or _trained(m)}
    return tuple(sorted(set(range(shards)) - usable))


def _transfers(
    members: Sequence[MemberShard], by_shard: list[list[int]], version: tuple[int, int]
) -> ShardTransferPlan:
    transfers, diverged = [], []
    for shard, holders in enumerate(by_shard):
        best = max(holders, key=lambda rank: (members[rank].validity, -rank))
        alike = [rank for rank in holders if members[rank] == members[best]]
        senders = _in_turn(alike)
        for rank in range(shard, len(members), len(by_shard)):
            if rank not in alike:
                transfers.append((rank, next(senders)))
            same = rank in holders and members[rank].validity is members[best].validity
            if same and rank not in alike and members[rank].validity is not Validity.NONE:
                diverged.append(rank)
    return ShardTransferPlan(*version, tuple(sorted(transfers)), tuple(sorted(diverged)))


def _in_turn(ranks: list[int]) -> Iterator[int]:
    while True:
        yield from ranks


def _trained(member: MemberShard) -> bool:
    return member.validity is Validity.WHOLE
