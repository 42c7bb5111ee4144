"""The roster: the published workers of a job, and the incarnation of each.

A worker is replaced by raising its incarnation here, in the status, before anything is done to pods. Where the agents
form the rounds, one worker is replaced alone. Under c10d every change gives all workers the same new
incarnation, which is a new round (ADR 0027).

Invariants: which pods should exist follows from the roster alone. The incarnation of an index never falls. An index
that is added again gets an incarnation above all that were removed, so a name is never used twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from everstep_operator import object_names
from everstep_operator.api import status as api
from everstep_operator.api.base import SAFE_INT_MAX
from everstep_operator.api.types import RendezvousBackend
from everstep_operator.plan.snapshot import JobView, Snapshot, WorkerPod


@dataclass(frozen=True, slots=True)
class Incarnation:
    """The incarnation of one worker. `started`: its container has begun to run, so a missing pod is lost, and not still
    to be created."""

    number: int
    started: bool = False


@dataclass(frozen=True, slots=True)
class Roster:
    """`wanted`: the number of workers that it was made for, beside its `spares` and its `surge`, whose workers take
    the places of those that have to leave their nodes. It has fewer if lost workers are not replaced. `leaving`:
    workers that are asked to stop now, because others wait for their places.

    `replaces_all`: any change replaces all workers, as under c10d. Then the round is `next_incarnation`, which is one
    more than the incarnation of the workers. That holds for a roster without workers too.
    """

    wanted: int = 0
    next_incarnation: int = 0
    workers: Mapping[int, Incarnation] = field(default_factory=dict)  # by index, in order
    replaces_all: bool = False
    spares: int = 0
    surge: int = 0
    leaving: tuple[int, ...] = ()

    @property
    def beside(self) -> int:
        """How many workers it was made for beside the wanted ones."""
        return self.spares + self.surge

    def name(self, job: str, index: int) -> str:
        return object_names.pod_name(job, index, self.workers[index].number)

    def current(self, job: str, pods: Iterable[WorkerPod]) -> dict[int, WorkerPod]:
        """The pods of these workers by index."""
        mine = {self.name(job, index): index for index in self.workers}
        return {p.index: p for p in pods if mine.get(p.name) == p.index and self.is_of_its_backend(p)}

    def is_of_its_backend(self, pod: WorkerPod) -> bool:
        """A pod of another backend, which the job had before it was suspended, can never be one of these workers."""
        return (pod.round is not None) == self.replaces_all

    def supersedes(self, job: str, pod: WorkerPod) -> bool:
        """Whether the pod belongs neither to this roster nor to a later one: it was replaced or taken out, or somebody
        else labelled it. A pod of a later roster must not be deleted: it proves that this roster is old."""
        if pod.name != object_names.pod_name(job, pod.index, pod.incarnation):
            return True
        worker = self.workers.get(pod.index)
        return pod.incarnation < (self.next_incarnation if worker is None else worker.number)

    def __str__(self) -> str:
        """The workers by incarnation, such as `0-3@0 4@2`."""
        spans = (
            (f"{first}-{last}" if last > first else f"{first}") + f"@{worker.number}"
            for first, last, worker in _ranges({i: Incarnation(w.number) for i, w in self.workers.items()})
        )
        return " ".join(spans) or "none"


def published(job: JobView) -> Roster | None:
    """The roster of a job's status; None if there never was one. Under c10d `status.world` is the roster."""
    if job.spec.rendezvous.backend is not RendezvousBackend.C10D:
        return None if job.status.roster is None else from_status(job.status.roster)
    world = job.status.world
    if world.round == 0:
        return None
    worker = Incarnation(object_names.incarnation_of_round(world.round), started=world.formed_at is not None)
    return Roster(world.size, world.round, dict.fromkeys(range(world.size), worker), replaces_all=True)


def empty(job: JobView) -> Roster:
    """The roster of a job for which none was published yet."""
    return Roster(replaces_all=job.spec.rendezvous.backend is RendezvousBackend.C10D)


def from_status(stored: api.Roster | None) -> Roster:
    """The roster as stored. Somebody may have edited it: the types bound its values. If two ranges have the same
    index, the first one counts."""
    if stored is None:
        return Roster()
    workers: dict[int, Incarnation] = {}
    for part in stored.workers:
        for index in range(part.first, part.last + 1):
            workers.setdefault(index, Incarnation(part.incarnation, part.started))
    leaving = tuple(index for index in stored.leaving if index in workers)
    return Roster(
        stored.wanted, stored.next_incarnation, dict(sorted(workers.items())), spares=stored.spares,
        surge=stored.surge, leaving=leaving,
    )  # fmt: skip


