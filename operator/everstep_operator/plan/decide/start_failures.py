"""Judges programs that cannot start: whether trying again can help.

A script that does not exist fails in the same way at each try. Such a failure is recognised by the words of the program
or of the container runtime. It ends a job only while nothing shows that the job has ever run. A job that has run may
miss its script or a module for a moment, and keeps its whole restart budget. So does a job in which another worker
runs: then a node or a mount is broken, and not the program.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from everstep_operator.api.conditions import ConditionStatus, ConditionType
from everstep_operator.api.status import Restarts
from everstep_operator.plan.snapshot import Snapshot, WorkerPod
from everstep_operator.plan.state.losses import Loss

# A world that has been complete for this long has started, whether its script reports or not.
STOOD = timedelta(minutes=2)
# An older job may have run at a time of which nothing is known any more.
YOUNG = timedelta(minutes=30)
# Workers that fail by the same mistake fail within this time of each other. A worker that lives longer does not have
# the mistake.
SKEW = timedelta(seconds=5)


def has_run(snapshot: Snapshot) -> bool:
    """Whether the job's program has run, or may have run. Then its failures need not happen again."""
    return reports(snapshot) or may_have_run_unseen(snapshot)


def reports(snapshot: Snapshot) -> bool:
    """Whether the script reports its progress."""
    return snapshot.progress.updated_at is not None or snapshot.job.status.progress.updated_at is not None


def may_have_run_unseen(snapshot: Snapshot) -> bool:
    """Whether a program that has reported nothing may have run all the same."""
    status, now = snapshot.job.status, snapshot.now
    if status.restarts.total > status.restarts.start_failures + status.restarts.unstarted:
        return True  # an earlier loss had another reason, and its worker had started
    if status.world.formed_at is not None and now - status.world.formed_at > STOOD:
        return True
    began = status.start_time
    if status.earlier_active_seconds > 0 or began is None:
        # A suspension begins a new world, and the time for which it is complete.
        return status.earlier_active_seconds > 0
    # So does a change of the size. (An older operator kept the start of a job that was suspended since.)
    changed = (status.condition(type_) for type_ in (ConditionType.SUSPENDED, ConditionType.RESIZING))
    return now - began > YOUNG or any(
        c is not None and (c.status is ConditionStatus.TRUE or c.last_transition_time > began) for c in changed
    )


def runs_elsewhere(snapshot: Snapshot, index: int, pod: str | None) -> bool:
    """Whether another worker has succeeded, or has been Ready for longer than this one took to fail. The loss is then
    charged as any other, and from then on `has_run` is true."""
    failed = next((p for p in snapshot.pods if p.name == pod), None)
    if failed is None or failed.created_at is None:
        return False
    ended = failed.exit.finished_at if failed.exit is not None else None
    # By the clock of a node, which may be ahead.
    took = max(timedelta(0), min(ended or snapshot.now, snapshot.now) - failed.created_at)
    others = (p for p in snapshot.pods if p.index != index)
    return any(p.succeeded or _ready_for(snapshot, p) > took + SKEW for p in others)


def _ready_for(snapshot: Snapshot, pod: WorkerPod) -> timedelta:
    node = snapshot.nodes.get(pod.node or "")
    alive = pod.running and pod.ready and pod.deleted_at is None and (node is None or node.ready)
    since = pod.ready_at or pod.created_at
    return snapshot.now - since if alive and since is not None else timedelta(0)


def counted(before: Restarts, restarts: Restarts, lost: Iterable[Loss]) -> Restarts:
    """The counters after these losses. A restart of workers of which none had started does not show that the program
    has run."""
    is_new = restarts.total > before.total and restarts.start_failures == before.start_failures
    if not is_new or not all(loss.unstarted for loss in lost):
        return restarts
    return restarts.model_copy(update={"unstarted": restarts.unstarted + 1})


def tried(snapshot: Snapshot, restarts: Restarts) -> str:
    """Text for the event of a loss: how often the program could not start, and how many such failures end the job.
    Empty for other losses."""
    if restarts.start_failures == snapshot.job.status.restarts.start_failures:
        return ""
    return (
        f"; it has never run: start {restarts.start_failures} of {snapshot.job.spec.recovery.no_progress_limit} failed"
    )
