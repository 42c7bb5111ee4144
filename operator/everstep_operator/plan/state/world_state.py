"""What is known of the world that trains, where the agents form the rounds.

With backend everstep the round store says it, once it was read. With etcd the operator sees no round: the pods and the
reports stand in.
Knows nothing of what will be done about it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from everstep.contract.document import Sizes
from everstep_operator.api.conditions import Cause, ConditionStatus, ConditionType
from everstep_operator.api.status import World
from everstep_operator.api.types import RendezvousBackend
from everstep_operator.plan import names
from everstep_operator.plan.snapshot import PodPhase, Snapshot, WorkerPod
from everstep_operator.plan.state import sizing
from everstep_operator.plan.state.losses import Loss, losses_among
from everstep_operator.plan.state.roster import Roster


@dataclass(frozen=True, slots=True)
class Standing:
    """`members` are the workers of the last round that are still the ones it was formed of; `size` is how many it was
    formed of. `stands`: it has all of them, and may run at this size."""

    round: int
    size: int
    members: frozenset[int]
    stands: bool


def of(snapshot: Snapshot, roster: Roster, current: Mapping[int, WorkerPod]) -> Standing:
    sizes = sizing.bounds(snapshot.job.spec)
    view = snapshot.world
    if view is None:
        return _as_before(snapshot, roster) if is_awaited(snapshot) else _by_pods(snapshot, roster, current, sizes)
    lives = roster.lives
    members = frozenset(i for i, incarnation in view.members if i in lives and lives[i].incarnation == incarnation)
    stands = len(members) == len(view.members) >= sizes.minimum and not view.gone
    return Standing(view.round, len(view.members), members, stands)


def is_awaited(snapshot: Snapshot) -> bool:
    """Whether this operator has a round store and has not read this job's document yet: it has just begun to lead."""
    return snapshot.world is None and snapshot.job.spec.rendezvous.backend is RendezvousBackend.EVERSTEP


def _as_before(snapshot: Snapshot, roster: Roster) -> Standing:
    """What the status says: that an operator knows less than the one before it is no news about the world."""
    status = snapshot.job.status
    quorum = status.condition(ConditionType.QUORUM_REACHED)
    stood = status.world.formed_at is not None and quorum is not None and quorum.status is ConditionStatus.TRUE
    members = frozenset(index for index, life in roster.lives.items() if life.started)
    return Standing(status.world.formed_round or 0, status.world.size, members, stood)


def _by_pods(snapshot: Snapshot, roster: Roster, current: Mapping[int, WorkerPod], sizes: Sizes) -> Standing:
    ready = frozenset(i for i, p in current.items() if p.ready or p.phase is PodPhase.SUCCEEDED)
    members = ready | {index for index, life in roster.lives.items() if life.started}
    size = sizes.largest(len(ready))
    return Standing(snapshot.progress.round, size, members, size > 0)


def world(snapshot: Snapshot, seen: Standing) -> World:
    """`status.world`: its round is what the round store raised it to; its other fields are of the last that stood.

    An emptied status takes the number from where rounds are formed, because the commit log fences by it.
    """
    old = snapshot.job.status.world
    number = max(old.round, seen.round)
    news = old.formed_at is None or (old.formed_round, old.size) != (seen.round, seen.size)
    if seen.stands and news:
        at = snapshot.now
        return World(round=number, size=seen.size, since=at, formed_at=at, formed_round=seen.round)
    return old.model_copy(update={"round": number})


def ends(snapshot: Snapshot, current: Mapping[int, WorkerPod]) -> bool:
    """Whether the training has ended, or may have: nobody is added to the job. An operator that has just begun to lead
    cannot know before it has read the round."""
    if snapshot.world is not None:
        return _finished(snapshot)
    return is_awaited(snapshot) and any(p.phase is PodPhase.SUCCEEDED for p in current.values())


def completed(
    snapshot: Snapshot, roster: Roster, seen: Standing, current: Mapping[int, WorkerPod], lost: Collection[Loss]
) -> int | None:
    """How many workers have succeeded, if the job is complete. Workers outside the world have nothing left to join."""
    done = {i for i, p in current.items() if p.phase is PodPhase.SUCCEEDED}
    if (view := snapshot.world) is not None and _finished(snapshot):
        # The agents have told each other of their success. A member without a pod (scaled away, deleted, its node lost)
        # is not missed; one whose pod still runs gets the time to end by itself.
        return None if _still_ending(snapshot) else len(view.members)
    if done and done == roster.lives.keys():
        return len(done)  # nobody else is wanted, whatever the world was of which these are left
    if view is not None:
        return seen.size if 0 < len(seen.members) == seen.size and seen.members <= done else None
    if is_awaited(snapshot):
        return None
    started = {i for i, p in current.items() if p.ready or p.finished}
    shut_out = {loss.index for loss in lost if loss.cause is Cause.PEER_LOST}
    whole = bool(done) and started - shut_out == done and sizing.bounds(snapshot.job.spec).largest(len(done)) > 0
    return len(seen.members) if whole else None


def _finished(snapshot: Snapshot) -> bool:
    return snapshot.world is not None and snapshot.world.finished and bool(snapshot.world.members)


def _still_ending(snapshot: Snapshot) -> bool:
    """Whether a member of the last round has a pod that runs. Pods go by their names: the roster may be newer."""
    members = snapshot.world.members if snapshot.world is not None else ()
    by_name = {p.name: p for p in snapshot.pods if p.round == 0}
    named = {i: names.pod_name(snapshot.job.name, i, incarnation) for i, incarnation in members}
    there = {i: by_name[name] for i, name in named.items() if name in by_name and by_name[name].index == i}
    lost = {loss.index for loss in losses_among(snapshot, there, dict.fromkeys(there, True))}
    return any(p.phase is not PodPhase.SUCCEEDED and i not in lost for i, p in there.items())


def given_up(snapshot: Snapshot, current: Mapping[int, WorkerPod], lost: Collection[Loss]) -> str | None:
    """Why no lost worker can come back: the agents have closed the rendezvous, and not because all had succeeded."""
    if any(p.phase is PodPhase.SUCCEEDED for p in current.values()):
        return None
    if snapshot.world is not None:
        return snapshot.world.closed
    shut_out = any("RendezvousClosedError" in line for loss in lost for line in loss.log_lines)
    return "they closed the rendezvous" if shut_out else None


def missed(
    snapshot: Snapshot, seen: Standing, current: Mapping[int, WorkerPod], lost: tuple[Loss, ...]
) -> tuple[Loss, ...]:
    """The lost workers that have to come back. A job that ends takes nobody in: who was outside its last round fails to
    join it, and is not missed while the others finish."""
    view = snapshot.world
    if view is not None:
        if view.finished:
            return ()
        return lost if view.closed is None else tuple(loss for loss in lost if loss.index in seen.members)
    ending = any(p.phase is PodPhase.SUCCEEDED for p in current.values())
    if is_awaited(snapshot):
        return () if ending else lost
    others_run = any(p.phase is PodPhase.RUNNING and p.deleted_at is None for p in current.values())
    if not (ending and others_run):
        return lost
    return tuple(loss for loss in lost if loss.cause is not Cause.PEER_LOST)
