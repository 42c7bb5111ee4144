"""Describes what keeps a job's workers from running: since when, and whether a person is needed.

Every wait has a description. It has the time of its beginning and not its length, so a status stays the same while
nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from everstep_operator.api.conditions import ConditionStatus, ConditionType
from everstep_operator.plan import times
from everstep_operator.plan.outcome import Requeue
from everstep_operator.plan.render import installation, pod_group, pods
from everstep_operator.plan.snapshot import WorkerPod
from everstep_operator.plan.state import node_loss
from everstep_operator.plan.state.admission import Admitted
from everstep_operator.plan.state.facts import Facts

# A kubelet kills a pod when its grace period is over. A kubelet that has not done so after this time needs a person.
OVERSTAYED = timedelta(seconds=60)
# A pod that starts takes less than this where its image is on the node. Then its wait is shown.
START_PATIENCE = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class OlderPods:
    """Pods of an older spec that have still to end. `overstay`: one lives much longer than the grace period that it was
    given."""

    description: str
    overstay: bool


def older_pods(facts: Facts) -> OlderPods | None:
    """The pods of an older spec for whose end the creation of workers waits; None if there are none.

    Until then they could be in one round with their successors, and a successor that opens the commit log would fence
    off their last commit.
    """
    alive = sorted(
        (
            pod
            for pod in facts.snapshot.pods
            if pod.uid in facts.outdated_pods and not pod.finished and not node_loss.is_lost(facts.snapshot, pod)
        ),
        key=lambda pod: pod.name,
    )
    if not alive:
        return None
    more = f" and {len(alive) - 1} more" if len(alive) > 1 else ""
    description = f"pod {alive[0].name}{more} of an older spec {'have' if more else 'has'} ended"
    return OlderPods(description, any(overstays(facts, pod) for pod in alive))


def overstays(facts: Facts, pod: WorkerPod) -> bool:
    """Whether the pod lives much longer than the grace period that it was given."""
    if pod.deleted_at is None or pod.finished:
        return False
    return facts.snapshot.now - pod.deleted_at > _patience_with_end(facts)


def _patience_with_end(facts: Facts) -> timedelta:
    return timedelta(seconds=pods.grace_seconds(facts.job)) + OVERSTAYED


def _overdue_at(facts: Facts, deleted_at: datetime) -> datetime:
    return times.after(deleted_at, _patience_with_end(facts).total_seconds())


def blocked(facts: Facts) -> str | None:
    """The reason why the first missing worker does not run, if one is known."""
    snapshot = facts.snapshot
    if isinstance(facts.admission, Admitted) and facts.admission.obstacle is not None:
        return facts.admission.obstacle
    if snapshot.name_collisions:
        more = f" (and {len(snapshot.name_collisions) - 1} more)" if len(snapshot.name_collisions) > 1 else ""
        return f"{snapshot.name_collisions[0]}{more}"
    if snapshot.create_refused is not None:
        since = _moment(facts, refused_since(facts))
        return f"the API server refuses to create a worker{since}: {snapshot.create_refused}"
    if (earlier := refused_earlier(facts)) is not None:
        return earlier
    beside = installation.refusal(snapshot) or pod_group.obstacle(facts)
    if beside is not None and any(index not in facts.current for index in facts.roster.workers):
        return beside
    for index, pod in sorted(facts.current.items()):
        if pod.waiting is not None:
            return f"worker {index} has not started{_since(facts, pod)}: {pod.waiting}"
        if pod.unschedulable is not None:
            return f"worker {index} cannot be scheduled{_since(facts, pod)}: {pod.unschedulable}{_or_ending_pod(facts)}"
        if pod.starting is not None and waited(facts, pod) >= START_PATIENCE:
            more = f"`kubectl describe pod {pod.name}` tells more"
            return f"worker {index} has not started{_since(facts, pod)}: {pod.starting}; {more}"
    if snapshot.object_refused is not None:
        return refused(snapshot.object_refused)
    return None


def refused_since(facts: Facts) -> datetime | None:
    """Since when a worker cannot be created; None if no worker waits for that. What a new leader has not tried yet may
    still be refused."""
    if all(index in facts.current for index in facts.roster.workers):
        return None
    since = facts.job.status.refused_since
    return facts.snapshot.now if since is None and facts.snapshot.create_obstacle is not None else since


def refused_earlier(facts: Facts) -> str | None:
    """Why a missing worker could not be created, in the words of the status; None where this leader has tried it
    itself, or no worker waits for that."""
    if facts.snapshot.create_obstacle is not None or refused_since(facts) is None:
        return None
    before = facts.job.status.condition(ConditionType.NEEDS_ATTENTION)
    return before.message if before is not None and before.status is ConditionStatus.TRUE else None


def refused(what: str) -> str:
    """Says that the API server refuses an object beside the pods."""
    return f"the API server refuses to create {what}"


def not_ending(facts: Facts) -> str | None:
    """Says which pod of an earlier incarnation does not end, since when, and what to do."""
    overdue = [pod for pod in facts.snapshot.pods if overstays(facts, pod)]
    if not overdue:
        return None
    current = {pod.uid for pod in facts.current.values()}
    lingering = sorted((pod for pod in overdue if pod.uid not in current), key=lambda pod: pod.name)
    if not lingering:
        return None
    pod, more = lingering[0], f" and {len(lingering) - 1} more" if len(lingering) > 1 else ""
    where = f" on {pod.node}" if pod.node else ""
    description = f"was told to end{_moment(facts, pod.deleted_at, 'at')}, and its node has not ended it"
    remedy = f"once the node is gone, `kubectl delete pod {pod.name} -n {facts.job.namespace} --force`"
    return f"pod {pod.name}{where}{more} {description}; {remedy}"


def until_overdue(facts: Facts) -> Requeue | None:
    """When a pod that was asked to stop will have taken too long. No change would be observed then."""
    deletions = [p.deleted_at for p in facts.snapshot.pods if p.deleted_at is not None and not p.finished]
    ahead = [left for at in deletions if (left := _overdue_at(facts, at) - facts.snapshot.now) > timedelta(0)]
    # A moment later, since a pod is overdue only after that time.
    return Requeue(min(ahead) + timedelta(seconds=1), "a pod has not ended") if ahead else None


def _or_ending_pod(facts: Facts) -> str:
    """A pod that does not end may hold what the worker waits for."""
    ending = not_ending(facts)
    return f"; {ending}" if ending is not None else ""


def _since(facts: Facts, pod: WorkerPod) -> str:
    return _moment(facts, pod.created_at)


def _moment(facts: Facts, at: datetime | None, word: str = "since") -> str:
    """Since when. It has a date only if that is another day."""
    if at is None:
        return ""
    today = at.date() == facts.snapshot.now.date()
    return f" {word} {at:%H:%M:%S} UTC" if today else f" {word} {at:%Y-%m-%d %H:%M:%S} UTC"


def until(facts: Facts, at: datetime | None) -> str:
    """Until when a node is avoided, as a status says it."""
    return "as long as its status says this" if at is None else _moment(facts, at, "until").lstrip()


def waited(facts: Facts, pod: WorkerPod) -> timedelta:
    """How old the pod is."""
    return timedelta(0) if pod.created_at is None else facts.snapshot.now - pod.created_at
