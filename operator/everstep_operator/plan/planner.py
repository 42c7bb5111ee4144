"""The planner: from one observation of a job to one plan. Start reading here.

The shape of a pass:
  1. a job that is being deleted, managed elsewhere or finished needs no world;
  2. judge: is it complete, past its deadline, has it lost a worker, was it resized?
  3. a change of what should exist is *published* first (a compare-and-swap on the job's status) and carried out after;
  4. otherwise converge: the pods that were published, all of them, and no others.
What is to be done comes in stages, which say what depends on what (`stages`).

Invariant: which pods should exist is a function of the published status and the spec alone. An operator that wakes up
with an old status can therefore only create pods that were replaced since, which the commit log refuses (ADR 0001).

There are two ways to do 2 to 4. With backend c10d every change is a new round that recreates all workers: `recreate`
(ADR 0002). With the others the agents form the rounds, and a worker is replaced alone: `elastic` (ADR 0010).
"""

from __future__ import annotations

from everstep_operator.api.types import RendezvousBackend
from everstep_operator.plan import elastic, recreate
from everstep_operator.plan.build import finish
from everstep_operator.plan.check import check
from everstep_operator.plan.outcome import Plan
from everstep_operator.plan.sanitize import harmless
from everstep_operator.plan.snapshot import Snapshot

OUR_NAME = "everstep.dev/operator"


def plan(snapshot: Snapshot) -> Plan:
    """Decide what to do about one job. Pure and total: every snapshot has a plan.

    Raises PlanError when the plan breaks a rule of `check`, which is a defect of the planner.
    """
    snapshot = harmless(snapshot)
    decided = _decide(snapshot)
    check(snapshot, decided)
    return decided


def _decide(snapshot: Snapshot) -> Plan:
    job = snapshot.job
    if job.deleting:
        return Plan(job.status, reason="the job is being deleted; garbage collection removes what it owns")
    if job.spec.managed_by not in (None, OUR_NAME):
        return Plan(job.status, reason=f"managed by {job.spec.managed_by}")
    if finish.is_finished(job.status):
        return finish.after_finish(snapshot)
    if job.spec.rendezvous.backend is RendezvousBackend.C10D:
        return recreate.plan(snapshot)
    return elastic.plan(snapshot)
