"""Which rank each member of a new round has. Pure.

Invariants: each survivor keeps its rank unless the world is now too small for that, so as many as possible do; ranks
are dense. A moved rank is a moved shard and a new neighbour, so moving is what must be rare. Survivors keep their
order, too. Not so where groups of agents hold a replica of the model together: there who has to move keeps its place in
a group, and with it its part of the model, where such a place is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from everstep.contract.document import Member


def assign(previous: Sequence[Member], chosen: Iterable[Member], group: int = 1) -> tuple[Member, ...]:
    """The chosen in rank order. `previous` are the members of the round before, in rank order; so many of them, from
    rank 0 on, are a `group`."""
    pool = {member.agent: member for member in chosen}
    survivors = [(rank, pool[old.agent]) for rank, old in enumerate(previous) if old.agent in pool]
    places = _in_order(survivors, len(pool)) if group == 1 else _in_parts(survivors, len(pool), group)
    placed = {member.agent for member in places if member is not None}
    others = [member for member in pool.values() if member.agent not in placed]
    others.sort(key=lambda m: (m.index, m.agent))
    return tuple(_fill(places, others, previous))


def _in_order(survivors: Sequence[tuple[int, Member]], size: int) -> list[Member | None]:
    places: list[Member | None] = [None] * size
    for position, (rank, member) in enumerate(survivors):
        # The highest rank that leaves room for those behind; both terms grow strictly, so no two meet.
        places[min(rank, size - len(survivors) + position)] = member
    return places


def _in_parts(survivors: Sequence[tuple[int, Member]], size: int, group: int) -> list[Member | None]:
    """Without those that have to move and find no free rank of their place in a group."""
    places: list[Member | None] = [None] * size
    for rank, member in survivors:
        if rank < size:
            places[rank] = member
    free = [deque(rank for rank in range(part, size, group) if places[rank] is None) for part in range(group)]
    for rank, member in survivors:
        if rank >= size and free[rank % group]:
            places[free[rank % group].popleft()] = member
    return places


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
