"""The facts on which decisions depend, derived once from a snapshot and a roster.

Policies read the facts and derive nothing again. A pass derives them twice at most: for the published roster, to
decide, and for a roster that it is about to publish, to build the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime

from everstep.contract.document import Sizes
from everstep_operator.plan.snapshot import JobView, Snapshot, WorkerPod
from everstep_operator.plan.state import (
    admission,
    losses,
    lost_nodes,
    missing_peers,
    moves,
    pod_hash,
    roster,
    sizing,
    world_state,
)
from everstep_operator.plan.state.admission import Admission
from everstep_operator.plan.state.losses import Loss
from everstep_operator.plan.state.moves import Moves
from everstep_operator.plan.state.roster import Roster
from everstep_operator.plan.state.world_state import WorldState
from everstep_operator.round_view import RoundView


@dataclass(frozen=True, slots=True)
class Facts:
    snapshot: Snapshot
    published: Roster | None  # None: nothing was published for this job yet
    roster: Roster  # the fields below are about its workers
    admission: Admission  # to a queue
    wanted: int  # workers that the spec asks for and a queue allows now; 0 while suspended
    kept_spares: int  # that should exist beside them
    sizes: Sizes  # that a round may have
    current: Mapping[int, WorkerPod]  # the pods of the roster's workers
    lost: tuple[Loss, ...]  # of these workers, root cause first
    outdated_pods: frozenset[str]  # UIDs of all pods of the job that were made from another spec than the present one
    world: WorldState
    moves: Moves  # workers that have to leave their nodes; they are not among the lost ones

    @property
    def job(self) -> JobView:
        return self.snapshot.job

    @property
    def round_view(self) -> RoundView | None:
        """The round store's document, where the agents form the rounds."""
        return None if self.roster.replaces_all else self.snapshot.world

    @property
    def ready(self) -> int:
        """How many workers run and are Ready, at most as many as are wanted. A pod that has ended keeps its condition
        for a while."""
        return min(self.roster.wanted, sum(p.ready and not p.finished for p in self.current.values()))

    @property
    def succeeded(self) -> frozenset[int]:
        return frozenset(i for i, p in self.current.items() if p.succeeded)

    @property
    def outdated(self) -> frozenset[int]:
        """The workers whose pods were made from another spec."""
        return frozenset(i for i, p in self.current.items() if p.uid in self.outdated_pods)

    @property
    def trained(self) -> frozenset[int]:
        """The members of the round; beside spares also workers that have left one and not come back: with a spare in
        its place, a lost worker is out of the round before its loss is seen."""
        workers, view = self.roster.workers, self.round_view
        left = view.left if view is not None and self.roster.beside else ()
        return self.world.members | {index for index, n in left if index in workers and workers[index].number == n}

    @property
    def spares(self) -> frozenset[int]:
        """The workers that have no place in a whole round of the wanted size. There are none while more are needed."""
        whole = self.round_view is not None and moves.is_whole(self.roster, self.world)
        return frozenset(self.roster.workers.keys() - self.trained) if self.roster.beside and whole else frozenset()

    @property
    def waiting_spares(self) -> tuple[int, ...]:
        """The spares that wait for a place in a round, with their programs loaded."""
        view = self.round_view
        return () if view is None else tuple(sorted(self.spares.intersection(view.joining)))

    @property
    def postponed(self) -> Mapping[int, datetime | None]:
        """The workers that get no place in a standing round before their nodes have been ready for a while, and until
        when; None: it has no node yet, and may come to one that was lost. A job of a fixed size needs all."""
        elastic = self.job.spec.elastic is not None and self.round_view is not None and self.world.has_quorum
        if not elastic or not lost_nodes.remembered(self.snapshot.now, self.job.status.restarts):
            return {}
        until: dict[int, datetime | None] = {}
        for index in sorted(self.roster.workers.keys() - self.world.members):
            pod = self.current.get(index)
            at = lost_nodes.steady_at(self.snapshot, pod.node) if pod is not None and pod.node is not None else None
            if at is not None or pod is None or pod.node is None:
                until[index] = at
        return until

    @property
    def admissible(self) -> int:
        """How many workers may be in the round now."""
        postponed = self.postponed
        return len(self.roster.workers) - len(postponed) if postponed else self.wanted

    @property
    def surge(self) -> int:
        """How many workers should exist beside wanted ones and spares, for the places of those that have to leave. A
        round that is about to be replaced, or was not read yet, shows nothing new."""
        if self.round_view is None:
            return self.roster.surge
        going = (len(self.moves.due) if self.regrows else 0) + len(self.moves.done)
        return going if moves.is_whole(self.roster, self.world) else min(going, self.roster.surge)

    @property
    def leaving(self) -> frozenset[int]:
        """The workers that may leave now, because others wait for their places. One member has to stay, because only
        members have the training state."""
        if self.round_view is None:
            return frozenset(self.roster.leaving)
        ending = self.moves.ending | self.moves.due.keys() & set(self.roster.leaving)
        room = len([index for index in self.waiting_spares if self._may_stay(index)])
        most = min(room, max(1, len(self.world.members) - 1)) - len(ending)
        free = [index for index in sorted(self.moves.due) if index not in ending]
        return frozenset([*ending.intersection(self.roster.leaving), *free[: max(0, most)]])

    def _may_stay(self, index: int) -> bool:
        pod = self.current.get(index)
        node = self.snapshot.nodes.get(pod.node or "") if pod is not None else None
        return pod is not None and not pod.stop_was_requested and (node is None or node.leaving is None)

    def successor(self, lost: Collection[int] = (), *, replaced: bool = True) -> Roster:
        """The roster that the spec asks for now, with the lost workers replaced or left out."""
        spares = self.kept_spares
        surge = max(0, self.surge - len(self.moves.done.keys() & set(lost)))
        members = self.world.members.difference(lost) if spares or surge or self.roster.beside else ()
        return roster.successor(
            self.snapshot,
            self.roster,
            self.wanted,
            lost,
            replaced=replaced,
            spares=spares,
            surge=surge,
            leaving=self.leaving,
            members=members,
            due=self.moves.due,
        )

    @property
    def regrows(self) -> bool:
        """Whether lost workers are replaced. A job of a fixed size needs all of its workers."""
        elastic = self.job.spec.elastic
        return elastic is None or elastic.regrow


