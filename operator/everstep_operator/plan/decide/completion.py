"""Decides that a job has ended: all workers have succeeded, or those that `spec.successPolicy` names, or its time is
over. No worker is added when training ends."""

from __future__ import annotations

from datetime import datetime

from everstep_operator import object_names
from everstep_operator.api.conditions import Cause, ConditionType, FailedReason
from everstep_operator.api.status import Status
from everstep_operator.api.types import SuccessPolicy
from everstep_operator.plan import times
from everstep_operator.plan.decide.decision import Complete, Failed, Keep
from everstep_operator.plan.snapshot import Snapshot
from everstep_operator.plan.state.facts import Facts
from everstep_operator.plan.state.losses import losses_among
from everstep_operator.plan.state.world_state import is_awaited
from everstep_operator.round_view import RoundView


def is_finished(seen: Status) -> bool:
    return seen.holds(ConditionType.COMPLETE) or seen.holds(ConditionType.FAILED)


def deadline(snapshot: Snapshot) -> datetime | None:
    """The moment when `activeDeadlineSeconds` is over. As in batch/v1 it is counted from the last resume of a job that
    was suspended."""
    seconds, start = snapshot.job.spec.active_deadline_seconds, snapshot.job.status.start_time
    return None if seconds is None or start is None else times.after(start, seconds)


def when_overdue(facts: Facts) -> Failed | None:
    """The job's failure, if `activeDeadlineSeconds` is over."""
    due = deadline(facts.snapshot)
    if due is None or facts.snapshot.now < due:
        return None
    seconds = facts.job.spec.active_deadline_seconds
    return Failed(FailedReason.DEADLINE_EXCEEDED, f"spec.activeDeadlineSeconds ({seconds} s) is over")


def when_training_ends(facts: Facts) -> Keep | None:
    return Keep() if ends(facts) else None


def ends(facts: Facts) -> bool:
    """Whether the training has ended, or may have: then no worker is added to the job. An operator that has just begun
    to lead cannot know before it has read the round."""
    if facts.round_view is not None:
        return _has_finished(facts.round_view)
    return is_awaited(facts.snapshot) and bool(facts.succeeded)


def when_all_succeeded(facts: Facts) -> Complete | None:
    workers = _completed(facts)
    if workers is None:
        return None
    return Complete(f"all {workers} workers succeeded" if workers != 1 else "the worker succeeded")


def when_worker_0_succeeded(facts: Facts) -> Complete | None:
    """The job's success, if its policy asks for that of worker 0 only. The end of its container is what counts, and no
    word of its agent: a wrapper around the launcher may have work left. So this also holds for an operator that has not
    read the round yet."""
    if facts.job.spec.success_policy is not SuccessPolicy.WORKER_0 or 0 not in facts.succeeded:
        return None
    return Complete("worker 0 succeeded (spec.successPolicy: Worker0)")


def _completed(facts: Facts) -> int | None:
    """The number of workers that succeeded, if the job is complete. Workers outside the world have nothing left to
    join."""
    done, world, view = facts.succeeded, facts.world, facts.round_view
    if view is not None and _has_finished(view):
        # The agents have exchanged their success. A member without a pod (scaled away, deleted, its node lost)
        # is not needed any more. A member whose pod still runs gets the time to end by itself.
        return None if _still_ending(facts.snapshot, view) else len(view.members)
    if done and done == facts.roster.workers.keys():
        return len(done)  # no other worker is wanted, however large the world was before
    if facts.roster.replaces_all or is_awaited(facts.snapshot):
        return None
    if view is not None:
        return world.size if 0 < len(world.members) == world.size and world.members <= done else None
    started = {i for i, p in facts.current.items() if p.ready or p.finished}
    shut_out = {loss.index for loss in facts.lost if loss.cause is Cause.PEER_LOST}
    all_done = bool(done) and started - shut_out == done and facts.sizes.largest(len(done)) > 0
    return len(world.members) if all_done else None


def _has_finished(view: RoundView) -> bool:
    return view.finished and bool(view.members)


def _still_ending(snapshot: Snapshot, view: RoundView) -> bool:
    """Whether a member of the last round has a running pod. Pods are found by name, because the roster may be newer."""
    by_name = {p.name: p for p in snapshot.pods if p.round is None}
    named = {i: object_names.pod_name(snapshot.job.name, i, incarnation) for i, incarnation in view.members}
    present = {i: by_name[name] for i, name in named.items() if name in by_name and by_name[name].index == i}
    lost = {loss.index for loss in losses_among(snapshot, present, dict.fromkeys(present, True))}
    return any(not p.succeeded and i not in lost for i, p in present.items())
