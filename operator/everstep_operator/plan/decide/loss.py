"""Decides about lost workers: whether the job may go on, what that costs, and which workers are replaced.

If the agents form the rounds, the other workers keep their pods (ADR 0010). Under c10d all workers are replaced,
because torchrun's store dies with worker 0, and a torchrun that lost a peer has given up its rendezvous (ADR 0027).
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import assert_never

from everstep_operator import object_names
from everstep_operator.api.conditions import Cause, FailedReason, ReadyReason, Rung
from everstep_operator.api.events import EventReason
from everstep_operator.api.status import Restarts
from everstep_operator.plan.decide import restart_budget, spares, start_failures
from everstep_operator.plan.decide.decision import Failed, Publish, RecoveryStart, Wait
from everstep_operator.plan.outcome import Event, LostWorker
from everstep_operator.plan.snapshot import Snapshot, WorkerPod
from everstep_operator.plan.state.facts import Facts
from everstep_operator.plan.state.losses import Loss
from everstep_operator.plan.state.world_state import is_awaited

# A loss within this time of an incident is part of it, if the lost worker existed when the incident began.
INCIDENT = timedelta(seconds=10)
# Under c10d the failures of peers often become visible before the failure that caused them. It is waited for this long.
CAUSE_WAIT = timedelta(seconds=2)
# Between two looks at a round that this operator has not read yet; it is read as soon as it begins to lead.
UNREAD_WAIT = timedelta(seconds=1)


def when_workers_are_lost(facts: Facts) -> Failed | Publish | Wait | None:
    lost = losses_to_replace(facts)
    if not lost:
        return None
    if all(loss.index in facts.spares for loss in lost):
        return spares.replaced(facts, lost)
    if facts.roster.beside and is_awaited(facts.snapshot):
        return Wait(UNREAD_WAIT, "waiting for the round, which shows who trains")
    # Whatever ended a worker that waits, the training has lost the one that trained.
    root = next((loss for loss in lost if facts.roster.beside and loss.index in facts.trained), lost[0])
    if (left := _wait_for_cause(facts, lost)) is not None:
        return Wait(left, f"worker {root.index} lost a peer; waiting to see which one")
    if (why := _rendezvous_closed(facts, lost)) is not None:
        return Failed(FailedReason.RENDEZVOUS_CLOSED, f"{root.sentence}; the agents gave the job up: {why}", root)
    # Under c10d no worker outlives an incident, so no loss can belong to the incident before.
    follows = not facts.roster.replaces_all and _follows(facts.snapshot, root, facts.current.get(root.index))
    match restart_budget.judge(facts.snapshot, root, follows=follows):
        case restart_budget.Fail(reason, message, event):
            return Failed(reason, message, root, event)
        case restart_budget.Restart(restarts):
            if facts.world.has_quorum and restarts.start_timeouts:
                # Enough others train: a worker that never starts is no reason to end them.
                restarts = restarts.model_copy(update={"start_timeouts": 0})
            if root.cause is Cause.START_TIMEOUT and restarts.start_timeouts >= _limit(facts):
                return Failed(
                    FailedReason.START_TIMED_OUT,
                    f"worker {root.index}: {root.detail}; {restart_budget.in_a_row(restarts.start_timeouts)} "
                    "(spec.recovery.noProgressLimit)",
                    root,
                )
            return _replace(facts, root, lost, restarts, follows)
        case other:
            assert_never(other)


def _limit(facts: Facts) -> int:
    return facts.job.spec.recovery.no_progress_limit


def _replace(facts: Facts, root: Loss, lost: tuple[Loss, ...], restarts: Restarts, follows: bool) -> Publish:
    indices = {loss.index for loss in lost}
    hit = not indices.isdisjoint(facts.trained)
    left_at = _left_at(facts, root)
    replaced = not _can_do_without(facts, indices)
    if hit and replaced:
        # Replaced workers need all peers, so a worker that has succeeded is replaced with them.
        indices |= facts.succeeded
    if replaced:
        indices |= facts.outdated  # the replaced workers are made from another spec than these
    if not follows and not facts.roster.replaces_all:
        restarts = restarts.model_copy(update={"incident_at": facts.snapshot.now})
    restarts = start_failures.counted(facts.job.status.restarts, restarts, lost)
    restarts = restart_budget.counted_by_node(facts, restarts, lost)
    # Under c10d the other workers fail because of the first one, so they are not mentioned.
    more = f", and {len(lost) - 1} more" if len(lost) > 1 and not facts.roster.replaces_all else ""
    message = root.sentence + more
    reaction = "going on without a replacement (spec.elastic.regrow)"
    if replaced:
        reaction = (
            "recreating the world"
            if facts.roster.replaces_all
            else f"replacing {object_names.list_of_workers(indices)}"
        )
    return Publish(
        facts.successor(indices, replaced=replaced),
        message,
        ReadyReason.RECOVERING if hit else None,
        Event(EventReason.WORKER_LOST, f"{message}; {reaction}{start_failures.tried(facts.snapshot, restarts)}"),
        restarts,
        RecoveryStart(root, Rung.RECREATE if replaced else Rung.SHRINK, follows, left_at) if hit else None,
        None if follows else LostWorker(root.cause, root.node, left_at),
    )


def _left_at(facts: Facts, loss: Loss) -> datetime | None:
    """When the lost worker left its round, if the others are in the next already."""
    view = facts.round_view
    return view.left_at if view is not None and loss.index in facts.trained - facts.world.members else None


def losses_to_replace(facts: Facts) -> tuple[Loss, ...]:
    """The lost workers that are needed. A worker outside the last round of an ending job fails to join, because
    the rendezvous is closed. It is not needed while the others finish."""
    lost, view = facts.lost, facts.round_view
    if facts.roster.replaces_all:
        return lost
    if view is not None:
        if view.finished:
            return ()
        return lost if view.closed is None else tuple(loss for loss in lost if loss.index in facts.world.members)
    ending = bool(facts.succeeded)
    if is_awaited(facts.snapshot):
        return () if ending else lost
    others_run = any(p.running and p.deleted_at is None for p in facts.current.values())
    if not (ending and others_run):
        return lost
    return tuple(loss for loss in lost if loss.cause is not Cause.PEER_LOST)


def _wait_for_cause(facts: Facts, lost: tuple[Loss, ...]) -> timedelta | None:
    """How long to wait for the failure that caused the visible ones; None: judge now. Only c10d needs this: our own
    agents distinguish a failure from its consequences."""
    root = lost[0]
    if not facts.roster.replaces_all or root.cause is not Cause.PEER_LOST or root.at is None:
        return None
    waited = facts.snapshot.now - root.at
    cause_may_follow = len(lost) < len(facts.roster.workers) and timedelta(0) <= waited < CAUSE_WAIT
    return CAUSE_WAIT - waited if cause_may_follow else None


def _rendezvous_closed(facts: Facts, lost: tuple[Loss, ...]) -> str | None:
    """Why no lost worker can join again: the agents closed the rendezvous before all had succeeded. Under c10d each
    round has its own rendezvous."""
    if facts.succeeded or facts.roster.replaces_all:
        return None
    if facts.round_view is not None:
        return facts.round_view.closed
    shut_out = any("RendezvousClosedError" in line for loss in lost for line in loss.log_lines)
    return "they closed the rendezvous" if shut_out else None


def _follows(snapshot: Snapshot, loss: Loss, pod: WorkerPod | None) -> bool:
    """Whether a loss belongs to the last incident: it came soon after, and its worker existed when the incident
    began."""
    began = snapshot.job.status.restarts.incident_at
    if began is None or snapshot.now - began > INCIDENT:
        return False
    if pod is None or pod.created_at is None:
        return loss.cause is not Cause.START_TIMEOUT  # a worker without a pod is late by its own roster's time
    # Kubernetes gives times in whole seconds. Of the pods created in the incident's second, only a job's first pods are
    # older than the incident.
    second = began.replace(microsecond=0)
    return pod.created_at < second or (pod.created_at == second and pod.incarnation == 0)


def _can_do_without(facts: Facts, lost: set[int]) -> bool:
    """Whether lost workers are not replaced: `regrow: false`, and enough workers are left."""
    return not facts.regrows and facts.sizes.largest(len(facts.roster.workers) - len(lost)) > 0