def to_status(roster: Roster) -> api.Roster:
    """The stored form of the roster. Neighbours in the same incarnation are one range."""
    ranges = tuple(
        api.WorkerRange(first=first, last=last, incarnation=worker.number, started=worker.started)
        for first, last, worker in _ranges(roster.workers)
    )
    return api.Roster(
        wanted=roster.wanted,
        spares=roster.spares,
        surge=roster.surge,
        leaving=roster.leaving,
        next_incarnation=roster.next_incarnation,
        workers=ranges,
    )


def initial(snapshot: Snapshot, wanted: int, spares: int = 0) -> Roster:
    """The first roster, or the replacement of a roster that somebody deleted. Existing pods are kept, unless every
    change replaces all workers."""
    job = snapshot.job
    none = empty(job)
    pods = _pods_of_our_names(snapshot, none)
    newest = _newest_incarnations(pods)
    # Every incarnation that a c10d round used is smaller than the round's number.
    base = max(min(job.status.world.round, _greatest_incarnation(none)), _unused_incarnation(snapshot, none, newest))
    if none.replaces_all:
        return _with_all_replaced(none, wanted, base) if wanted else replace(none, next_incarnation=base)
    existing = {p.index: p.incarnation for p in pods if none.is_of_its_backend(p)}
    existing = {index: n for index, n in existing.items() if n == newest[index]}
    workers = {index: Incarnation(existing.get(index, base)) for index in range(wanted + spares)}
    taken_out = [_incarnation_after(n, none) for index, n in newest.items() if index not in workers]
    return Roster(wanted, max([base, *taken_out]), workers, spares=spares)


def raised_to_pods(snapshot: Snapshot, roster: Roster) -> Roster:
    """The roster, raised to the incarnations of existing pods: an edited status must not create an older pod again."""
    pods = _pods_of_our_names(snapshot, roster)
    least, newest = _least_incarnations(pods, roster), _newest_incarnations(pods)
    workers = {
        index: worker if least.get(index, -1) <= worker.number else Incarnation(least[index])
        for index, worker in roster.workers.items()
    }
    beyond = [_incarnation_after(incarnation, roster) for index, incarnation in newest.items() if index not in workers]
    made = replace(roster, workers=workers, next_incarnation=max([roster.next_incarnation, *beyond]))
    if not roster.replaces_all:
        return made
    number = _unused_incarnation(snapshot, roster, newest)
    return (
        _with_all_replaced(roster, roster.wanted, number)
        if made != roster or number > roster.next_incarnation
        else roster
    )


def successor(
    snapshot: Snapshot,
    roster: Roster,
    wanted: int,
    lost: Collection[int] = (),
    *,
    replaced: bool = True,
    spares: int = 0,
    surge: int = 0,
    leaving: Collection[int] = (),
    members: Collection[int] = (),
    due: Collection[int] = (),
) -> Roster:
    """The roster for `wanted` workers, `spares` and `surge`, with the lost ones `replaced` or left out.

    A smaller roster loses its highest indices; a larger one gets the lowest free ones. Workers that were left out are
    created again only when one of the numbers changes. If there are spares, of the `members` of the round only
    `wanted` stay: the round gets smaller only if a member leaves it. Those that are `due` to leave go first.
    """
    if roster.replaces_all:
        if not lost and wanted == roster.wanted:
            return roster
        return _with_all_replaced(
            roster,
            wanted,
            _unused_incarnation(snapshot, roster, _newest_incarnations(_pods_of_our_names(snapshot, roster))),
        )
    beside = spares + surge
    workers = {index: worker for index, worker in roster.workers.items() if index not in lost}
    if replaced:
        # Where others were created for their places, they are not needed again.
        room = wanted + beside - len(workers) if roster.surge else len(lost)
        again = [index for index in roster.workers if index in lost][: max(0, room)]
        workers |= {index: Incarnation(_incarnation_after(roster.workers[index].number, roster)) for index in again}
    workers = {index: workers[index] for index in _staying(workers, wanted, beside, members, due)}
    out = [
        _incarnation_after(worker.number, roster) for index, worker in roster.workers.items() if index not in workers
    ]
    following = max([roster.next_incarnation, *out])
    if replaced or (wanted, beside) != (roster.wanted, roster.beside):
        # The agent of a worker that is leaving still trains, and one of the same index would push it out.
        busy = {pod.index for pod in snapshot.pods if not pod.finished} if surge or roster.surge else set()
        free = (index for index in count() if index not in workers and index not in busy)
        added = [next(free) for _ in range(wanted + beside - len(workers))]
        workers.update({index: Incarnation(following) for index in added})
    staying = tuple(sorted(index for index in leaving if index in workers))
    return Roster(wanted, following, dict(sorted(workers.items())), spares=spares, surge=surge, leaving=staying)


