"""Replaces lost spares. All workers train meanwhile, so nothing is charged, no recovery begins, and no rule applies.

A spare whose program fails would be created again and again. So its successors wait longer and longer, but only while
all workers train: what the training needs is never held back for a spare's sake.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from everstep_operator import object_names
from everstep_operator.api.events import EventReason
from everstep_operator.api.recovery import Backoff
from everstep_operator.api.status import Restarts
from everstep_operator.plan.decide import rejections
from everstep_operator.plan.decide.decision import Publish
from everstep_operator.plan.outcome import Event, LostWorker
from everstep_operator.plan.state.facts import Facts
from everstep_operator.plan.state.losses import Charge, Loss

# Failures within this time of each other are one series.
REMEMBERED = timedelta(minutes=30)


def replaced(facts: Facts, lost: tuple[Loss, ...]) -> Publish:
    """The roster in which spares have the places of the lost spares."""
    root, now, before = lost[0], facts.snapshot.now, facts.job.status.restarts
    restarts = rejections.counted(now, before, lost)
    if any(loss.charge is Charge.USER_CODE for loss in lost):
        in_a_row = before.spare_failures if _is_remembered(now, before) else 0
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
    seconds = min(back_off.max, back_off.initial * 2 ** min(restarts.spare_failures - 1, 30))
    start = restarts.spare_failed_at + timedelta(seconds=seconds)
    return start if now < start else None


def _is_remembered(now: datetime, restarts: Restarts) -> bool:
    return restarts.spare_failed_at is not None and now - restarts.spare_failed_at <= REMEMBERED
