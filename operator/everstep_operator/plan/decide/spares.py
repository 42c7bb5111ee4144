"""Replaces lost spares. All workers train meanwhile, so nothing is charged, no recovery begins, and no rule applies.

A spare whose program fails would be created again and again. So its successors wait longer and longer, but only while
all workers train: what the training needs is never held back for a spare's sake.
"""

from __future__ import annotations

from datetime import datetime

from everstep_operator import object_names
from everstep_operator.api.events import EventReason
from everstep_operator.api.recovery import Backoff
from everstep_operator.api.status import Restarts
from everstep_operator.plan.decide import rejections, restart_budget
from everstep_operator.plan.decide.decision import Publish
from everstep_operator.plan.outcome import Event, LostWorker
from everstep_operator.plan.state.facts import Facts
from everstep_operator.plan.state.losses import Charge, Loss


def replaced(facts: Facts, lost: tuple[Loss, ...]) -> Publish:
    """The roster in which spares have the places of the lost spares."""
    root, now, before = lost[0], facts.snapshot.now, facts.job.status.restarts
    restarts = restart_budget.counted_by_node(facts, before, lost)
    if any(loss.charge is Charge.USER_CODE for loss in lost):
        in_a_row = before.spare_failures if rejections.is_remembered(now, before.spare_failed_at) else 0
        restarts = restarts.model_copy(update={"spare_failures": in_a_row + 1, "spare_failed_at": now})
    indices = {loss.index for loss in lost}
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    reaction = f"replacing {object_names.list_of_workers(indices)}" if facts.regrows else "not replaced (regrow: false)"
    message = f"{root.sentence}{more}; all workers train without it; {reaction}"
    return Publish(
        facts.successor(indices, replaced=facts.regrows),
        message,
        event=Event(EventReason.SPARE_LOST, message),
        restarts=restarts,
        lost=LostWorker(root.cause, root.node),
    )


def back_off_until(now: datetime, restarts: Restarts, back_off: Backoff) -> datetime | None:
    """The time from which spares may be created, if that is later than `now`."""
    if restarts.spare_failed_at is None or restarts.spare_failures == 0:
        return None
    start = restarts.spare_failed_at + back_off.after(restarts.spare_failures)
    return start if now < start else None
