"""Selects the members of the next round, or says what must be waited for before it can be formed. Pure.

If all allowed sizes are multiples of a number, that many agents are a group: they hold one replica of the model
together, a part each. Agents at the same place of different groups hold the same part. If there are more agents than
fit, whole groups are kept whole. Of the agents that have lost a partner, those are kept that hold different parts.

Invariants: only agents that ask for the round are in it; its size is allowed; no two members are a reported pair.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import combinations

from everstep.contract.document import MAX_MEMBERS, Document, Member, Report
from everstep.membership.commands import Waited

# --- ranks
# Assigns ranks to the members of a new round. Invariants: ranks are dense, and a survivor keeps its rank unless the
# world is now too small for it. A new rank means another shard and other neighbours, so few ranks should change.
# Survivors keep their order, too, with one exception. If a group of agents holds a replica of the model together, a
# survivor that must move takes the same place in another group, if one is free, because it then keeps its part of the
# model.


def assign(previous: Sequence[Member], chosen: Iterable[Member], group: int = 1) -> tuple[Member, ...]:
    """The chosen members in rank order. `previous`: the members of the round before, in rank order. Each `group`
    members in a row, from rank 0 on, hold one replica of the model."""
    pool = {member.agent: member for member in chosen}
    survivors = [(rank, pool[old.agent]) for rank, old in enumerate(previous) if old.agent in pool]
    ranks = _in_order(survivors, len(pool)) if group == 1 else _in_parts(survivors, len(pool), group)
    placed = {member.agent for member in ranks if member is not None}
    others = [member for member in pool.values() if member.agent not in placed]
    others.sort(key=lambda m: (m.index, m.agent))
    return tuple(_fill(ranks, others, previous))


def _in_order(survivors: Sequence[tuple[int, Member]], size: int) -> list[Member | None]:
    ranks: list[Member | None] = [None] * size
    for position, (rank, member) in enumerate(survivors):
        # At most the highest rank that leaves room for the survivors behind. Both terms grow strictly, so no two
        # survivors get one rank.
        ranks[min(rank, size - len(survivors) + position)] = member
    return ranks


def _in_parts(survivors: Sequence[tuple[int, Member]], size: int, group: int) -> list[Member | None]:
    """The places of the survivors. A survivor that must move has none if no rank with its place in a group is free."""
    ranks: list[Member | None] = [None] * size
    for rank, member in survivors:
        if rank < size:
            ranks[rank] = member
    free = [deque(rank for rank in range(part, size, group) if ranks[rank] is None) for part in range(group)]
    for rank, member in survivors:
        if rank >= size and free[rank % group]:
            ranks[free[rank % group].popleft()] = member
    return ranks


def _fill(ranks: list[Member | None], joiners: list[Member], previous: Sequence[Member]) -> list[Member]:
    """Give each joiner the rank that its index had, if that is free, and the others the lowest free ranks."""
    had = {member.index: rank for rank, member in enumerate(previous)}
    rest = []
    for joiner in joiners:
        rank = had.get(joiner.index, len(ranks))
        if rank < len(ranks) and ranks[rank] is None:
            ranks[rank] = joiner
        else:
            rest.append(joiner)
    waiting = iter(rest)
    return [next(waiting) if member is None else member for member in ranks]


# --- reachability
# Selects the members that stay when some pairs of them do not reach each other. Invariant: no two members that stay are
# a reported pair. The largest such set stays; among equal ones, the set with the lowest indices. The result is exact
# for up to `EXACT` members with a report, and greedy beyond (the exact problem is NP-hard).

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


# --- selection


def next_members(document: Document, waited: Waited, *, shrink: bool) -> tuple[Member, ...] | str:
    """The members of the next round in rank order; or why it cannot be formed, or what it waits for."""
    waiting = {member.agent for member in document.joining}
    remaining = document.remaining()
    missing = [member.agent for member in remaining if member.agent not in waiting]
    if missing and not document.gone and document.broken is None and len(missing) == len(remaining):
        return f"round {document.round} runs: its members take in who waits"
    # A member that the others do not reach is not waited for: it will not be in the next round, even if it comes.
    able = {member.agent for member in largest_set(_everyone(document), document.reports)}
    awaited = [agent for agent in missing if agent in able]
    if awaited and waited < Waited.REJOIN:
        return f"waiting for {_names(awaited)} of round {document.round} to join again"
    pool = largest_set(document.joining, document.reports)
    size = document.sizes.largest(len(pool))
    if size == 0:
        apart = ", without who does not reach another" if len(pool) < len(document.joining) else ""
        return f"{len(pool)} of at least {document.sizes.minimum} agents wait{apart}"
    if not remaining and size < document.sizes.maximum and waited < Waited.LAST_CALL:
        return f"{len(pool)} of at most {document.sizes.maximum} agents wait: last call"
    whole = document.sizes.largest(len(document.members))
    if remaining and size < whole and not shrink:
        return f"{size} of {whole} agents are here: waiting for replacements before going on with fewer"
    chosen = _preferred(document, pool)[:size]
    survivors = {member.agent for member in remaining}
    if all(m.agent in document.stopping and m.agent not in survivors for m in chosen):
        return "all who wait are asked to stop, and have nothing to save together"
    return assign(document.members, chosen, document.sizes.group)


def growth(document: Document) -> int:
    """How many more members the round would have if it were formed again now; 0 if it would not be larger."""
    remaining = document.remaining()
    if not document.joining or document.done:  # a job that is about to end does not grow
        return 0
    return max(0, connected(document) - len(remaining))


def is_spare(document: Document, agent: str) -> bool:
    """Whether the agent is a spare: it waits, but the running round has no place for it until a member is lost."""
    if not document.remaining() or document.gone or document.broken is not None or document.done:
        return False
    waiting = [member.agent for member in document.joining]
    rejoins = any(member.agent in waiting for member in document.members)
    apart = any(report.active and agent in (report.low, report.high) for report in document.reports)
    return agent in waiting and not rejoins and not apart and growth(document) == 0


def connected(document: Document) -> int:
    """The size of the largest round of agents that are here and reach each other; 0 if they are too few."""
    return document.sizes.largest(len(largest_set(_everyone(document), document.reports)))


def expected_rank(document: Document, index: int) -> tuple[int, int] | None:
    """The rank, and the number of members, that a new agent of this worker may expect in the round that takes it in;
    None: there was no round yet."""
    if not document.members:
        return None
    size = document.sizes.largest(len(_everyone(document)) + 1) or document.sizes.minimum
    rank = next((rank for rank, member in enumerate(document.members) if member.index == index), index)
    return (rank if 0 <= rank < size else size - 1), size


def _everyone(document: Document) -> tuple[Member, ...]:
    """The members that remain in the round, and the agents that wait for the next."""
    remaining = document.remaining()
    here = {member.agent for member in remaining}
    return (*remaining, *(member for member in document.joining if member.agent not in here))


def _preferred(document: Document, pool: Sequence[Member]) -> list[Member]:
    """The waiting agents, in the order in which they are taken.

    Agents that are asked to stop come last, but for the first survivor if all are asked: it alone has the training
    state. Among the others, whole groups come first. Then comes one survivor for each place in a group, then a second
    one for each place, and so on. Then come new agents.
    """
    group = document.sizes.group
    stopping, here = set(document.stopping), {member.agent for member in pool}
    survivors = {member.agent for member in document.remaining()}
    rank = {member.agent: rank for rank, member in enumerate(document.members) if member.agent in survivors}
    survived = [agent for agent in rank if agent in here]
    stay = [agent for agent in survived if agent not in stopping]
    if not stay:
        stopping.difference_update(survived[:1])
    partners = Counter(rank[agent] // group for agent in stay)
    turn: dict[str, int] = {}
    taken: Counter[int] = Counter()
    for agent in stay:
        whole, part = partners[rank[agent] // group] == group, rank[agent] % group
        taken[part] += not whole
        turn[agent] = 0 if whole else taken[part]

    def priority(member: Member) -> tuple[bool, int, int, int, str]:
        agent = member.agent
        last = MAX_MEMBERS
        return agent in stopping, turn.get(agent, last), rank.get(agent, last), member.index, agent

    return sorted(pool, key=priority)


def _names(agents: list[str]) -> str:
    return ", ".join(agents[:5]) + (f" and {len(agents) - 5} more" if len(agents) > 5 else "")
