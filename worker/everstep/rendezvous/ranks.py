"""Which rank each member of a new round has. Pure.

Invariants: survivors keep their order; each keeps its rank unless the world is now too small for that, so as many as
possible do; ranks are dense. A moved rank is a moved shard and a new neighbour, so moving is what must be rare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from everstep.contract.document import Member


def assign(previous: Sequence[Member], chosen: Iterable[Member]) -> tuple[Member, ...]:
    """The chosen in rank order. `previous` are the members of the round before, in rank order."""
    pool = {member.agent: member for member in chosen}
    survivors = [(rank, pool[old.agent]) for rank, old in enumerate(previous) if old.agent in pool]
    size, kept = len(pool), len(survivors)
    places: list[Member | None] = [None] * size
    for position, (rank, member) in enumerate(survivors):
        # The highest rank that leaves room for those behind; both terms grow strictly, so no two meet.
        places[min(rank, size - kept + position)] = member
    survived = {member.agent for _, member in survivors}
    joiners = [member for member in pool.values() if member.agent not in survived]
    joiners.sort(key=lambda m: (m.index, m.agent))
    return tuple(_fill(places, joiners, previous))


def _fill(places: list[Member | None], joiners: list[Member], previous: Sequence[Member]) -> list[Member]:
    """Each joiner to the rank that its index had, if that is free; the others to the lowest free ranks."""
    had = {member.index: rank for rank, member in enumerate(previous)}
    rest = []
    for joiner in joiners:
        rank = had.get(joiner.index, len(places))
        if rank < len(places) and places[rank] is None:
            places[rank] = joiner
        else:
            rest.append(joiner)
    waiting = iter(rest)
    return [next(waiting) if member is None else member for member in places]
