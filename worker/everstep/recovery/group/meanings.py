"""Maps a group of the script to its ranks in each world, where a replica is `model_size` neighbours in rank. Pure.

A script names ranks of the largest world that the job may have, but later worlds have other sizes. So a group is kept
by its meaning: some places of one replica, or one place of all replicas.

Invariant: in a world of whole replicas, a meaning has the ranks that the script would give torch in that world.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AllRanks:
    """All ranks."""


@dataclass(frozen=True, slots=True)
class WithinReplica:
    """These places of one replica."""

    model_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AcrossReplicas:
    """The ranks of this place in all replicas."""

    model_rank: int


GroupMeaning = AllRanks | WithinReplica | AcrossReplicas


def meaning(ranks: Sequence[int], most: int, model_size: int) -> tuple[GroupMeaning, int] | None:
    """The meaning of these ranks in a world of `most`, and the number of their replica (0 if all replicas take part).
    None if these ranks have no meaning in another world."""
    ordered = sorted(ranks)
    if not ordered or ordered[0] < 0 or ordered[-1] >= most or len(set(ordered)) < len(ordered) or most % model_size:
        return None
    # Checked first, because it is more precise in a job of one replica: each process knows its place.
    if most > 1 and ordered[0] // model_size == ordered[-1] // model_size:
        return WithinReplica(tuple(rank % model_size for rank in ordered)), ordered[0] // model_size
    if ordered == list(range(most)):
        return AllRanks(), 0
    if ordered == list(range(ordered[0] % model_size, most, model_size)):
        return AcrossReplicas(ordered[0] % model_size), 0
    return None


def ranks_of(what: GroupMeaning, rank: int, size: int, model_size: int) -> list[int]:
    """The ranks, in a world of `size`, of the group that contains rank `rank`."""
    match what:
        case AllRanks():
            return list(range(size))
        case WithinReplica(inside):
            first = rank // model_size * model_size
            return [first + model_rank for model_rank in inside]
        case AcrossReplicas(place):
            return list(range(place, size, model_size))


def name_of(what: GroupMeaning, nth: int, rank: int, model_size: int) -> str:
    """The name of the group of this meaning that contains rank `rank`. Its members use the same name, and no other
    group has it."""
    match what:
        case AllRanks():
            return f"own-{nth}"
        case WithinReplica(inside):
            return f"inside-{nth}-{'-'.join(map(str, inside))}-of-{rank // model_size}"
        case AcrossReplicas(place):
            return f"across-{nth}-{place}"


def order_of(what: GroupMeaning, nth: int) -> tuple[int, tuple[int, ...], int]:
    """The sort key by which groups are formed. All members of a group have the same, so no circular wait arises."""
    match what:
        case AllRanks():
            return 0, (), nth
        case WithinReplica(inside):
            return 1, inside, nth
        case AcrossReplicas(place):
            return 2, (place,), nth


def words(made: Counter[tuple[GroupMeaning, int]]) -> str:
    """The number of groups of each meaning as text, for messages and for comparison with other processes. `made`: see
    `lacking`."""
    counts: dict[str, int] = {}
    for (what, _), count in made.items():
        match what:
            case AllRanks():
                name = "all ranks"
            case WithinReplica(inside):
                name = f"places {', '.join(map(str, inside))} of a replica"
            case AcrossReplicas(place):
                name = f"place {place} of all replicas"
        counts[name] = max(counts.get(name, 0), count)
    return "; ".join(f"{name}: {counts[name]}" for name in sorted(counts))


def lacking(made: Counter[tuple[GroupMeaning, int]], replicas: int, model_size: int) -> list[int] | None:
    """The ranks of a group that the script has made for some replicas but not for all; None if there is none. `made`:
    the number of groups by meaning and replica."""
    for what, _ in made:
        counts = {replica: made[what, replica] for replica in range(replicas if isinstance(what, WithinReplica) else 1)}
        fewest = min(counts, key=lambda replica: counts[replica])
        if counts[fewest] < max(counts.values()):
            return ranks_of(what, fewest * model_size, replicas * model_size, model_size)
    return None
