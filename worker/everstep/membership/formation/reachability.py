"""Selects the members that stay when some pairs of them do not reach each other. Pure.

Invariant: no two members that stay are a reported pair. The largest such set stays; among equal ones, the set with the
lowest indices. The result is exact for up to `EXACT` members with a report, and greedy beyond (the exact problem is
NP-hard).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from everstep.contract.document import Member, Report

EXACT = 12


def largest_set(members: Sequence[Member], reports: Iterable[Report]) -> tuple[Member, ...]:
    """The members that stay, in the order given."""
    here = {member.agent for member in members}
    pairs = {(r.low, r.high) for r in reports if r.active and r.low in here and r.high in here}
    if not pairs:
        return tuple(members)
    suspects = sorted(member for member in members if any(member.agent in pair for pair in pairs))
    out = _fewest(suspects, pairs) if len(suspects) <= EXACT else _greedy(suspects, pairs)
    return tuple(member for member in members if member.agent not in out)


def _fewest(suspects: list[Member], pairs: set[tuple[str, str]]) -> set[str]:
    """The smallest set whose removal leaves no pair; among equal ones, the set that leaves the lowest indices."""
    agents = [member.agent for member in suspects]
    for count in range(1, len(agents) + 1):
        # From the highest indices down, so that the first set found leaves the lowest indices.
        for out in combinations(reversed(agents), count):
            if all(low in out or high in out for low, high in pairs):
                return set(out)
    return set(agents)


def _greedy(suspects: list[Member], pairs: set[tuple[str, str]]) -> set[str]:
    out: set[str] = set()
    left = set(pairs)
    while left:
        counts = [(sum(m.agent in pair for pair in left), m.index, m.agent) for m in suspects]
        worst = max(counts)[2]
        out.add(worst)
        left = {pair for pair in left if worst not in pair}
    return out
