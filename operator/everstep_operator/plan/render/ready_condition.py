"""Makes the Ready condition, whose reason is the STATUS column, from facts."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import assert_never

from everstep.contract import labels
from everstep_operator.api.conditions import ConditionType, ReadyReason
from everstep_operator.object_names import list_of_workers, number_of_pods, number_of_spares, number_of_workers
from everstep_operator.plan.decide import restart_budget, spares
from everstep_operator.plan.outcome import Requeue
from everstep_operator.plan.render import installation, waits
from everstep_operator.plan.render.job_status import Quorum, Verdict
from everstep_operator.plan.render.waits import START_PATIENCE, OlderPods, blocked, older_pods, waited
from everstep_operator.plan.state import losses, lost_nodes, sizing
from everstep_operator.plan.state.admission import Admitted, Leaving, NotQueued, Waiting, pending
from everstep_operator.plan.state.facts import Facts

# A pod without a node for longer than this is reported as a lack of capacity. Autoscalers need about this long.
CAPACITY_PATIENCE = timedelta(seconds=30)
# A worker that has not started for longer than this, without any fault that is known, needs a person. Large images
# take minutes.
STALLED_AFTER = timedelta(minutes=5)
# Reasons that stay until the changed world has taken its first step.
_CHANGES = (ReadyReason.RECOVERING, ReadyReason.RESIZING, ReadyReason.UPDATING)
_BY_EDIT = (ReadyReason.RESIZING, ReadyReason.UPDATING)  # by an edit of the spec


def trains(facts: Facts) -> bool:
    """Whether the world takes steps, as far as can be known."""
    reported = facts.snapshot.progress
    if reported.updated_at is None or reported.round == 0:
        return True  # there are no reports, or the processes of stock torchrun do not know their round
    since_loss = reported.trained_at is not None and (
        reported.lost_at is None or reported.trained_at > reported.lost_at
    )
    return since_loss and reported.round >= facts.world.round


def verdict(facts: Facts) -> Verdict:
    """The content of the Ready condition when nothing is being changed."""
    wanted = facts.roster.wanted
    if wanted == 0:
        ending = f"{len(facts.snapshot.pods)} are ending" if facts.snapshot.pods else "no workers"
        stays = waits.not_ending(facts)
        ends = f"; {stays}" if stays is not None else ""
        if not facts.job.spec.suspend and not isinstance(facts.admission, NotQueued):
            return _queued(facts, ending if facts.snapshot.pods else "", ends, stays)
        message = f"spec.suspend is true: {ending}{ends}"
        return Verdict(ReadyReason.SUSPENDED, message, stays, _quorum(facts, "the job is suspended"))
    why = blocked(facts)
    obstacle = why if why is not None and _has_waited_long(facts) else _overstayed(facts) or waits.not_ending(facts)
    return _with_quorum(facts, why, obstacle) if facts.world.has_quorum else _without_quorum(facts, why, obstacle)


def _queued(facts: Facts, ending: str, ends: str, stays: str | None) -> Verdict:
    """The verdict on a job that has no workers because of its queue."""
    match facts.admission:
        case Waiting(reason, needs_person):
            why, obstacle = reason, reason if needs_person else None
        case Admitted(_, _, held_back):
            why, obstacle = held_back or "the job was admitted", held_back
        case Leaving(reason):
            why, obstacle = reason, None
        case NotQueued():
            why, obstacle = "the job leaves its queue", None
        case other:
            assert_never(other)
    message = f"{why}: {ending}{ends}" if ending else why
    return Verdict(ReadyReason.QUEUED, message, obstacle or stays, _quorum(facts, "the job waits in a queue"))


def ignored_queue(name: str) -> str:
    return (
        f"the label kueue.x-k8s.io/queue-name names queue {name}, which this operator does not obey (chart value "
        "kueue.enabled): no quota is charged"
    )


def _with_quorum(facts: Facts, why: str | None, obstacle: str | None) -> Verdict:
    """The verdict if enough workers are in the world."""
    size, wanted = facts.world.size, facts.roster.wanted
    quorum = _quorum(facts, f"{number_of_workers(size)} train{'s' if size == 1 else ''}, of {wanted} wanted")
    before = _reason_before(facts)
    if before in _CHANGES and not trains(facts):
        counted = (
            f"{facts.ready}/{wanted} ready{_succeeded(facts)}"
            if facts.roster.replaces_all
            else f"{size}/{wanted} in the round"
        )
        return Verdict(ReadyReason(before), f"{counted}, waiting for the first step", quorum=quorum)
    training = max(0, size - len(facts.succeeded & facts.world.members))
    if size >= wanted:
        # A Service or a disruption budget cannot be made, or a node holds a pod that was replaced.
        beside = obstacle if facts.snapshot.name_collisions or facts.snapshot.object_refused else None
        stays = beside or waits.not_ending(facts)
        counted = f"{training}/{wanted} ready{_below_replicas(facts)}"
        ignored = facts.snapshot.ignored_queue
        unqueued = "" if ignored is None else f"; {ignored_queue(ignored)}"
        message = f"{counted}{_succeeded(facts)}{_spares(facts, why)}{_moves(facts, why)}{unqueued}"
        return Verdict(ReadyReason.RUNNING, message, stays, quorum)
    message = f"{training}/{wanted} train{_succeeded(facts)}{_at_least(facts)}{_because(facts, why)}"
    changes = before in _BY_EDIT and why is None
    reason = ReadyReason(before) if changes and before is not None else ReadyReason.RUNNING_DEGRADED
    return Verdict(reason, message, obstacle, quorum)


def _without_quorum(facts: Facts, why: str | None, obstacle: str | None) -> Verdict:
    """The verdict if the world has not formed yet, or has lost workers."""
    reason = _reason_without_quorum(facts)
    recovers = reason in _CHANGES
    waits = ", waiting for all workers" if facts.roster.replaces_all and recovers else ""
    counted = f"{facts.ready}/{facts.roster.wanted} ready{_succeeded(facts)}{_at_least(facts)}{_joining(facts)}"
    counted += _starting_anew(facts)
    message = f"{counted}{waits}{_because(facts, why)}"
    return Verdict(reason, message, obstacle, _quorum(facts, message))


def _reason_without_quorum(facts: Facts) -> ReadyReason:
    ready_or_done = facts.ready + len(facts.succeeded)
    before = _reason_before(facts)
    if before == ReadyReason.UPDATING:
        return ReadyReason.UPDATING  # it has ended all workers on purpose: no quorum was lost
    if facts.roster.replaces_all and before in (ReadyReason.RECOVERING, ReadyReason.RESIZING):
        return ReadyReason(before)
    if facts.roster.replaces_all or facts.job.status.world.formed_at is None:
        return ReadyReason.WAITING_FOR_QUORUM if ready_or_done else ReadyReason.PENDING
    if facts.job.spec.elastic is not None and ready_or_done < facts.sizes.minimum:
        return ReadyReason.WAITING_FOR_QUORUM
    return ReadyReason.RESIZING if before == ReadyReason.RESIZING else ReadyReason.RECOVERING


def _quorum(facts: Facts, message: str) -> Quorum:
    """The quorum. Under c10d all workers are needed, and the condition says how many are ready."""
    reached = facts.world.has_quorum and facts.roster.wanted > 0
    if not facts.roster.replaces_all:
        return Quorum(reached, message)
    done = f", {len(facts.succeeded)} have succeeded" if facts.succeeded else ""
    return Quorum(reached, f"{facts.ready} of {facts.world.size} workers are ready{done}", "AllReady")


def _reason_before(facts: Facts) -> str | None:
    before = facts.job.status.condition(ConditionType.READY)
    return before.reason if before is not None else None


def _succeeded(facts: Facts) -> str:
    return f", {len(facts.succeeded)} succeeded" if facts.succeeded else ""


def _below_replicas(facts: Facts) -> str:
    """Says why fewer workers train than `replicas` asks for: only some sizes are allowed."""
    spec = facts.job.spec
    if spec.suspend or not facts.roster.wanted == facts.wanted < spec.replicas:
        return ""
    if isinstance(facts.admission, Admitted) and facts.wanted < sizing.wanted(spec):
        queue = facts.snapshot.queue
        replacement = None if queue is None else pending(queue)
        why = f" ({replacement.waits})" if replacement is not None and replacement.waits else ""
        return f" of {spec.replicas}, quota for {number_of_pods(facts.admission.pods)}{why}"
    return f", the largest allowed size up to replicas ({spec.replicas})"


def _spares(facts: Facts, why: str | None) -> str:
    """How many spares wait, and why not all do. `why`: what keeps the first missing worker from running."""
    wanted, waiting = facts.roster.spares, min(facts.roster.spares, len(facts.waiting_spares))
    if waiting >= wanted:
        return f", {number_of_spares(wanted)}" if wanted else ""
    back_off = facts.job.spec.recovery.backoff_seconds
    start = spares.back_off_until(facts.snapshot.now, facts.job.status.restarts, back_off)
    if why is None and start is not None and len(facts.current) < len(facts.roster.workers):
        why = f"none is created before {start:%H:%M:%S} UTC, after failures (back-off)"
    return f", {waiting} of {number_of_spares(wanted)}" + (f": {why}" if why else "")


def _moves(facts: Facts, why: str | None) -> str:
    """Which worker has to leave its node, and what it waits for. `why`: what keeps the first missing worker from
    running."""
    wanted = [index for index, pod in facts.current.items() if pod.name in facts.job.migrate]
    if wanted and facts.moves.refusal is not None:
        return f"; {list_of_workers(wanted)} {labels.CANNOT_MOVE}{facts.moves.refusal}"
    if not facts.moves.due:
        return ""
    index, reason = next(iter(facts.moves.due.items()))
    have = "has" if len(facts.moves.due) == 1 else "have"
    leaves = f"; {list_of_workers(facts.moves.due)} {have} to leave ({reason})"
    if index in facts.moves.ending or index in facts.roster.leaving:
        return leaves
    if not facts.regrows:
        return f"{leaves}; nobody is created in place of lost workers (regrow: false)"
    when = "another waits for its place" if len(facts.moves.due) == 1 else "others wait for their places"
    return f"{leaves} when {when}" + (f": {why}" if why and not facts.roster.spares else "")


def _at_least(facts: Facts) -> str:
    return f", min {facts.sizes.minimum}" if facts.job.spec.elastic is not None else ""


def _joining(facts: Facts) -> str:
    """How many workers run and are in no round yet: see `start_probe`."""
    count = sum(p.joining and not p.finished for p in facts.current.values())
    return f", {count} {'has' if count == 1 else 'have'} not joined a round" if count else ""


def _starting_anew(facts: Facts) -> str:
    """Counts the workers whose pods are ready, and whose agents have left the round to start another process."""
    view = facts.round_view
    gone = [] if view is None else [i for i in view.gone if (pod := facts.current.get(i)) is not None and pod.ready]
    return f", {number_of_workers(len(gone))} out of the round" if gone else ""


def _because(facts: Facts, why: str | None) -> str:
    reason = why or _backs_off(facts) or _postponed(facts)
    if not reason and (older := _outlived(facts)) is not None:
        reason = _awaits(older)
    return f": {reason}" if reason else ""


def _backs_off(facts: Facts) -> str | None:
    """Says that missing workers are created later. The text stays the same until then."""
    job = facts.job
    start = restart_budget.back_off_until(facts.snapshot.now, job.spec.recovery, job.status.restarts)
    if start is None or len(facts.current) >= facts.roster.wanted:
        return None
    return f"no worker is created before {start:%H:%M:%S} UTC, after failures (back-off)"


def _postponed(facts: Facts) -> str | None:
    """Says which workers have no place in the round yet because of their node, and until when."""
    waiting = {index: at for index, at in facts.postponed.items() if at is not None}
    if not waiting:
        return None
    index, at = next(iter(waiting.items()))
    node = facts.current[index].node or ""
    lost = lost_nodes.find(facts.snapshot, node)
    often = "" if lost is None or lost.times < 2 else f" {lost.times} times"
    waits = "waits" if len(waiting) == 1 else "wait"
    return f"{list_of_workers(waiting)} {waits} until {at:%H:%M:%S} UTC, because node {node} was lost{often}"


def _overstayed(facts: Facts) -> str | None:
    """Says that a pod of an older spec does not end, and what to do."""
    older = _outlived(facts)
    if older is None or not older.overstay:
        return None
    return (
        f"{_awaits(older)}; its node does not end it: look with kubectl describe, and remove it with "
        "kubectl delete --force"
    )


def _outlived(facts: Facts) -> OlderPods | None:
    """Pods of an older spec after whose end missing workers are created."""
    return older_pods(facts) if len(facts.current) < facts.roster.wanted else None


def _awaits(older: OlderPods) -> str:
    return f"no worker is created before {older.description}"


def of_change(now: Verdict, reason: ReadyReason, message: str) -> Verdict:
    """The verdict on a roster that is being published. A loss of quorum takes precedence."""
    if reason is ReadyReason.RECOVERING and now.reason is ReadyReason.WAITING_FOR_QUORUM:
        return replace(now, message=message)
    return replace(now, reason=reason, message=message, obstacle=None)


def starved(facts: Facts) -> list[int]:
    """Workers that have found no node for longer than an autoscaler needs."""
    return [
        index
        for index, pod in sorted(facts.current.items())
        if pod.unschedulable is not None
        and (pod.created_at is None or facts.snapshot.now - pod.created_at >= CAPACITY_PATIENCE)
    ]


def patience(facts: Facts) -> Requeue | None:
    """When a pod that does not start will have waited too long. No change would be observed then."""
    due = [
        pod.created_at + limit - facts.snapshot.now
        for pod in facts.current.values()
        if pod.starting is not None and pod.created_at is not None
        for limit in (START_PATIENCE, STALLED_AFTER)
    ]
    due += [
        pod.created_at + CAPACITY_PATIENCE - facts.snapshot.now
        for pod in facts.current.values()
        if pod.unschedulable is not None and pod.created_at is not None
    ]
    due += [at - facts.snapshot.now for p in facts.current.values() if (at := losses.start_due(facts.snapshot, p))]
    if waits.refused_since(facts) is not None and (at := losses.create_due(facts.snapshot)) is not None:
        due.append(at - facts.snapshot.now)
    ahead = [left for left in due if left > timedelta(0)]
    return Requeue(min(ahead), "a worker has not started") if ahead else None


def _has_waited_long(facts: Facts) -> bool:
    """Whether the job is blocked by more than a pod that has waited for a node only a short time."""
    snapshot, pods = facts.snapshot, facts.current.values()
    held_back = isinstance(facts.admission, Admitted) and facts.admission.obstacle is not None
    refused = held_back or snapshot.create_obstacle is not None or waits.refused_earlier(facts) is not None
    refused = refused or installation.refusal(snapshot) is not None
    stuck = any(p.waiting for p in pods)
    late = any(p.starting is not None and waited(facts, p) >= STALLED_AFTER for p in pods)
    return refused or stuck or late or bool(starved(facts))
