"""Kubernetes' part of the protocol: operators that read stale caches, publish rounds, and create and delete pods.

The model has no lease: at any moment every operator may believe that it leads, and act on caches that are as old as it
likes, the cache of jobs and the cache of pods each of its own age. A paused leader that wakes up, a watch that lags and
a partitioned operator are therefore not faults here but the normal case, and safety rests on what the API server
checks. It knows nothing of checkpoints. Pods' names follow from the published round, as `plan.names` makes them.

Invariant: one publisher a round, rounds only grow, one pod for each worker of a round, nobody touches another's pods.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from support.protocol.rules import ClusterRule as Rule

# NamedTuples rather than dataclasses: hashing and comparing states is nearly all that exploration does.


class Job(NamedTuple):
    uid: int
    version: int  # resourceVersion
    round: int


class Pod(NamedTuple):
    worker: int
    incarnation: int
    owner: int  # UID of the job
    uid: int
    round: int
    running: bool

    @property
    def name(self) -> tuple[int, int]:
        return (self.worker, self.incarnation)


class Operator(NamedTuple):
    """What one operator believes. `job` None: it has read nothing since it started or met a conflict."""

    job: Job | None = None
    pods: tuple[Pod, ...] = ()


class Cluster(NamedTuple):
    job: Job
    pods: tuple[Pod, ...]
    operators: tuple[Operator, ...]
    uids: int  # the last UID given out
    faults: int  # how many may still happen
    publications: tuple[tuple[int, int], ...] = ()  # ghost: (job UID, round), once for each successful publication
    wrong: str = ""  # ghost: a step that broke an invariant


class ClusterModel:
    """`off` names the rules that are not followed; `rounds` bounds how often any operator publishes."""

    def __init__(
        self,
        off: frozenset[Rule] = frozenset(),
        *,
        operators: int = 2,
        indices: int = 2,
        rounds: int = 2,
        faults: int = 2,
    ) -> None:
        self.off = off
        self.operators = operators
        self.indices = indices
        self.rounds = rounds
        self.faults = faults

    def initial(self) -> Cluster:
        return Cluster(Job(1, 1, 0), (), (Operator(),) * self.operators, 0, self.faults)

    def actions(self, s: Cluster) -> Iterator[tuple[str, Cluster]]:
        if s.wrong:
            return
        for o in range(len(s.operators)):
            yield from self._operator_steps(s, o)
        yield from self._environment(s)
        if s.faults:
            yield from self._faults(s._replace(faults=s.faults - 1))

    def canonical(self, s: Cluster) -> Cluster:
        """UIDs, resourceVersions and operators are only ever compared for equality, so their numbers are renamed."""
        return min(_renamed(s, order) for order in itertools.permutations(s.operators))

    def violation(self, s: Cluster) -> str | None:
        if s.wrong:
            return s.wrong
        if len(set(s.publications)) < len(s.publications):
            return f"two operators own one round: {sorted(s.publications)}"
        workers = [(p.owner, p.worker, p.round) for p in s.pods]
        if len(set(workers)) < len(workers):
            return f"two pods are the same worker of the same round: {sorted(workers)}"
        for pod in s.pods:
            if (pod.owner, pod.round) not in s.publications:
                return f"pod {pod.name} carries round {pod.round}, which nobody published"
        return None

    # -- operators

    def _operator_steps(self, s: Cluster, o: int) -> Iterator[tuple[str, Cluster]]:
        me = s.operators[o]
        who = f"operator {o}"
        if me.job != s.job:
            yield f"{who} sees the job at round {s.job.round}", _believe(s, o, me._replace(job=s.job))
        if me.job is None:
            return
        if me.pods != s.pods:
            yield f"{who} sees the pods", _believe(s, o, me._replace(pods=s.pods))
        mine = [p for p in me.pods if p.owner == me.job.uid]
        current = {p.worker for p in mine if p.round == me.job.round and p.running}
        # It may publish whenever somebody seems lost: whether the world had formed is more than this model needs.
        if len(current) < self.indices and me.job.round < self.rounds:
            yield from self._publish(s, o, me.job)
        for index in range(self.indices):
            if index not in {p.worker for p in mine if p.round == me.job.round}:
                if me.job.round > 0:
                    yield from self._create(s, o, me, index, me.job.round)
                if Rule.PUBLISH_FIRST in self.off and me.job.round < self.rounds:
                    yield from self._create(s, o, me, index, me.job.round + 1)
        for pod in mine:
            older = pod.round < me.job.round
            if older or (Rule.DELETE_ONLY_OLDER in self.off and pod.round != me.job.round):
                yield from self._delete(s, o, pod)

    def _publish(self, s: Cluster, o: int, known: Job) -> Iterator[tuple[str, Cluster]]:
        label = f"operator {o} publishes round {known.round + 1}"
        unsure = s.operators[o]._replace(job=None)  # a refused or unanswered write: read again before anything else
        if Rule.CAS_ON_PUBLISH not in self.off and known.version != s.job.version:
            yield f"{label}: refused, the job has changed", _believe(s, o, unsure)
            return
        job = Job(s.job.uid, s.job.version + 1, known.round + 1)
        wrong = "" if job.round > s.job.round else f"round {s.job.round} was published, then {job.round}"
        after = s._replace(job=job, publications=tuple(sorted((*s.publications, (job.uid, job.round)))), wrong=s.wrong)
        if wrong and (job.uid, job.round) not in s.publications:
            after = after._replace(wrong=wrong)
        yield label, _believe(after, o, s.operators[o]._replace(job=job))
        if s.faults:
            yield f"{label}: the response is lost", _believe(after._replace(faults=s.faults - 1), o, unsure)

    def _create(self, s: Cluster, o: int, me: Operator, index: int, round_: int) -> Iterator[tuple[str, Cluster]]:
        assert me.job is not None
        incarnation = round_
        if Rule.NAME_FROM_ROUND in self.off:
            incarnation = 1 + max((p.incarnation for p in me.pods if p.worker == index), default=0)
        label = f"operator {o} creates pod w{index}-{incarnation} for round {round_}"
        there = next((p for p in s.pods if p.name == (index, incarnation)), None)
        if there is None:
            pod = Pod(index, incarnation, me.job.uid, s.uids + 1, round_, True)
            after = s._replace(pods=tuple(sorted((*s.pods, pod))), uids=pod.uid)
            yield label, _believe(after, o, me._replace(pods=tuple(sorted((*me.pods, pod)))))
            if s.faults:
                yield f"{label}: the response is lost", after._replace(faults=s.faults - 1)
            return
        if there in me.pods:
            return
        if Rule.OWNER_CHECK in self.off or there.owner == me.job.uid:
            wrong = "" if there.owner == me.job.uid else f"operator {o} took another job's pod {there.name} for its own"
            after = _believe(s, o, me._replace(pods=tuple(sorted((*me.pods, there)))))
            yield f"{label}: it exists, counted as its own", after._replace(wrong=wrong)
        # Another owner's: nothing to do but wait until the garbage collector has removed it.

    def _delete(self, s: Cluster, o: int, judged: Pod) -> Iterator[tuple[str, Cluster]]:
        label = f"operator {o} deletes pod w{judged.worker}-{judged.incarnation} (uid {judged.uid})"
        me = s.operators[o]
        forgotten = me._replace(pods=tuple(p for p in me.pods if p.uid != judged.uid))
        hit = next((p for p in s.pods if p.name == judged.name), None)
        if hit is None or (Rule.UID_PRECONDITION not in self.off and hit.uid != judged.uid):
            yield f"{label}: refused, not that pod", _believe(s, o, forgotten)
            return
        wrong = ""
        if hit.uid != judged.uid:
            wrong = f"operator {o} judged pod uid {judged.uid} and deleted uid {hit.uid}"
        elif (hit.owner, hit.round) == (s.job.uid, s.job.round) and hit.running:
            wrong = f"operator {o} deleted a healthy pod of the published round {hit.round}"
        after = s._replace(pods=tuple(p for p in s.pods if p != hit), wrong=wrong)
        yield label, _believe(after, o, forgotten)

    # -- everything else

    def _environment(self, s: Cluster) -> Iterator[tuple[str, Cluster]]:
        orphans = [p for p in s.pods if p.owner != s.job.uid]
        if orphans:
            yield (
                "the garbage collector removes pods of a deleted job",
                s._replace(pods=tuple(p for p in s.pods if p not in orphans)),
            )

    def _faults(self, s: Cluster) -> Iterator[tuple[str, Cluster]]:
        for pod in s.pods:
            name = f"w{pod.worker}-{pod.incarnation}"
            rest = tuple(p for p in s.pods if p != pod)
            yield f"pod {name} is deleted by force", s._replace(pods=rest)
            if pod.running:
                yield f"pod {name} fails", s._replace(pods=tuple(sorted((*rest, pod._replace(running=False)))))
        if s.job.uid == 1:
            yield "the job is deleted and created again", s._replace(job=Job(2, s.job.version + 1, 0))
        yield (
            "total restart: every pod fails, every operator forgets",
            s._replace(
                pods=tuple(sorted(p._replace(running=False) for p in s.pods)),
                operators=(Operator(),) * len(s.operators),
            ),
        )


def _renamed(s: Cluster, order: tuple[Operator, ...]) -> Cluster:
    jobs = sorted({s.job.version, *(o.job.version for o in order if o.job is not None)})
    uids: dict[int, int] = {}

    def pods(held: tuple[Pod, ...], since: int) -> tuple[Pod, ...]:
        # Nobody looks at pods of a job that is gone for him; dropping them merges states.
        return tuple(p._replace(uid=uids.setdefault(p.uid, len(uids))) for p in held if p.owner >= since)

    def job(known: Job) -> Job:
        return known._replace(version=jobs.index(known.version))

    operators = tuple(
        Operator(job(o.job) if o.job else _NOTHING, pods(o.pods, o.job.uid if o.job else s.job.uid)) for o in order
    )
    return s._replace(job=job(s.job), pods=pods(s.pods, 0), operators=operators, uids=0)


_NOTHING = Job(0, 0, 0)


def _believe(s: Cluster, o: int, belief: Operator) -> Cluster:
    return s._replace(operators=(*s.operators[:o], belief, *s.operators[o + 1 :]))


def settle(model: ClusterModel, s: Cluster) -> Cluster | str:
    """The state in which one operator alone, without further faults, has brought up a whole round; or why it has not.

    The schedule: garbage is collected; operator 0 reads, publishes if somebody of the round is lost, removes
    left-overs, creates. The other operator never wakes up again. Bounded.
    """
    free = ClusterModel(model.off, operators=model.operators, indices=model.indices, rounds=s.job.round + 2, faults=0)
    s = s._replace(faults=0)
    for _ in range(12 * model.indices + 12):
        current = [p for p in s.pods if (p.owner, p.round) == (s.job.uid, s.job.round)]
        if s.job.round > 0 and len(s.pods) == sum(p.running for p in current) == model.indices:
            return s
        lost = s.job.round == 0 or any(not p.running for p in current)
        verbs = ("garbage", "operator 0 sees", *(("operator 0 publishes",) if lost else ()), "0 deletes", "0 creates")
        steps = list(free.actions(s))
        step = next((x for verb in verbs for x in steps if verb in x[0]), None)
        if step is None:
            return f"operator 0 is stuck at round {s.job.round} with the pods {s.pods}"
        s = step[1]
    return f"no whole round within the bound: round {s.job.round}, pods {s.pods}"
