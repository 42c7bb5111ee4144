"""Turns a roster into actions: delete superseded pods, create missing ones.

Invariants: no worker of this roster or of a later one is deleted. A pass creates at most as many pods as the settings
allow, and none before the back-off is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from everstep_operator import object_names
from everstep_operator.api.status import Restarts, Status
from everstep_operator.plan.actions import Action, CreatePod, CreateService, DeletePod, SetSizes, forced_deletes
from everstep_operator.plan.decide import completion, rejections, restart_budget, spares
from everstep_operator.plan.outcome import Requeue
from everstep_operator.plan.render import claims, installation, pod_group, pods, waits
from everstep_operator.plan.snapshot import PodChanges, Snapshot, WorkerPod
from everstep_operator.plan.stages import StageName
from everstep_operator.plan.state import lost_nodes, node_loss, sizing, suspects
from everstep_operator.plan.state.admission import Admitted
from everstep_operator.plan.state.facts import Facts

# The state of a superseded worker is in the commit log or at its peers, and its accelerators are needed at once.
SURVIVOR_GRACE_SECONDS = 1
REFUSED_RETRY = timedelta(seconds=15)


@dataclass(frozen=True, slots=True)
class Superseded:
    """A pod to be deleted, and how long it may take to end. `released`: it is healthy, but no longer wanted."""

    pod: WorkerPod
    why: str
    grace_seconds: int
    released: bool = False


@dataclass(frozen=True, slots=True)
class Convergence:
    """`actions` by stage; `waits` names what is waited for; it is empty if nothing is."""

    actions: Mapping[StageName, Sequence[Action]]
    requeue: Requeue | None = None
    waits: str = ""


def converge(facts: Facts, status: Status) -> Convergence:
    """The actions that leave exactly the roster's pods. `status`: as it will be written before them."""
    snapshot, job, restarts = facts.snapshot, facts.job, status.restarts
    actions: dict[StageName, list[Action]] = {StageName.CLEAR: [], StageName.RELEASE: []}
    for superseded in _superseded(facts):
        if (removal := _remove(snapshot, superseded)) is not None:
            healthy = (
                superseded.released and not superseded.pod.finished and not node_loss.is_lost(snapshot, superseded.pod)
            )
            actions[StageName.RELEASE if healthy else StageName.CLEAR].append(removal)
    if snapshot.service_uid is None and facts.roster.workers:
        service = CreateService(object_names.service_name(job.name), pods.service(job), "workers need host names")
        actions[StageName.NETWORK] = [service]
    to_create = missing(facts)
    # No event is sent when a name is free again, or when quota is available.
    retry = Requeue(REFUSED_RETRY, "name taken") if snapshot.name_collisions else None
    if retry is None and snapshot.object_refused is not None:
        retry = Requeue(REFUSED_RETRY, "creates were refused")
    if to_create and isinstance(facts.admission, Admitted) and facts.admission.obstacle is not None:
        return Convergence(actions, retry, facts.admission.obstacle)
    if not to_create:
        return Convergence(actions, retry)
    if (older := waits.older_pods(facts)) is not None:
        again = Requeue(REFUSED_RETRY, "workers of an older spec end")
        return Convergence(actions, again, f"waits until {older.description}")
    if (obstacle := installation.refusal(snapshot) or pod_group.obstacle(facts)) is not None:
        return Convergence(actions, retry, obstacle)  # the group's end is seen; another installation plans anew
    start = restart_budget.back_off_until(snapshot.now, job.spec.recovery, restarts)
    if start is not None:
        left = start - snapshot.now
        return Convergence(actions, Requeue(left, "back-off"), f"backs off for {left.total_seconds():.0f} s")
    due, held_back = _without_spares(facts, to_create, restarts)
    nodes = (*rejections.avoided(snapshot.now, restarts), *lost_nodes.avoided(snapshot.now, restarts))
    suspected = tuple(node.name for node in status.excluded_nodes)
    avoided = tuple(dict.fromkeys((*nodes, *_left_nodes(facts), *suspected)))
    charged_for = due[: _room(facts, actions)]
    made = charged_for[: snapshot.settings.max_pods_per_plan]
    actions[StageName.CREATE] = [_create(facts, index, avoided) for index in made]
    # This is tried again in every pass, and after a while even without an observed change.
    if retry is not None:
        waits_for = (
            snapshot.name_collisions[0] if snapshot.name_collisions else waits.refused(snapshot.object_refused or "")
        )
        return Convergence(actions, retry, waits_for)
    if snapshot.create_refused is not None:
        return Convergence(actions, Requeue(REFUSED_RETRY, "creates were refused"), "the API server refuses creates")
    if len(charged_for) < len(due):  # the end of a pod is seen
        return Convergence(actions, held_back, "pods have to end before others are made on their quota")
    return Convergence(actions, held_back)