def derive(snapshot: Snapshot) -> Facts:
    """The facts under the published roster."""
    published = roster.published(snapshot.job)
    made = roster.empty(snapshot.job) if published is None else published
    outdated = frozenset(pod.uid for pod in pod_hash.outdated(snapshot, snapshot.pods))
    return _derive(snapshot, published, made, outdated)


def with_roster(facts: Facts, new: Roster) -> Facts:
    """The facts under a roster that is about to be published."""
    return _derive(facts.snapshot, new, new, facts.outdated_pods, facts.admission)


def _derive(
    snapshot: Snapshot,
    published: Roster | None,
    made: Roster,
    outdated_pods: frozenset[str],
    admitted: Admission | None = None,
) -> Facts:
    current = made.current(snapshot.job.name, snapshot.pods)
    sizes = sizing.bounds(snapshot.job.spec)
    allowed = admission.of(snapshot, made) if admitted is None else admitted
    granted = admission.granted(allowed)
    expected = {index: worker.started for index, worker in made.workers.items()}
    world = world_state.of(snapshot, made, current, sizes)
    moving = moves.of(snapshot, made, current, world)
    lost = missing_peers.excused(snapshot, made, current, sizes, losses.losses_among(snapshot, current, expected))
    return Facts(
        snapshot,
        published,
        made,
        allowed,
        sizing.wanted(snapshot.job.spec, granted),
        sizing.spares(snapshot.job.spec, granted),
        sizes,
        current,
        tuple(loss for loss in lost if loss.index not in moving.not_lost),
        outdated_pods,
        world,
        moving,
    )
