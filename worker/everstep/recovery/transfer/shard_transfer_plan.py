"""Decides which member of a new round sends which shard of a sharded state to which other. Pure.

Of `shards` shards, rank r has number r % shards. A state is whole if the members hold all of its shards, in whatever
replicas. Its version is (step, made): the completed steps, and the round in which the last of them was made, because
separated members may have made the same step twice, with other sums. Invariant: afterwards all members hold shards of
one version, the newest whole one, or no member trains on from memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everstep.recovery.validity import Validity

NEW = -1  # made by the script, in no round


@dataclass(frozen=True, slots=True)
class MemberShard:
    """One member: its version, the number of its shard, and digests of its state and of the parameters in it. For a
    member that has voted (`Validity.VOTED`) `made` is the round of the vote."""

    step: int
    made: int
    validity: Validity
    shard: int
    digest: int
    parameters: int = 0


@dataclass(frozen=True, slots=True)
class ShardTransferPlan:
    """All members go on with version (step, made). `transfers`: (receiver, sender), by receiver. `diverged`: receivers
    that had the sender's version and shard, but other values."""

    step: int
    made: int
    transfers: tuple[tuple[int, int], ...]
    diverged: tuple[int, ...] = ()


def undecided(members: Sequence[MemberShard]) -> bool:
    """Whether a member does not know yet whether the step that it voted for was made."""
    return any(m.validity is Validity.VOTED for m in members)


def was_made(voter: MemberShard, members: Sequence[MemberShard]) -> bool:
    """Whether any member has made the step that `voter` voted for. If so, the voter must make it too. If not, it must
    not make it, because the others repeat it."""
    return any(_trained(m) and (m.step, m.made) == (voter.step + 1, voter.made) for m in members)


def fresh(members: Sequence[MemberShard]) -> bool:
    """Whether no member has trained. Then the state is what the scripts made, unless storage has one."""
    return all(m.validity is Validity.NONE for m in members)


def plan_transfers(members: Sequence[MemberShard], shards: int) -> ShardTransferPlan | None:
    """The plan for members given by rank; None if no version is whole among them. A version is not whole either if
    holders of a shard differ in its parameters, and none have those of the most: nobody knows which are right."""
    new = fresh(members)
    holders = [rank for rank, m in enumerate(members) if new or _trained(m)]
    versions = sorted({(members[rank].step, members[rank].made) for rank in holders}, reverse=True)
    for version in versions:
        by_shard: list[list[int]] = [[] for _ in range(shards)]
        for rank in holders:
            if (members[rank].step, members[rank].made) == version:
                by_shard[members[rank].shard].append(rank)
        if all(by_shard) and not any(_is_split(members, of_shard) for of_shard in by_shard):
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
        votes = Counter(members[rank].parameters for rank in holders)
        best = max(holders, key=lambda rank: (members[rank].validity, votes[members[rank].parameters], -rank))
        alike = [rank for rank in holders if members[rank] == members[best]]
        senders = _in_turn(alike)
        for rank in range(shard, len(members), len(by_shard)):
            if rank not in alike:
                transfers.append((rank, next(senders)))
            same = rank in holders and members[rank].validity is members[best].validity
            if same and rank not in alike and members[rank].validity is not Validity.NONE:
                diverged.append(rank)
    return ShardTransferPlan(*version, tuple(sorted(transfers)), tuple(sorted(diverged)))


def _is_split(members: Sequence[MemberShard], holders: Sequence[int]) -> bool:
    """Whether the holders of a shard, who have trained, hold parameters of which none are those of the most."""
    votes = Counter(members[rank].parameters for rank in holders if _trained(members[rank])).most_common(2)
    return len(votes) == 2 and votes[0][1] == votes[1][1]


def _in_turn(ranks: list[int]) -> Iterator[int]:
    while True:
        yield from ranks


def _trained(member: MemberShard) -> bool:
    return member.validity is Validity.WHOLE
