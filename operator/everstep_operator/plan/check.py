"""What no plan may do, checked by the planner on each of its plans, with the very snapshot that it was made of.

The planner is tested not to break these rules; this is the last line, so that a planner defect stops one job with a
clear error instead of deleting its pods.
"""

from __future__ import annotations

from everstep_operator.api.status import Status
from everstep_operator.api.types import RendezvousBackend
from everstep_operator.plan import names
from everstep_operator.plan.actions import CreatePod, DeletePod
from everstep_operator.plan.build import finish
from everstep_operator.plan.outcome import Plan
from everstep_operator.plan.snapshot import Snapshot, WorkerPod
from everstep_operator.plan.stages import broken_rule
from everstep_operator.plan.state import roster
from everstep_operator.plan.state.roster import Roster


class PlanError(Exception):
    """The planner broke one of its own rules; nothing of the plan was carried out."""


def check(snapshot: Snapshot, plan: Plan) -> None:
    """Raise PlanError for the first broken rule."""
    old, new = snapshot.job.status, plan.status
    if (wrong := broken_rule(plan.stages)) is not None:
        raise PlanError(wrong)
    created = [a for a in plan.actions if isinstance(a, CreatePod)]
    deleted = [a for a in plan.actions if isinstance(a, DeletePod)]
    if new.world.round < old.world.round:
        raise PlanError(f"round goes back from {old.world.round} to {new.world.round}")
    if finish.is_finished(old) and (created or new != old):
        raise PlanError("a finished job is given pods or another status")
    if finish.is_finished(new) and created:
        raise PlanError("a job is finished and given pods in one plan")
    if len({c.name for c in created}) != len(created) or len({d.uid for d in deleted}) != len(deleted):
        raise PlanError("a pod is created or deleted twice in one plan")
    ours = {p.uid: p for p in snapshot.pods}
    doomed = []
    for delete in deleted:
        pod = ours.get(delete.uid)
        if pod is None or pod.name != delete.name:
            raise PlanError(f"{delete.name} ({delete.uid}) is not a pod of this job")
        if not finish.is_finished(new):
            doomed.append(pod)
    if snapshot.job.spec.rendezvous.backend is RendezvousBackend.C10D:
        _check_round(snapshot, plan, created, doomed)
    else:
        _check_roster(snapshot, plan, created, doomed)


def _check_round(snapshot: Snapshot, plan: Plan, created: list[CreatePod], doomed: list[WorkerPod]) -> None:
    """Pods follow from `status.world` (ADR 0002)."""
    before, world = snapshot.job.status.world, plan.status.world
    if world.round > before.round and not (plan.publish and world.round == names.next_round(snapshot)):
        raise PlanError(f"round {world.round} is not published as the successor of {before.round}")
    incarnation = names.incarnation_of_round(world.round)
    for create in created:
        if create.incarnation != incarnation or not 0 <= create.index < world.size:
            raise PlanError(f"{create.name} is not a worker of round {world.round} of {world.size}")
    for pod in doomed:
        if not names.is_over(snapshot.job.name, pod, world.round):
            raise PlanError(f"{pod.name} is of round {pod.round}, which is not over in round {world.round}")


def _check_roster(snapshot: Snapshot, plan: Plan, created: list[CreatePod], doomed: list[WorkerPod]) -> None:
    """Pods follow from `status.roster` (ADR 0010)."""
    before, new = snapshot.job.status, plan.status
    old, made = roster.read(before.roster), roster.read(new.roster)
    seen = snapshot.progress.round if snapshot.world is None else snapshot.world.round
    if new.world.round not in (before.world.round, seen):
        raise PlanError(f"round {new.world.round} is neither published nor formed: {before.world.round}, {seen}")
    if str(made) != str(old) and not plan.publish:
        raise PlanError(f"workers {made} are not published in place of {old}")
    if before.roster is not None:
        _check_successor(old, made, new)
    for create in created:
        life = made.lives.get(create.index)
        if life is None or create.incarnation != life.incarnation:
            raise PlanError(f"{create.name} is not one of the published workers {made}")
    for pod in doomed:
        if not made.is_over(snapshot.job.name, pod, before.world.round):
            raise PlanError(f"{pod.name} is one of the published workers {made}, or of later ones")


def _check_successor(old: Roster, made: Roster, new: Status) -> None:
    if made.next_incarnation < old.next_incarnation:
        raise PlanError(f"incarnations go back from {old.next_incarnation} to {made.next_incarnation}")
    for index, life in made.lives.items():
        least = old.lives[index].incarnation if index in old.lives else old.next_incarnation
        if life.incarnation < least:
            raise PlanError(f"worker {index} goes back to incarnation {life.incarnation}, at least {least} is expected")
    if new.roster is None:
        raise PlanError("the published workers are taken back")
