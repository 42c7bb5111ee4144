"""Selects the members of the next round, or says what must be waited for before it can be formed. Pure.

If all allowed sizes are multiples of a number, that many agents are a group: they hold one replica of the model
together, a part each. Agents at the same place of different groups hold the same part. If there are more agents than
fit, whole groups are kept whole. Of the agents that have lost a partner, those are kept that hold different parts.

Invariants: only agents that ask for the round are in it; its size is allowed; no two members are a reported pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from everstep.contract.document import MAX_MEMBERS, Document, Member
from everstep.membership.commands import Waited
from everstep.membership.formation.ranks import assign
from everstep.membership.formation.reachability import largest_set


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


def _everyone(document: Document) -> tuple[Member, ...]:
    """The members that remain in the round, and the agents that wait for the next."""
    remaining = document.remaining()
    here = {member.agent for member in remaining}
    return (*remaining, *(member for member in document.joining if member.agent not in here))


def _preferred(document: Document, pool: Sequence[Member]) -> list[Member]:
    """The waiting agents, in the order in which they are taken.

    Agents that are asked to stop come last. Among the others, whole groups come first. Then comes one survivor for each
    place in a group, then a second one for each place, and so on. Then come new agents.
    """
    group = document.sizes.group
    stopping, here = set(document.stopping), {member.agent for member in pool}
    survivors = {member.agent for member in document.remaining()}
    rank = {member.agent: rank for rank, member in enumerate(document.members) if member.agent in survivors}
    stay = [agent for agent in rank if agent in here and agent not in stopping]
    partners = Counter(rank[agent] // group for agent in stay)
    turn: dict[str, int] = {}
    taken: Counter[int] = Counter()
    for agent in stay:
        whole, place = partners[rank[agent] // group] == group, rank[agent] % group
        taken[place] += not whole
        turn[agent] = 0 if whole else taken[place]

    def order(member: Member) -> tuple[bool, int, int, int, str]:
        agent = member.agent
        last = MAX_MEMBERS
        return agent in stopping, turn.get(agent, last), rank.get(agent, last), member.index, agent

    return sorted(pool, key=order)


def _names(agents: list[str]) -> str:
    return ", ".join(agents[:5]) + (f" and {len(agents) - 5} more" if len(agents) > 5 else "")
