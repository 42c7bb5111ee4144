"""Publishes a new roster if another number of workers is wanted, or the published one is out of date."""

from __future__ import annotations

from everstep_operator.api.conditions import ReadyReason
from everstep_operator.api.events import EventReason
from everstep_operator.object_names import number_of_spares, resizing
from everstep_operator.plan.decide.decision import Publish
from everstep_operator.plan.outcome import Event
from everstep_operator.plan.state import roster
from everstep_operator.plan.state.facts import Facts


def when_the_size_changes(facts: Facts) -> Publish | None:
    spares = facts.kept_spares
    if facts.wanted == facts.roster.wanted:
        if spares == facts.roster.spares:
            return None
        return Publish(_revised(facts), f"keeping {number_of_spares(spares)} instead of {facts.roster.spares}")
    message = resizing(facts.roster.wanted, facts.wanted)
    event = Event(EventReason.WORLD_RESIZED, message)
    return Publish(_revised(facts), message, ReadyReason.RESIZING, event)


def when_out_of_date(facts: Facts) -> Publish | None:
    """A new roster, if somebody edited the status or it is older than the pods."""
    newer = roster.raised_to_pods(facts.snapshot, _revised(facts))
    return None if newer == facts.roster else Publish(newer, "roster out of date: republishing")


def _revised(facts: Facts) -> roster.Roster:
    return facts.successor(replaced=facts.regrows)