def _staying(
    workers: Collection[int], wanted: int, beside: int, members: Collection[int], due: Collection[int]
) -> list[int]:
    """The indices that stay if there are too many."""
    training = sorted((index for index in workers if index in members), key=lambda index: (index in due, index))
    others = [index for index in sorted(workers) if index not in members]
    return sorted([*training[:wanted], *others][: wanted + beside])


def with_started(roster: Roster, current: Mapping[int, WorkerPod]) -> Roster:
    """The roster, with `started` set for every worker whose container has begun to run."""
    workers = {
        index: worker
        if worker.started or (pod := current.get(index)) is None or not (pod.started_at or pod.ready or pod.finished)
        else replace(worker, started=True)
        for index, worker in roster.workers.items()
    }
    return replace(roster, workers=workers)


def _with_all_replaced(roster: Roster, wanted: int, least: int) -> Roster:
    """The next roster, with all workers in one new incarnation. An empty roster takes a number too, so that an operator
    with an old view cannot create the pods again."""
    number = max(roster.next_incarnation, least)
    return Roster(
        wanted, _incarnation_after(number, roster), dict.fromkeys(range(wanted), Incarnation(number)), replaces_all=True
    )


def _greatest_incarnation(roster: Roster) -> int:
    """The greatest incarnation. Under c10d it follows from the round, which may be any safe integer of JSON."""
    return SAFE_INT_MAX if roster.replaces_all else api.MAX_INCARNATION


def _incarnation_after(incarnation: int, roster: Roster) -> int:
    """The following incarnation. Only an edited status reaches the greatest one, which then stays."""
    return min(incarnation + 1, _greatest_incarnation(roster))


def _unused_incarnation(snapshot: Snapshot, roster: Roster, newest: Mapping[int, int]) -> int:
    """An incarnation that no pod (`newest`), member of a round, or roster of another backend was ever seen in."""
    members = () if roster.replaces_all or snapshot.world is None else snapshot.world.members
    other = from_status(snapshot.job.status.roster) if roster.replaces_all else Roster()
    seen = [*newest.values(), *(incarnation for _, incarnation in members)]
    seen += [worker.number for worker in other.workers.values()]
    return max(0, other.next_incarnation, _incarnation_after(max(seen, default=-1), roster))


def _newest_incarnations(pods: Iterable[WorkerPod]) -> dict[int, int]:
    """The newest incarnation of each index that has a pod, of any backend."""
    newest: dict[int, int] = {}
    for pod in pods:
        newest[pod.index] = max(newest.get(pod.index, 0), pod.incarnation)
    return newest


def _least_incarnations(pods: Iterable[WorkerPod], roster: Roster) -> dict[int, int]:
    """The least incarnation that each index may have, given the pods that exist."""
    least: dict[int, int] = {}
    for pod in pods:
        number = pod.incarnation if roster.is_of_its_backend(pod) else _incarnation_after(pod.incarnation, roster)
        least[pod.index] = max(least.get(pod.index, 0), number)
    return least


def _pods_of_our_names(snapshot: Snapshot, roster: Roster) -> list[WorkerPod]:
    """The pods whose names follow from their labels. Comparing 1,000 names takes a tenth of a pass, so it is done
    once."""
    limit = _greatest_incarnation(roster)
    return [
        pod
        for pod in snapshot.pods
        if 0 <= pod.index < api.MAX_WORKERS
        and 0 <= pod.incarnation < limit
        and pod.name == object_names.pod_name(snapshot.job.name, pod.index, pod.incarnation)
    ]


def _ranges(workers: Mapping[int, Incarnation]) -> Iterator[tuple[int, int, Incarnation]]:
    first: int | None = None
    for index, worker in sorted(workers.items()):
        first = index if first is None else first
        if workers.get(index + 1) != worker:
            yield first, index, worker
            first = None
