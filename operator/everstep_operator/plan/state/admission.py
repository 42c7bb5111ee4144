"""Whether the job may have pods now, as far as its queue decides: a closed union, derived in this one place.

A queue is Kueue's, and says it by a Workload that the operator makes (`render.workloads`, ADR 0068). `spec.suspend`
belongs to the user, and nothing here reads it.

Invariant: a job gets pods only from an admission that was observed, and never more than quota is taken for.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep_operator.plan.snapshot import QueueView, Snapshot, WorkloadView
from everstep_operator.plan.state import charged, sizing
from everstep_operator.plan.state.roster import Roster


@dataclass(frozen=True, slots=True)
class NotQueued:
    """No queue decides about this job."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """It has no quota, and no workers. `needs_person`: nothing changes that by itself."""

    reason: str
    needs_person: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """It may have so many pods. `obstacle`: why none can be made now; those that run go on. `workload` None: it cannot
    be read."""

    pods: int
    workload: WorkloadView | None
    obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    """Its workers have to leave, and then its quota is given back. `again`: the Workload stays in its queue; else it is
    deleted, and another one is made."""

    why: str
    workload: WorkloadView | None = None
    again: bool = False


Admission = NotQueued | Waiting | Admitted | Leaving


def of(snapshot: Snapshot, published: Roster) -> Admission:
    queue, spec = snapshot.queue, snapshot.job.spec
    if queue is None:
        return NotQueued()
    if queue.unread is not None:
        # An admission that cannot be read is none that was taken back.
        workers = len(published.workers)
        return Admitted(workers, None, queue.unread) if workers else Waiting(queue.unread, needs_person=True)
    workload = reserved(queue)
    if workload is None:
        if published.workers:
            lost = "its Workload was deleted" if queue.workloads else "the job has no Workload"
            return Leaving(
                "the label of its queue was removed" if queue.name is None else f"queue {queue.name}: {lost}"
            )
        return _waiting(snapshot, queue)
    if queue.name is None:
        return Leaving("the label of its queue was removed", workload)
    if workload.queue != queue.name:
        return Leaving(f"it moves from queue {workload.queue} to queue {queue.name}", workload)
    if workload.made_from != charged.made_from(spec):
        return Leaving(f"queue {queue.name}: its quota is that of an older template", workload)
    if workload.evicted is not None:
        return Leaving(f"queue {queue.name}: {workload.evicted}: {workload.evicted_message}", workload, again=True)
    if not workload.admitted and not published.workers:
        return Waiting(f"queue {queue.name}: quota is reserved, and admission checks are not done")
    if sizing.wanted(spec, workload.charged) == 0 < sizing.wanted(spec):
        least = sizing.bounds(spec).minimum
        return Leaving(
            f"queue {queue.name}: there is quota for {workload.charged} pods, and {least} are needed", workload
        )
    obstacle = queue.obstacle or charged.conflict(spec, queue.changes)
    if not workload.admitted:
        obstacle = "admission checks are not done"
    return Admitted(workload.charged, workload, obstacle and f"queue {queue.name}: {obstacle}")


def reserved(queue: QueueView) -> WorkloadView | None:
    """The Workload by which the job has quota."""
    return next((each for each in reversed(unfinished(queue)) if each.assigned is not None), None)


def pending(queue: QueueView) -> WorkloadView | None:
    """The newest Workload that has no quota yet."""
    return next((each for each in reversed(unfinished(queue)) if each.assigned is None), None)


def unfinished(queue: QueueView) -> list[WorkloadView]:
    return [each for each in queue.workloads if each.finished is None and not each.deleting]


def granted(admission: Admission) -> int | None:
    """How many pods the job may have; None: no queue decides that."""
    match admission:
        case NotQueued():
            return None
        case Admitted(pods):
            return pods
        case _:
            return 0


def _waiting(snapshot: Snapshot, queue: QueueView) -> Waiting:
    if queue.name is None:
        return Waiting("the label of its queue was removed")
    waits = f"waits in queue {queue.name}"
    refusal = queue.refusal or charged.refusal(snapshot.job.spec) or snapshot.object_refused
    workload = pending(queue)
    if refusal is not None:
        return Waiting(f"{waits}: {refusal}", needs_person=True)
    if workload is None:
        return Waiting(waits)
    if not workload.active:
        text = f"{waits}: Workload {workload.name} is deactivated; set its spec.active to true"
        return Waiting(text, needs_person=True)
    return Waiting(f"{waits}: {workload.waits}" if workload.waits else waits, workload.inadmissible)