def _room(facts: Facts, actions: Mapping[StageName, Sequence[Action]]) -> int | None:
    """How many pods may be created on the quota that the job has, beside those that have not ended; None: no queue
    decides that."""
    admitted = facts.admission
    if not isinstance(admitted, Admitted):
        return None
    forced = forced_deletes(itertools.chain.from_iterable(actions.values()))
    quota = admitted.pods if admitted.workload is None else admitted.workload.charged
    alive = sum(not pod.over and pod.uid not in forced for pod in facts.snapshot.pods)
    return max(0, quota + facts.roster.surge - alive)


def _without_spares(facts: Facts, missing: list[int], restarts: Restarts) -> tuple[list[int], Requeue | None]:
    """The missing workers without those that are spares and have to wait; and when these may be created."""
    now = facts.snapshot.now
    start = spares.back_off_until(now, restarts, facts.job.spec.recovery.backoff_seconds)
    if start is None:
        return missing, None
    needed = max(0, len(missing) - facts.roster.spares)
    return missing[:needed], Requeue(start - now, "back-off of spares")


def set_sizes(facts: Facts) -> tuple[SetSizes, ...]:
    """Set the sizes, if the agents' store is ours and holds other ones. While no workers are wanted, the last sizes
    stay, and nobody is announced."""
    view, surge = facts.round_view, facts.roster.surge
    if view is None or view.closed is not None:
        return ()
    # A queue may allow fewer workers than there are places.
    most = min(facts.admissible, facts.wanted)
    sizes = sizing.present(facts.job.spec, most) if facts.wanted else view.sizes
    if sizes is None or (view.sizes, view.surge) == (sizes, surge):
        return ()
    why = "none were set before" if view.sizes is None else f"in place of {view.sizes}"
    if view.sizes == sizes:
        why = f"announcing {surge or 'no others'} for the places of workers that have to leave"
    return (SetSizes(sizes, why, surge),)


def soonest(facts: Facts, *requeues: Requeue | None) -> Requeue | None:
    """When to plan again if no change is observed: at one of `requeues`, at the deadline, or to look again at a worker
    whose node is not ready or not seen."""
    candidates = [requeue for requeue in requeues if requeue is not None]
    if (due := completion.deadline(facts.snapshot)) is not None:
        candidates.append(Requeue(due - facts.snapshot.now, "activeDeadlineSeconds"))
    steady = [at for at in facts.postponed.values() if at is not None]
    candidates += [Requeue(at - facts.snapshot.now, "a node has to stay ready") for at in steady]
    for pod in facts.current.values():
        if (left := node_loss.until_lost(facts.snapshot, pod)) is not None:
            state = "ready" if pod.node in facts.snapshot.nodes else "seen"
            candidates.append(Requeue(left, f"node {pod.node} is not {state}"))
    return min(candidates, key=lambda requeue: requeue.after, default=None)


def until_queue_is_read(facts: Facts) -> Requeue | None:
    """When to look again for what an admission cannot be carried out without. No change of it reaches the job."""
    queue = facts.snapshot.queue
    until = facts.admission.until if isinstance(facts.admission, Admitted) else None
    if until is not None:
        return Requeue(until - facts.snapshot.now, "Kueue answers")
    missing = queue is not None and (queue.unread or queue.refusal or queue.obstacle)
    return Requeue(REFUSED_RETRY, "the queue's objects are incomplete") if missing else None


