"""Judges refusals of a script by the session. The same script would be refused again, so no restart can help.

A refusal ends a job at once only if no training is lost with it. A job that has trained keeps its whole restart budget.
So does a job in which another worker has run for longer: the refused worker may have another script.
"""

from __future__ import annotations

from everstep.contract.termination import FIRST_STEPS
from everstep_operator.plan.decide import start_failures
from everstep_operator.plan.snapshot import Snapshot
from everstep_operator.plan.state.losses import Loss


def is_final(snapshot: Snapshot, loss: Loss) -> bool:
    """Whether this loss is a refusal of a script that has not trained yet."""
    return (
        loss.refusal is not None
        and not start_failures.runs_elsewhere(snapshot, loss.index, loss.pod)
        and not _has_trained(snapshot)
    )


def _has_trained(snapshot: Snapshot) -> bool:
    """Whether the job may have passed its first steps."""
    status, seen = snapshot.job.status, snapshot.progress
    known = (
        seen.step,
        seen.committed_step,
        seen.restored_step,
        status.progress.step,
        status.checkpoint.last_committed_step,
        status.restarts.last_step,
    )
    if any(step is not None and step > FIRST_STEPS for step in known):
        return True
    return not start_failures.reports(snapshot) and start_failures.may_have_run_unseen(snapshot)


def message(loss: Loss) -> str:
    """The message: the refusal of the session, the line of the script, and the remedy."""
    assert loss.refusal is not None
    line = loss.refusal.line
    at = f" (at {line})" if line and line not in loss.detail else ""
    return (
        f"worker {loss.index}: {loss.detail}{at}; a restart would end in the same way: "
        "correct the script and create the job again"
    )
