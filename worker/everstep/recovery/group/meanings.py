"""Which ranks of each world a group of the script's has, where a replica is `places` neighbours in rank.

A script names ranks of the largest world that the job may have, and each later world has other members. So a group is
kept by what it means: some places of its replica, or all replicas of one place. Pure.

Invariant: the ranks of a meaning in a world that is whole replicas are those that torch would be given there.
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

    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AcrossReplicas:
    """The ranks of this place in all replicas."""

    place: int


GroupMeaning = AllRanks | WithinReplica | AcrossReplicas


def meaning(ranks: Sequence[int], most: int, places: int) -> tuple[GroupMeaning, int] | None:
    """What these ranks of a world of `most` mean, and of which replica (0 for what all replicas have part in). None if
    no other world has ranks that mean the same."""
    found = sorted(ranks)
    if not found or found[0] < 0 or found[-1] >= most or len(set(found)) < len(found) or most % places:
        return None
    # First, because in a job of one replica it says more: each process knows its place.
    if most > 1 and found[0] // places == found[-1] // places:
        return WithinReplica(tuple(rank % places for rank in found)), found[0] // places
    if found == list(range(most)):
        return AllRanks(), 0
    if found == list(range(found[0] % places, most, places)):
        return AcrossReplicas(found[0] % places), 0
    return None


def ranks_of(what: GroupMeaning, rank: int, size: int, places: int) -> list[int]:
    """In a world of `size`, of the group that rank `rank` is in."""
    match what:
        case AllRanks():
            return list(range(size))
        case WithinReplica(inside):
            first = rank // places * places
            return [first + place for place in inside]
        case AcrossReplicas(place):
            return list(range(place, size, places))


def name_of(what: GroupMeaning, nth: int, rank: int, places: int) -> str:
    """Of the group of this meaning that rank `rank` is in, which its members share and no other group has."""
    match what:
        case AllRanks():
            return f"own-{nth}"
        case WithinReplica(inside):
            return f"inside-{nth}-{'-'.join(map(str, inside))}-of-{rank // places}"
        case AcrossReplicas(place):
            return f"across-{nth}-{place}"


def order_of(what: GroupMeaning, nth: int) -> tuple[int, tuple[int, ...], int]:
    """In which order groups are formed: the same for all members of each, so that none waits in a circle."""
    match what:
        case AllRanks():
            return 0, (), nth
        case WithinReplica(inside):
            return 1, inside, nth
        case AcrossReplicas(place):
            return 2, (place,), nth


def words(made: Counter[tuple[GroupMeaning, int]]) -> str:
    """How many of each meaning, for people, and for the comparison with another process's. `made`: see `lacking`."""
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


def lacking(made: Counter[tuple[GroupMeaning, int]], replicas: int, places: int) -> list[int] | None:
    """The ranks of a group that the script has made for some replicas, and not for all; None if there is none. `made`:
    how many of each meaning, by replica."""
    for what, _ in made:
        counts = {replica: made[what, replica] for replica in range(replicas if isinstance(what, WithinReplica) else 1)}
        fewest = min(counts, key=lambda replica: counts[replica])
        if counts[fewest] < max(counts.values()):
            return ranks_of(what, fewest * places, replicas * places, places)
    return None
