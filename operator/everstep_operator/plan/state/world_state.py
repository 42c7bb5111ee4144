"""Derives what is known of the world that trains.

With backend everstep the round store has it, once it was read. With etcd the operator sees no round, so pods and
reports are used instead; the same holds for a job whose processes have roles and no agents. Under c10d the published
round is the world, and its pods show whether it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.contract.document import Sizes
from everstep_operator.api.conditions import ConditionType
from everstep_operator.api.types import RendezvousBackend
from everstep_operator.plan.snapshot import Snapshot, WorkerPod
from everstep_operator.plan.state.roster import Roster


@dataclass(frozen=True, slots=True)
class WorldState:
    """`size`: the number of members that the last round was formed of. `members`: those of them that were not replaced
    since. `has_quorum`: none was lost or replaced, and the round may run at this size."""

    round: int
    size: int
    members: frozenset[int]
    has_quorum: bool


def of(snapshot: Snapshot, roster: Roster, current: Mapping[int, WorkerPod], sizes: Sizes) -> WorldState:
    if roster.replaces_all:
        return _published(snapshot, roster, current)
    view = snapshot.world
    if view is None:
        return _as_before(snapshot, roster) if is_awaited(snapshot) else _by_pods(snapshot, roster, current, sizes)
    if view.round == 0 and snapshot.progress.round == 0 and snapshot.progress.step is not None:
        return _by_pods(snapshot, roster, current, sizes)  # it trains, and neither pods nor document know a round
    workers = roster.workers
    members = frozenset(i for i, n in view.members if i in workers and workers[i].number == n)
    has_quorum = len(members) == len(view.members) >= sizes.minimum and not view.gone
    return WorldState(view.round, len(view.members), members, has_quorum)


def is_awaited(snapshot: Snapshot) -> bool:
    """Whether this operator has yet to read the job's document in its round store, because it has only begun to
    lead."""
    return snapshot.world is None and snapshot.job.spec.rendezvous.backend is RendezvousBackend.EVERSTEP


def _published(snapshot: Snapshot, roster: Roster, current: Mapping[int, WorkerPod]) -> WorldState:
    size = len(roster.workers)
    number = roster.next_incarnation
    # Reports of all ranks count as much as a probe of theirs, which may be slower, or of the template.
    trains = snapshot.progress.round == number and snapshot.progress.first_step_at is not None
    has_quorum = size > 0 and (len(_running_or_done(current)) >= size or (trains and len(current) == size))
    return WorldState(number, size, frozenset(roster.workers), has_quorum)


def _as_before(snapshot: Snapshot, roster: Roster) -> WorldState:
    """The world as the status describes it. A new operator knows less than the last one, but the world is
    the same."""
    status = snapshot.job.status
    had_quorum = status.world.formed_at is not None and status.holds(ConditionType.QUORUM_REACHED)
    members = frozenset(index for index, worker in roster.workers.items() if worker.started)
    return WorldState(status.world.formed_round or 0, status.world.size, members, had_quorum)


def _by_pods(snapshot: Snapshot, roster: Roster, current: Mapping[int, WorkerPod], sizes: Sizes) -> WorldState:
    running = _running_or_done(current)
    members = running | {index for index, worker in roster.workers.items() if worker.started}
    size = sizes.largest(len(running))
    return WorldState(snapshot.progress.round, size, members, size > 0)


def _running_or_done(current: Mapping[int, WorkerPod]) -> frozenset[int]:
    return frozenset(i for i, p in current.items() if p.succeeded or (p.ready and not p.finished))
