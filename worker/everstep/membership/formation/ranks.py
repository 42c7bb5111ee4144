"""Assigns ranks to the members of a new round. Pure.

Invariants: ranks are dense, and a survivor keeps its rank unless the world is now too small for it. A new rank means
another shard and other neighbours, so few ranks should change. Survivors keep their order, too, with one exception. If
a group of agents holds a replica of the model together, a survivor that must move takes the same place in another
group, if one is free, because it then keeps its part of the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from everstep.contract.document import Member


def assign(previous: Sequence[Member], chosen: Iterable[Member], group: int = 1) -> tuple[Member, ...]:
    """The chosen members in rank order. `previous`: the members of the round before, in rank order. Each `group`
    members in a row, from rank 0 on, hold one replica of the model."""
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
        # At most the highest rank that leaves room for the survivors behind. Both terms grow strictly, so no two
        # survivors get one rank.
        places[min(rank, size - len(survivors) + position)] = member
    return places


def _in_parts(survivors: Sequence[tuple[int, Member]], size: int, group: int) -> list[Member | None]:
    """The places of the survivors. A survivor that must move has none if no rank with its place in a group is free."""
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
    """Give each joiner the rank that its index had, if that is free, and the others the lowest free ranks."""
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
