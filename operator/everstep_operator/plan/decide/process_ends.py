"""Notices a process that its agent has replaced: the pod lives, so no worker is lost, but the training stood still.

The agents need nothing from the operator for that. It is recorded, so that a person sees which worker cost the time,
and why. Nothing is charged: the agents restart only what was ended from outside, or hung.
"""

from __future__ import annotations

from datetime import timedelta

from everstep_operator.api.conditions import Cause, Rung
from everstep_operator.api.events import EventReason
from everstep_operator.plan.decide.decision import RecoveryStart, Repaired
from everstep_operator.plan.outcome import Event, LostWorker
from everstep_operator.plan.state.facts import Facts
from everstep_operator.plan.state.losses import Loss
from everstep_operator.round_view import ProcessEnd


def when_a_process_was_replaced(facts: Facts) -> Repaired | None:
    view = facts.round_view
    if view is None or view.closed is not None:
        return None
    end = next((end for end in view.ends if _is_new(facts, end)), None)
    if end is None:
        return None
    pod = facts.current.get(end.index)
    node = pod.node if pod is not None else None
    loss = Loss(end.index, Cause.SIGNALED, end.detail, pod.name if pod is not None else None, node, at=end.at)
    where = f" on {node}" if node else ""
    more = f", and {end.more} more" if end.more else ""
    message = f"worker {end.index}{where} lost a process ({loss.cause}): {loss.detail}{more}"
    return Repaired(
        message,
        Event(EventReason.WORKER_LOST, f"{message}; its agent starts another in the same pod"),
        RecoveryStart(loss, Rung.RESTART, follows=False, at=end.at, stood=timedelta(seconds=end.stood_seconds)),
        LostWorker(loss.cause, node, end.at),
    )


def _is_new(facts: Facts, end: ProcessEnd) -> bool:
    """Whether no recovery has been recorded since: a later one includes what ended before it began."""
    worker = facts.roster.workers.get(end.index)
    if worker is None or worker.number != end.incarnation:
        return False
    noticed = facts.snapshot.progress.lost_at  # this leader's, and exact
    if noticed is None:
        noticed = next((r.at for r in facts.job.status.recoveries if r.rung != Rung.REGROW), None)
    return noticed is None or end.at > noticed
