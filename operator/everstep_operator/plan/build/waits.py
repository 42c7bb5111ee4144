"""Says what keeps a job's workers from running: for how long already, and whether a person is needed.

Every wait has words, the reason first. Times are moments and not ages, so a status stays the same while nothing
changes; only kubectl and the event count from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from everstep_operator.plan.build import pods
from everstep_operator.plan.snapshot import WorkerPod
from everstep_operator.plan.state import node_loss
from everstep_operator.plan.state.facts import Facts

# A kubelet kills a pod when its grace period is over. One that has not after this long needs a person.
OVERSTAYED = timedelta(seconds=60)
# A pod that starts takes less than this where its image is on the node. Then its wait is shown.
START_PATIENCE = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class OlderPods:
    """Pods of an older spec that have still to end. `overstay`: one lives much longer than the grace period that it was
    given."""

    words: str
    overstay: bool


def older_pods(facts: Facts) -> OlderPods | None:
    """The pods of an older spec for whose end the creation of workers waits; None if there are none.

    Until then they could meet their successors in one round, and a successor that opens the commit log would fence
    their last commit off.
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
    words = f"pod {alive[0].name}{more} of an older spec {'have' if more else 'has'} ended"
    return OlderPods(words, any(overstays(facts, pod) for pod in alive))


def overstays(facts: Facts, pod: WorkerPod) -> bool:
    """Whether the pod lives much longer than the grace period that it was given."""
    patience = timedelta(seconds=pods.grace_seconds(facts.job)) + OVERSTAYED
    return pod.deleted_at is not None and not pod.finished and facts.snapshot.now - pod.deleted_at > patience


def blocked(facts: Facts) -> str | None:
    """The reason why the first missing worker does not run, if one is known."""
    snapshot = facts.snapshot
    if snapshot.name_collisions:
        more = f" (and {len(snapshot.name_collisions) - 1} more)" if len(snapshot.name_collisions) > 1 else ""
        return f"{snapshot.name_collisions[0]}{more}"
    if snapshot.create_refused is not None:
        return f"the API server refuses to create a worker: {snapshot.create_refused}"
    for index, pod in sorted(facts.current.items()):
        if pod.waiting is not None:
            return f"worker {index}: {pod.waiting}"
        if pod.unschedulable is not None:
            return f"worker {index} cannot be scheduled: {pod.unschedulable}"
        if pod.starting is not None and waited(facts, pod) >= START_PATIENCE:
            since = f" since {pod.created_at:%H:%M:%S} UTC" if pod.created_at is not None else ""
            return (
                f"worker {index} has not started{since}: {pod.starting}; `kubectl describe pod {pod.name}` tells more"
            )
    return None


def waited(facts: Facts, pod: WorkerPod) -> timedelta:
    """How old the pod is."""
    return timedelta(0) if pod.created_at is None else facts.snapshot.now - pod.created_at
