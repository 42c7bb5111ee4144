"""Whether the job may have pods now, as far as its queue decides: a closed union, derived in this one place.

A queue is Kueue's, and says it by a Workload that the operator makes (`render.workloads`, ADR 0068). `spec.suspend`
belongs to the user, and nothing here reads it.

Invariant: a job gets pods only from an admission that was observed, and never more than quota is taken for.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from everstep_operator.plan import times
from everstep_operator.plan.snapshot import QueueView, Snapshot, WorkloadView
from everstep_operator.plan.state import charged, sizing
from everstep_operator.plan.state.roster import Roster

REPLACED = "WorkloadSliceReplaced"  # why a Workload is over that a larger one replaces
# Kueue ends the smaller Workload, and admits the larger one in a second write, which may fail. A job trains on for so
# long without an admission.
BETWEEN = timedelta(seconds=60)
# Kueue answers within tenths of a second. Meanwhile a job that may grow further is not resized: else each step of its
# growth would be a round of its own.
ANSWER = timedelta(seconds=2)
# If Kueue fails to put a larger Workload in the place of the smaller one, as by a write between, it leaves it in its
# queue without a word, until something else happens there. After so long it is asked anew.
ASK_AGAIN = timedelta(seconds=10)


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
    be read, or is between two."""

    pods: int
    workload: WorkloadView | None
    obstacle: str | None = None
    until: datetime | None = None  # when to look again, if no change is observed


@dataclass(frozen=True, slots=True)
class Leaving:
    """Its workers have to leave, and then its quota is given back. `again`: the Workload stays in its queue; else it is
    deleted, and another one is made."""

    why: str
    workload: WorkloadView | None = None
    again: bool = False


Admission = NotQueued | Waiting | Admitted | Leaving


def of(snapshot: Snapshot, published: Roster) -> Admission:
    queue = snapshot.queue
    if queue is None:
        return NotQueued()
    if queue.unread is not None:
        # An admission that cannot be read is none that was taken back.
        if published.workers:
            return Admitted(_kept(published), None, queue.unread)
        return Waiting(queue.unread, needs_person=True)
    workload = reserved(queue)
    if workload is not None:
        return _with_quota(snapshot, queue, workload, published)
    if not published.workers:
        return _waiting(snapshot, queue)
    if (until := _between_until(snapshot, queue)) is not None:
        why = f"queue {queue.name}: a larger Workload has replaced its own, and is not admitted yet"
        return Admitted(_kept(published), None, why, until)
    lost = "its Workload has ended" if queue.workloads else "the job has no Workload"
    return Leaving("the label of its queue was removed" if queue.name is None else f"queue {queue.name}: {lost}")


def _with_quota(snapshot: Snapshot, queue: QueueView, workload: WorkloadView, published: Roster) -> Admission:
    spec = snapshot.job.spec
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
    if not published.workers and any(pod.deleted_at is not None and not pod.over for pod in snapshot.pods):
        return Waiting(f"queue {queue.name}: pods have to end before others are made")
    obstacle = queue.obstacle or charged.conflict(spec, queue.changes)
    if not workload.admitted:
        obstacle = "admission checks are not done"
    obstacle = obstacle and f"queue {queue.name}: {obstacle}"
    until = _answer_until(snapshot, queue, workload)
    # Kept as it is while it may grow further at once.
    keeps = published.workers and (until is not None or not workload.admitted)
    pods = min(_kept(published), workload.charged) if keeps else workload.charged
    return Admitted(pods, workload, obstacle, until or _forgotten_at(snapshot, queue, workload))


def reserved(queue: QueueView) -> WorkloadView | None:
    """The Workload by which the job has quota: the newest one that is admitted, if one is. One on other nodes than an
    older one is not it, because the pods of that run on."""
    having = [each for each in unfinished(queue) if each.assigned is not None]
    admitted = [each for each in having if each.admitted]
    alike = [each for each in admitted if each.flavors == admitted[0].flavors]
    return next(reversed(alike or having), None)


