"""Finds the workers that have to leave their nodes, and those that have left. Reasons: ADR 0063.

A worker has to leave if its node is about to go, if a person wants that, or if its pod is being ended by somebody else.
As long as it trains it is not lost, and another worker may take its place first. That needs processes that keep their
memory: the others would begin again from the last commit.

Invariant: a worker is never due and lost at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.contract import exit_codes
from everstep_operator.api.conditions import Cause
from everstep_operator.api.types import RendezvousBackend
from everstep_operator.plan.snapshot import Snapshot, WorkerPod
from everstep_operator.plan.state import node_loss
from everstep_operator.plan.state.roster import Roster
from everstep_operator.plan.state.world_state import WorldState
from everstep_operator.round_view import RoundView


@dataclass(frozen=True, slots=True)
class Moves:
    """`due`: members of the round that have to leave, and why. `ending`: those of them whose pods are being ended
    already. `done`: workers that have left, while a round of the wanted size was formed without them, and why."""

    due: Mapping[int, str]
    ending: frozenset[int]
    done: Mapping[int, str]
    refusal: str | None = None  # why no worker of this job can be moved

    @property
    def not_lost(self) -> frozenset[int]:
        return self.ending | self.done.keys()


def of(snapshot: Snapshot, roster: Roster, current: Mapping[int, WorkerPod], world: WorldState) -> Moves:
    view = snapshot.world
    if view is None or roster.replaces_all or not view.keeps or view.closed is not None or roster.wanted == 0:
        return Moves({}, frozenset(), {}, _refusal(snapshot, roster))
    reasons = {
        index: why
        for index, pod in current.items()
        if index in world.members and _trains(snapshot, pod) and (why := _why(snapshot, pod)) is not None
    }
    ending = frozenset(index for index in reasons if current[index].stop_was_requested)
    return Moves(reasons, ending, _done(snapshot, view, roster, current, world))


def is_whole(roster: Roster, world: WorldState) -> bool:
    """Whether the round has the wanted size, and has lost nobody."""
    return world.has_quorum and world.size >= roster.wanted


def _refusal(snapshot: Snapshot, roster: Roster) -> str | None:
    view = snapshot.world
    if roster.replaces_all:
        return "backend c10d replaces all workers at each change"
    if view is not None and view.round > 0 and not view.keeps:
        return "its script does not use the session, so all workers would begin again from the last commit"
    if snapshot.job.spec.rendezvous.backend is RendezvousBackend.ETCD:
        return "with backend etcd the operator sees no round"
    return None


def _done(
    snapshot: Snapshot, view: RoundView, roster: Roster, current: Mapping[int, WorkerPod], world: WorldState
) -> dict[int, str]:
    if world.size < roster.wanted:
        return {}
    # A round of the wanted size was formed without them. It may be about to be replaced, because others leave it too:
    # then only those are known to be done that left in order.
    whole = is_whole(roster, world)
    left = view.left if whole else view.drained
    gone = {index for index, n in left if index in roster.workers and roster.workers[index].number == n}
    done = {}
    for index in sorted((gone | set(roster.leaving if whole else ())) & roster.workers.keys() - world.members):
        pod = current.get(index)
        if pod is None:
            if index in roster.leaving or (index, roster.workers[index].number) in view.drained:
                done[index] = "it had to leave its node"
        elif pod.stop_was_requested and (_trains(snapshot, pod) or _has_left(pod)):
            done[index] = _why(snapshot, pod) or "it had to leave its node"
    return done


def _trains(snapshot: Snapshot, pod: WorkerPod) -> bool:
    return pod.running and not node_loss.is_lost(snapshot, pod)


def _has_left(pod: WorkerPod) -> bool:
    """Whether its agent ended in order: the others go on."""
    return pod.exit is not None and pod.exit.code == exit_codes.PREEMPTED


def _why(snapshot: Snapshot, pod: WorkerPod) -> str | None:
    """Why the worker has to leave, as a clause about it; None if it may stay."""
    node = snapshot.nodes.get(pod.node or "")
    if node is not None and node.leaving is not None:
        return f"node {node.name} {node.leaving}"
    if pod.name in snapshot.job.migrate:
        return f"a person wants it away from {pod.node or 'its node'}"
    if not pod.stop_was_requested or _is_ruled(snapshot, pod):
        return None
    return f"its pod is evicted: {pod.disruption}" if pod.disruption is not None else "its pod is deleted"


def _is_ruled(snapshot: Snapshot, pod: WorkerPod) -> bool:
    """Whether the job says itself what such an end of a pod means."""
    cause = Cause.DISRUPTION_TARGET if pod.disruption is not None else Cause.POD_DELETED
    return any(cause in (rule.on_reasons or ()) for rule in snapshot.job.spec.recovery.rules)
