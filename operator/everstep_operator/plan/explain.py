"""Writes a plan as text, for logs and the transcript tests."""

from __future__ import annotations

from dataclasses import replace

from everstep_operator.api.conditions import ConditionType
from everstep_operator.api.status import Status
from everstep_operator.plan.outcome import Plan
from everstep_operator.plan.snapshot import JobView, Snapshot
from everstep_operator.plan.state import roster


def explain(snapshot: Snapshot, plan: Plan) -> str:
    """The plan's decisions, one a line, in the order in which they would be carried out."""
    lines = []
    old, new = snapshot.job.status, plan.status
    if plan.publish and (line := _published(snapshot.job, new)) is not None:
        lines.append(line)
    lines += [str(action) for action in plan.actions]
    ready = new.condition(ConditionType.READY)
    if new != old and ready is not None:
        lines.append(f'status {ready.reason} "{ready.message}"')
    lines += [str(event) for event in plan.events]
    if plan.requeue is not None:
        lines.append(f"requeue in {plan.requeue.after.total_seconds():g}s ({plan.requeue.why})")
    return "\n".join(lines or [f"nothing to do: {plan.reason}"])


def _published(job: JobView, new: Status) -> str | None:
    """The line with the published workers; None if they are the same as before."""
    old, made = roster.published(job), roster.published(replace(job, status=new))
    if made is None or made == old:
        return None
    return (
        f"publish round {made.next_incarnation} size {made.wanted}" if made.replaces_all else f"publish workers {made}"
    )
