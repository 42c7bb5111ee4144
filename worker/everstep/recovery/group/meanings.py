"""Maps a group of the script to its ranks in each world, where a replica is `places` neighbours in rank. Pure.

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

    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AcrossReplicas:
    """The ranks of this place in all replicas."""

    place: int


GroupMeaning = AllRanks | WithinReplica | AcrossReplicas


def meaning(ranks: Sequence[int], most: int, places: int) -> tuple[GroupMeaning, int] | None:
    """The meaning of these ranks in a world of `most`, and the number of their replica (0 if all replicas take part).
    None if these ranks have no meaning in another world."""
    found = sorted(ranks)
    if not found or found[0] < 0 or found[-1] >= most or len(set(found)) < len(found) or most % places:
        return None
    # Checked first, because it is more precise in a job of one replica: each process knows its place.
    if most > 1 and found[0] // places == found[-1] // places:
        return WithinReplica(tuple(rank % places for rank in found)), found[0] // places
    if found == list(range(most)):
        return AllRanks(), 0
    if found == list(range(found[0] % places, most, places)):
        return AcrossReplicas(found[0] % places), 0
    return None


def ranks_of(what: GroupMeaning, rank: int, size: int, places: int) -> list[int]:
    """The ranks, in a world of `size`, of the group that contains rank `rank`."""
    match what:
        case AllRanks():
            return list(range(size))
        case WithinReplica(inside):
            first = rank // places * places
            return [first + place for place in inside]
        case AcrossReplicas(place):
            return list(range(place, size, places))


def name_of(what: GroupMeaning, nth: int, rank: int, places: int) -> str:
    """The name of the group of this meaning that contains rank `rank`. Its members use the same name, and no other
    group has it."""
    match what:
        case AllRanks():
            return f"own-{nth}"
        case WithinReplica(inside):
            return f"inside-{nth}-{'-'.join(map(str, inside))}-of-{rank // places}"
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


def lacking(made: Counter[tuple[GroupMeaning, int]], replicas: int, places: int) -> list[int] | None:
    """The ranks of a group that the script has made for some replicas but not for all; None if there is none. `made`:
    the number of groups by meaning and replica."""
    for what, _ in made:
        counts = {replica: made[what, replica] for replica in range(replicas if isinstance(what, WithinReplica) else 1)}
        fewest = min(counts, key=lambda replica: counts[replica])
        if counts[fewest] < max(counts.values()):
            return ranks_of(what, fewest * places, replicas * places, places)
    return None
