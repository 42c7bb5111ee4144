"""A plan as text, for logs and the transcript tests."""

from __future__ import annotations

from everstep_operator.api.conditions import ConditionType
from everstep_operator.plan.outcome import Plan
from everstep_operator.plan.snapshot import Snapshot
from everstep_operator.plan.state import roster


def explain(snapshot: Snapshot, plan: Plan) -> str:
    """One line a decision, in the order in which it would be carried out."""
    lines = []
    old, new = snapshot.job.status, plan.status
    if plan.publish and new.world.round != old.world.round and new.roster is None:
        lines.append(f"publish round {new.world.round} size {new.world.size}")
    if plan.publish and old.roster != new.roster and new.roster is not None:
        lines.append(f"publish workers {roster.read(new.roster)}")
    lines += [str(action) for action in plan.actions]
    ready = new.condition(ConditionType.READY)
    if new != old and ready is not None:
        lines.append(f'status {ready.reason} "{ready.message}"')
    lines += [str(event) for event in plan.events]
    if plan.requeue is not None:
        lines.append(f"requeue in {plan.requeue.after.total_seconds():g}s ({plan.requeue.why})")
    return "\n".join(lines or [f"nothing to do: {plan.reason}"])
