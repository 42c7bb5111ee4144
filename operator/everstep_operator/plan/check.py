"""What no plan may do, checked on every plan before it is carried out.

The planner is tested not to break these rules; this is the last line, so that a planner defect stops one job with a
clear error instead of deleting its pods.
"""

from __future__ import annotations

from everstep_operator.plan import lifecycle, names
from everstep_operator.plan.actions import CreatePod, DeletePod, Plan
from everstep_operator.plan.snapshot import Snapshot


class PlanError(Exception):
    """The planner broke one of its own rules; nothing of the plan was carried out."""


def check(snapshot: Snapshot, plan: Plan) -> None:
    """Raise PlanError for the first broken rule."""
    old, new = snapshot.job.status, plan.status
    created = [a for a in plan.actions if isinstance(a, CreatePod)]
    deleted = [a for a in plan.actions if isinstance(a, DeletePod)]
    if new.world.round < old.world.round:
        raise PlanError(f"round goes back from {old.world.round} to {new.world.round}")
    if new.world.round > old.world.round and not (plan.publish and new.world.round == names.next_round(snapshot)):
        raise PlanError(f"round {new.world.round} is not published as the successor of {old.world.round}")
    if lifecycle.is_finished(old) and (created or new != old):
        raise PlanError("a finished job is given pods or another status")
    if lifecycle.is_finished(new) and created:
        raise PlanError("a job is finished and given pods in one plan")
    incarnation = names.incarnation_of_round(new.world.round)
    for create in created:
        if create.incarnation != incarnation or not 0 <= create.index < new.world.size:
            raise PlanError(f"{create.name} is not a worker of round {new.world.round} of {new.world.size}")
    if len({c.name for c in created}) != len(created) or len({d.uid for d in deleted}) != len(deleted):
        raise PlanError("a pod is created or deleted twice in one plan")
    ours = {p.uid: p for p in snapshot.pods}
    for delete in deleted:
        pod = ours.get(delete.uid)
        if pod is None or pod.name != delete.name:
            raise PlanError(f"{delete.name} ({delete.uid}) is not a pod of this job")
        if not lifecycle.is_finished(new) and not names.is_over(snapshot.job.name, pod, new.world.round):
            raise PlanError(f"{delete.name} is of round {pod.round}, which is not over in round {new.world.round}")
