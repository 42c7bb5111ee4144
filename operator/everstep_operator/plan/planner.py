"""The planner makes one plan from one observation of a job. Start reading here.

The shape of a pass:
  1. a job that is being deleted, managed elsewhere or finished needs no world, unless it is to run again (`rerun`);
  2. `state.facts`: all that a decision depends on, derived once;
  3. `decide.policies`: is the job complete, suspended, overdue, has it lost a worker, was it resized?
  4. `render.assembly`: a change of what should exist is *published* first (a compare-and-swap on the job's status) and
     carried out after; otherwise converge: the pods that were published, all of them, and no others.
The plan's actions come in stages, which say what depends on what (`stages`).

Invariant: which pods should exist is a function of the published status and the spec alone. So an operator that wakes
up with an old status can at worst create pods that were replaced since. The commit log refuses the writes of those pods
(ADR 0001).

These steps are the same for all backends. With backend c10d every change replaces all workers (ADR 0027). With the
other backends the agents form the rounds, and a lost worker is replaced alone (ADR 0010).
"""

from __future__ import annotations

from dataclasses import replace

from everstep_operator.plan import times
from everstep_operator.plan.check import check
from everstep_operator.plan.decide.completion import is_finished
from everstep_operator.plan.decide.policies import decide
from everstep_operator.plan.outcome import Plan
from everstep_operator.plan.render import finished_job, rerun
from everstep_operator.plan.render.assembly import render_plan
from everstep_operator.plan.sanitize import sanitized
from everstep_operator.plan.snapshot import Snapshot
from everstep_operator.plan.state import facts

OUR_NAME = "everstep.dev/operator"


def plan(snapshot: Snapshot) -> Plan:
    """Decide what to do about one job. Pure and total: every snapshot has a plan.

    Raises PlanError when the plan breaks a rule of `check`, which is a defect of the planner.
    """
    snapshot = _in_time(sanitized(snapshot))
    decided = _decide(snapshot)
    check(snapshot, decided)
    return decided


def _in_time(snapshot: Snapshot) -> Snapshot:
    """The snapshot without stored times in the future. The status of another controller stays as it is."""
    job = snapshot.job
    if job.deleting or job.spec.managed_by not in (None, OUR_NAME):
        return snapshot
    status = times.until(job.status, snapshot.now)
    # The ends of exclusions lie in the future. They are only shown, and made anew in each pass.
    status = status.model_copy(update={"excluded_nodes": job.status.excluded_nodes})
    return replace(snapshot, job=replace(job, status=status))


def _decide(snapshot: Snapshot) -> Plan:
    job = snapshot.job
    if job.deleting:
        return Plan(job.status, reason="the job is being deleted; garbage collection removes what it owns")
    if job.spec.managed_by not in (None, OUR_NAME):
        return Plan(job.status, reason=f"managed by {job.spec.managed_by}")
    if is_finished(job.status):
        return rerun.begin(snapshot) if rerun.is_wanted(job) else finished_job.after_finish(snapshot)
    known = facts.derive(snapshot)
    return render_plan(known, decide(known))