def until_forgotten(facts: Facts, status: Status) -> Requeue | None:
    """When a node is no longer avoided: the status says so from then on."""
    end = suspects.ends(facts.snapshot.now, status.excluded_nodes)
    return None if end is None else Requeue(end - facts.snapshot.now, "a node is avoided")


def _superseded(facts: Facts) -> list[Superseded]:
    job, roster = facts.job, facts.roster
    current = {p.uid for p in facts.current.values()}
    template_grace = pods.grace_seconds(job)
    superseded = [
        Superseded(facts.current[index], "another worker waits for its place", template_grace, released=True)
        for index in roster.leaving
        if index in facts.current
    ]
    for pod in facts.snapshot.pods:
        if pod.uid in current or not roster.supersedes(job.name, pod):
            continue
        if pod.uid in facts.outdated_pods and roster.wanted > 0:
            # It is not lost: it may commit its state.
            superseded.append(Superseded(pod, "it was made from an older spec", template_grace, released=True))
        elif roster.replaces_all:
            # A worker of a past round has nothing to save. A worker of a suspended job is healthy, and may commit.
            suspended = roster.wanted == 0
            grace = template_grace if suspended else SURVIVOR_GRACE_SECONDS
            round_ = object_names.round_of_incarnation(pod.incarnation)
            superseded.append(Superseded(pod, f"round {round_} is over", grace, released=suspended))
        elif pod.index in roster.workers:
            superseded.append(Superseded(pod, "it was replaced", SURVIVOR_GRACE_SECONDS))
        else:
            # It is healthy, so it gets the grace period of its template.
            superseded.append(Superseded(pod, "it is not wanted any more", template_grace, released=True))
    return superseded


def missing(facts: Facts) -> list[int]:
    """The workers that have no pod yet, and get one. A worker that had started and has no pod is lost: it is created in
    another incarnation, or not at all."""
    if completion.ends(facts):
        return []
    return [i for i, worker in facts.roster.workers.items() if i not in facts.current and not worker.started]


def _create(facts: Facts, index: int, avoided: Sequence[str]) -> CreatePod:
    job, roster, settings = facts.job, facts.roster, facts.snapshot.settings
    queue = facts.snapshot.queue
    changes = PodChanges() if queue is None else queue.changes
    incarnation = roster.workers[index].number
    name, volumes = roster.name(job.name, index), claims.of_worker(job, index)
    if not roster.replaces_all:
        body = pods.admitted(pods.agent_pod(job, index, incarnation, settings), changes)
        body = pods.avoid(job, body, avoided)
        return CreatePod(name, index, incarnation, body, f"worker {index}{_not_on(avoided)}", volumes)
    round_ = roster.next_incarnation
    body = pods.admitted(pods.worker_pod(job, index, round_, len(roster.workers), settings), changes)
    body = pods.avoid(job, body, avoided)
    return CreatePod(name, index, incarnation, body, f"worker {index} of round {round_}{_not_on(avoided)}", volumes)


def _left_nodes(facts: Facts) -> list[str]:
    """The nodes that workers have to leave."""
    nodes = (facts.current[index].node for index in facts.moves.due if index not in facts.moves.ending)
    return sorted({node for node in nodes if node is not None})


def _not_on(nodes: Sequence[str]) -> str:
    return f", not on {', '.join(nodes)} if possible" if nodes else ""


def _remove(snapshot: Snapshot, superseded: Superseded) -> DeletePod | None:
    """Delete a pod. A lost node cannot confirm that the pod has ended, so the pod is deleted by force. The commit log
    fences processes that may still run there."""
    pod = superseded.pod
    lost = node_loss.is_lost(snapshot, pod)
    if pod.deleted_at is not None and not lost:
        return None
    grace = 0 if lost or pod.over else superseded.grace_seconds
    return DeletePod(pod.name, pod.uid, grace, f"node {pod.node} is lost" if lost else superseded.why)
