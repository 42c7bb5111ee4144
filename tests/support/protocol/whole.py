"""Kubernetes and the store together: a pod that is created brings a writer of its round to life.

Nothing else couples the two. In particular a pod that was deleted, failed, or lost its node leaves its writer running
(a zombie, until a fault kills it), so the log is all that stands between an old round and the training state. Every
pod of worker 0 is a writer, as rank 0 of its process group; a job's UID is the UID in its writer's claim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from support.protocol import cluster, log
from support.protocol.cluster import Cluster, ClusterModel, Pod
from support.protocol.log import Claimed, LogModel, Phase, Store, Writer
from support.protocol.rules import ClusterRule, LogRule

TOTAL_RESTART = "total restart"


class Whole(NamedTuple):
    cluster: Cluster
    store: Store


class WholeModel:
    """One budget of faults for both sides; `pods` bounds how many pods of worker 0 are ever created."""

    def __init__(
        self,
        off: frozenset[ClusterRule | LogRule] = frozenset(),
        *,
        rounds: int = 2,
        pods: int = 2,
        saves: int = 1,
        faults: int = 1,
    ) -> None:
        in_cluster = frozenset(r for r in off if isinstance(r, ClusterRule))
        in_log = frozenset(r for r in off if isinstance(r, LogRule))
        self.cluster = ClusterModel(in_cluster, indices=1, rounds=rounds, faults=faults)
        self.log = LogModel(in_log, claims=(), saves=saves, faults=faults, parts=1)
        self.pods = pods

        # Each half recurs in many states of the whole, so what is worked out for it is kept.
        self._cluster_steps = functools.cache(lambda c: tuple(self.cluster.actions(c)))
        self._store_steps = functools.cache(lambda s: tuple(self.log.actions(s)))
        self._cluster_number = _numbered(self.cluster.canonical)
        self._store_number = _numbered(self.log.canonical)
        self._cluster_wrong = functools.cache(self.cluster.violation)
        self._store_wrong = functools.cache(self.log.violation)

    def initial(self) -> Whole:
        return Whole(self.cluster.initial(), self.log.initial())

    def canonical(self, s: Whole) -> Hashable:
        return (self._cluster_number(s.cluster), self._store_number(s.store))

    def violation(self, s: Whole) -> str | None:
        return self._cluster_wrong(s.cluster) or self._store_wrong(s.store)

    def actions(self, s: Whole) -> Iterator[tuple[str, Whole]]:
        if s.cluster.wrong or s.store.wrong:
            return
        for label, after in self._cluster_steps(s.cluster):
            writers = _born(s.cluster, after, s.store.writers)
            if len(writers) > self.pods:
                continue
            store = s.store._replace(faults=after.faults, writers=writers)
            if label.startswith(TOTAL_RESTART):
                store = store._replace(writers=tuple(log.stopped(w) for w in writers))
            yield label, Whole(after, store)
        for label, store in self._store_steps(s.store):
            if not label.startswith(TOTAL_RESTART):
                yield label, Whole(s.cluster._replace(faults=store.faults), store)


def _numbered(canonical: Callable[[Any], Hashable]) -> Callable[[Any], int]:
    """A small number for each class of states: comparing pairs of numbers is most of what exploration does."""
    numbers: dict[Hashable, int] = {}
    return functools.cache(lambda state: numbers.setdefault(canonical(state), len(numbers)))


def _born(before: Cluster, after: Cluster, writers: tuple[Writer, ...]) -> tuple[Writer, ...]:
    """The writers, and one more for a pod that was not there before."""
    known = {p.uid for p in before.pods}
    new = [p for p in after.pods if p.worker == 0 and p.uid not in known]
    born = (Writer(len(writers) + i, *_claim(p), Phase.LOOK) for i, p in enumerate(new))
    return (*writers, *born)


def recovers(model: WholeModel, s: Whole) -> str | None:
    """Whether the job commits again if nothing more goes wrong; the reason if it does not.

    One operator brings up a whole round, then the writer of that round's worker 0 starts. A round that was whole
    already starts its writer anew, as a process that was fenced and recreated would.
    """
    settled = cluster.settle(model.cluster, s.cluster)
    if isinstance(settled, str):
        return settled
    pod = settled.pods[0]
    return log.progresses(model.log, s.store, _claim(pod))


def _claim(pod: Pod) -> Claimed:
    """What a pod's writer claims. UIDs of the model's jobs grow, so a UID also tells when its job was created."""
    return pod.round, f"job-{pod.owner}", pod.owner
