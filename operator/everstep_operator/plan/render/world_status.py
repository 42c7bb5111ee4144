"""Builds `status.world`: the round that trains, or the last that did."""

from __future__ import annotations

from everstep_operator.api.status import World
from everstep_operator.plan.state.facts import Facts


def render(facts: Facts) -> World:
    if facts.roster.replaces_all:
        return _published(facts)
    world = _formed(facts)
    if facts.roster.wanted == 0:
        world = world.model_copy(update={"size": 0, "formed_at": None, "formed_round": None})
    return world


def _published(facts: Facts) -> World:
    """Under c10d the operator numbers the rounds, and this is where the roster is kept (ADR 0027)."""
    old, number = facts.job.status.world, facts.roster.next_incarnation
    if number > old.round:
        return World(round=number, size=len(facts.roster.workers), since=facts.snapshot.now)
    if facts.world.has_quorum and old.formed_at is None:
        return old.model_copy(update={"formed_at": facts.snapshot.now})
    return old


def _formed(facts: Facts) -> World:
    """The world of a job whose agents form the rounds. `round` is the round store's number; the other fields describe
    the last round that was complete.

    If somebody emptied the status, the number comes from the round store: the commit log fences by it, so it must not
    fall.
    """
    old, seen = facts.job.status.world, facts.world
    number = max(old.round, seen.round)
    is_new = old.formed_at is None or (old.formed_round, old.size) != (seen.round, seen.size)
    if seen.has_quorum and is_new:
        at = facts.snapshot.now
        return World(round=number, size=seen.size, since=at, formed_at=at, formed_round=seen.round)
    return old.model_copy(update={"round": number})
