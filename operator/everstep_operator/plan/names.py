"""Names of the objects of a job. Deterministic: after a crash the same decision gives the same name, so a pod is never
created twice, and a name is enough to find it."""

from __future__ import annotations

from everstep.contract import labels
from everstep_operator.plan.snapshot import Snapshot, WorkerPod


def pod_name(job: str, index: int, incarnation: int) -> str:
    return f"{job}-w{index}-{incarnation}"


def service_name(job: str) -> str:
    """The headless service that gives worker pods their host names; the disruption budget has the same name."""
    return f"{job}-workers"


def incarnation_of_round(round_: int) -> int:
    """Every round of the c10d backend recreates every worker (ADR 0002), so round r is made of incarnation r - 1."""
    return round_ - 1


def next_round(snapshot: Snapshot) -> int:
    """One more than any round that was ever seen, in the status or in a pod: a status that somebody emptied must not
    make the operator count again from rounds that the commit log has closed."""
    job = snapshot.job
    rounds = [p.round for p in snapshot.pods if p.round > 0 and p.name == pod_name(job.name, p.index, p.round - 1)]
    return max([job.status.world.round, *rounds]) + 1


def is_over(job: str, pod: WorkerPod, round_: int) -> bool:
    """Whether the pod is no worker of `round_` or of a later one: of an earlier round, or labelled by a stranger."""
    return pod.round < round_ or (pod.round == round_ and pod.name != pod_name(job, pod.index, pod.round - 1))


def selector(job: str) -> str:
    return f"{labels.JOB}={job}"


def rendezvous_host(job: str, namespace: str, round_: int) -> str:
    """Worker 0 of exactly this round: another round, or another job, never answers to this name."""
    return f"{pod_name(job, 0, incarnation_of_round(round_))}.{service_name(job)}.{namespace}.svc"