def elsewhere(queue: QueueView, workload: WorkloadView) -> list[WorkloadView]:
    """Those that are admitted on other nodes than `workload`, of which the job has pods. A Kueue whose gate for
    replacements is off takes a larger one for another job."""
    return [each for each in unfinished(queue) if each.admitted and each.flavors != workload.flavors]


def next_count(snapshot: Snapshot, workload: WorkloadView) -> int | None:
    """For how many pods the job asks next, because it wants more than it has quota for: those of its next size, since
    Kueue admits a replacement whole or not at all. None: it wants no more, or its size is fixed."""
    spec = snapshot.job.spec
    wanted, quota = sizing.wanted(spec), workload.charged
    if spec.elastic is None or wanted + sizing.spares(spec) <= quota:
        return None
    allowed = sizing.bounds(spec)
    larger = (size for size in range(quota + 1, wanted + 1) if allowed.largest(size) == size)
    return next(larger, quota + 1)


def asking(queue: QueueView, workload: WorkloadView | None) -> list[WorkloadView]:
    """Those that ask for more than `workload` has: they have no quota yet, or their admission checks are not done."""
    return [each for each in unfinished(queue) if not each.admitted and each is not workload]


def pending(queue: QueueView) -> WorkloadView | None:
    """The newest Workload that has no quota yet."""
    return next((each for each in reversed(unfinished(queue)) if each.assigned is None), None)


def unfinished(queue: QueueView) -> list[WorkloadView]:
    return [each for each in queue.workloads if each.finished is None and not each.deleting]


def _kept(published: Roster) -> int:
    """The pods that the job has as it is; one that takes another's place counts with it."""
    return published.wanted + published.spares


def _between_until(snapshot: Snapshot, queue: QueueView) -> datetime | None:
    """Until when the job trains on without an admission, because a larger one has taken its own; None: it does not."""
    replacement = pending(queue)
    if replacement is None or replacement.replaces is None:
        return None
    replaced = next((each for each in queue.workloads if each.name == replacement.replaces), None)
    if replaced is None or replaced.finished != REPLACED or replaced.finished_at is None:
        return None
    until = times.after(min(replaced.finished_at, snapshot.now), BETWEEN.total_seconds())
    return until if snapshot.now < until else None


def _answer_until(snapshot: Snapshot, queue: QueueView, workload: WorkloadView) -> datetime | None:
    """Until when an answer to the next step of a job's growth is waited for; None: it has come, or is not due."""
    count, replacement = next_count(snapshot, workload), next(reversed(asking(queue, workload)), None)
    if count is None or snapshot.object_refused is not None or queue.refusal is not None:
        return None
    if replacement is None:
        return times.after(snapshot.now, ANSWER.total_seconds())
    if replacement.waits or replacement.created_at is None:
        return None
    until = times.after(min(replacement.created_at, snapshot.now), ANSWER.total_seconds())
    return until if snapshot.now < until else None


def _forgotten_at(snapshot: Snapshot, queue: QueueView, workload: WorkloadView) -> datetime | None:
    """When the first of the larger Workloads will be forgotten; None: there is none, or it is forgotten by now."""
    made = [each.created_at for each in asking(queue, workload) if is_unanswered(each) and each.created_at is not None]
    ends = [times.after(min(at, snapshot.now), ASK_AGAIN.total_seconds()) for at in made]
    return min((at for at in ends if at > snapshot.now), default=None)


def is_forgotten(snapshot: Snapshot, workload: WorkloadView) -> bool:
    """Whether Kueue has said nothing of it for so long that it will not."""
    since = workload.created_at
    return is_unanswered(workload) and since is not None and snapshot.now - since >= ASK_AGAIN


def is_unanswered(workload: WorkloadView) -> bool:
    """Whether Kueue has said nothing of it yet."""
    return workload.active and workload.assigned is None and not workload.waits


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
