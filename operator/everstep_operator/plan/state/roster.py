"""The published workers of a job whose agents form the rounds: which index is in which incarnation.

A worker is replaced by raising its incarnation here, in the status, before anything is done to pods. Invariants: which
pods should exist follows from a roster alone; the incarnation of an index never falls, and one that comes back after it
was taken out is newer than any that was taken out, so a name is never used twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from everstep_operator.api import status as api
from everstep_operator.plan import names
from everstep_operator.plan.snapshot import Snapshot, WorkerPod


@dataclass(frozen=True, slots=True)
class Life:
    """One incarnation of a worker. `started`: its pod has been Ready, so a missing one is lost, not still to come."""

    incarnation: int
    started: bool = False


@dataclass(frozen=True, slots=True)
class Roster:
    """`wanted` is how many workers it was made for; fewer are in it where lost ones are not replaced."""

    wanted: int = 0
    next_incarnation: int = 0
    lives: Mapping[int, Life] = field(default_factory=dict)  # by index, in order

    def name(self, job: str, index: int) -> str:
        return names.pod_name(job, index, self.lives[index].incarnation)

    def current(self, job: str, pods: Iterable[WorkerPod]) -> dict[int, WorkerPod]:
        """The pods of these workers by index."""
        mine = {self.name(job, index): index for index in self.lives}
        return {mine[p.name]: p for p in pods if p.name in mine and p.index == mine[p.name] and p.round == 0}

    def is_over(self, job: str, pod: WorkerPod, round_: int) -> bool:
        """Whether the pod is no worker of this roster or of a later one: replaced, taken out, of a c10d round before
        `round_`, or labelled by a stranger. A pod of a later roster proves that this one is old: it is not ours to end.
        """
        if pod.round > 0:
            return pod.round <= round_
        if pod.name != names.pod_name(job, pod.index, pod.incarnation):
            return True
        life = self.lives.get(pod.index)
        return pod.incarnation < (self.next_incarnation if life is None else life.incarnation)

    def __str__(self) -> str:
        """As `0-3@0 4@2`."""
        spans = (f"{r.first}-{r.last}" if r.last > r.first else f"{r.first}" for r in _ranges(self.lives, marks=False))
        lives = (r.incarnation for r in _ranges(self.lives, marks=False))
        return " ".join(f"{span}@{life}" for span, life in zip(spans, lives, strict=True)) or "none"


def read(published: api.Roster | None) -> Roster:
    """The roster of a status. What somebody edited into it is bounded by the types; of two that name one index, the
    first counts."""
    if published is None:
        return Roster()
    lives: dict[int, Life] = {}
    for part in published.workers:
        for index in range(part.first, part.last + 1):
            lives.setdefault(index, Life(part.incarnation, part.started))
    return Roster(published.wanted, published.next_incarnation, dict(sorted(lives.items())))


def write(roster: Roster) -> api.Roster:
    """As compact as it can be said: neighbours in the same incarnation are one range."""
    return api.Roster(
        wanted=roster.wanted, next_incarnation=roster.next_incarnation, workers=tuple(_ranges(roster.lives))
    )


def opening(snapshot: Snapshot, wanted: int) -> Roster:
    """The first roster, or one in place of a roster that somebody deleted: pods that are there are kept."""
    job = snapshot.job
    newest = _newest(snapshot)
    known = [*newest.values(), *(incarnation for _, incarnation in (snapshot.world.members if snapshot.world else ()))]
    # Every incarnation that a c10d round used is smaller than the round's number.
    base = max([min(job.status.world.round, api.MAX_INCARNATION), *(_after(incarnation) for incarnation in known)])
    lives = {index: Life(newest.get(index, base)) for index in range(wanted)}
    taken_out = [_after(incarnation) for index, incarnation in newest.items() if index not in lives]
    return Roster(wanted, max([base, *taken_out]), lives)


def caught_up(snapshot: Snapshot, roster: Roster) -> Roster:
    """The roster, as new as the pods that were made from it: an edited status must not bring an older life back."""
    newest = _newest(snapshot)
    lives = {
        index: life if newest.get(index, -1) <= life.incarnation else Life(newest[index])
        for index, life in roster.lives.items()
    }
    beyond = [_after(incarnation) for index, incarnation in newest.items() if index not in lives]
    return replace(roster, lives=lives, next_incarnation=max([roster.next_incarnation, *beyond]))


def revised(roster: Roster, wanted: int, lost: Collection[int], *, replaced: bool) -> Roster:
    """The roster with the lost workers `replaced` or given up, and made for `wanted`: the highest indices go, the
    lowest free ones come. Workers that were given up stay away until `wanted` changes."""
    lives: dict[int, Life] = {}
    for index, life in roster.lives.items():
        if index not in lost:
            lives[index] = life
        elif replaced:
            lives[index] = Life(_after(life.incarnation))
    lives = {index: lives[index] for index in sorted(lives)[:wanted]}
    out = [_after(life.incarnation) for index, life in roster.lives.items() if index not in lives]
    following = max([roster.next_incarnation, *out])
    if replaced or wanted != roster.wanted:
        free = (index for index in count() if index not in lives)
        added = [next(free) for _ in range(wanted - len(lives))]
        lives.update({index: Life(following) for index in added})
    return Roster(wanted, following, dict(sorted(lives.items())))


def marked(roster: Roster, current: Mapping[int, WorkerPod]) -> Roster:
    """With `started` set for every worker whose pod has been Ready."""
    lives = {
        index: life
        if life.started or (pod := current.get(index)) is None or not (pod.ready or pod.finished)
        else replace(life, started=True)
        for index, life in roster.lives.items()
    }
    return replace(roster, lives=lives)


def _after(incarnation: int) -> int:
    """The following incarnation. A status may hold the last one that there is only if somebody wrote it there."""
    return min(incarnation + 1, api.MAX_INCARNATION)


def _newest(snapshot: Snapshot) -> dict[int, int]:
    """The newest incarnation of each index that has a pod with the name that we give."""
    newest: dict[int, int] = {}
    for pod in snapshot.pods:
        bounded = 0 <= pod.index < api.MAX_WORKERS and 0 <= pod.incarnation < api.MAX_INCARNATION
        if pod.round == 0 and bounded and pod.name == names.pod_name(snapshot.job.name, pod.index, pod.incarnation):
            newest[pod.index] = max(newest.get(pod.index, 0), pod.incarnation)
    return newest


def _ranges(lives: Mapping[int, Life], *, marks: bool = True) -> Iterator[api.WorkerRange]:
    first: int | None = None
    shown = {i: life if marks else Life(life.incarnation) for i, life in sorted(lives.items())}
    for index, life in shown.items():
        first = index if first is None else first
        if shown.get(index + 1) != life:
            yield api.WorkerRange(first=first, last=index, incarnation=life.incarnation, started=life.started)
            first = None
