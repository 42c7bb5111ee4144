"""Moves workers away from nodes that are about to go: another worker first, then the one that has to leave (ADR 0063).

A move is a spare that is made on purpose. The roster gets one worker more for each that has to leave (`surge`). When it
waits for a place in a round, the leaving one is asked to stop, and both change places at the end of a step. Nothing is
lost, so nothing is charged, and no rule of `spec.recovery` applies.
"""

from __future__ import annotations

from everstep_operator import object_names
from everstep_operator.api.conditions import Cause, Rung
from everstep_operator.plan.decide.decision import Publish, RecoveryStart
from everstep_operator.plan.state.facts import Facts
from everstep_operator.plan.state.losses import Loss


def when_workers_move(facts: Facts) -> Publish | None:
    if facts.moves.done:
        return _moved(facts) if _is_seen_to_train(facts) else None
    made = facts.successor(replaced=facts.regrows)
    if (made.surge, made.leaving) == (facts.roster.surge, facts.roster.leaving):
        return None
    return Publish(made, _announcement(facts, made.leaving))


def _is_seen_to_train(facts: Facts) -> bool:
    """Whether all ranks have reported a step of the new round. Without their reports, the end of the pod is enough."""
    reported = facts.snapshot.progress
    trains = reported.round >= facts.world.round and reported.first_step_at is not None
    return trains or any(index not in facts.current for index in facts.moves.done)


def _moved(facts: Facts) -> Publish:
    index, why = next(iter(facts.moves.done.items()))
    pod, view = facts.current.get(index), facts.round_view
    left_at = (view.left_at if view is not None else None) or facts.snapshot.progress.restored_at
    workers = object_names.list_of_workers(facts.moves.done)
    where = f" from node {pod.node}" if pod is not None and pod.node is not None else ""
    loss = Loss(index, Cause.DISRUPTION_TARGET, why, node=pod.node if pod is not None else None)
    return Publish(
        facts.successor(facts.moves.done, replaced=False),
        f"moved {workers}{where}: {why}",
        recovery=RecoveryStart(loss, Rung.MIGRATE, follows=False, at=left_at) if left_at is not None else None,
    )


def _announcement(facts: Facts, leaving: tuple[int, ...]) -> str:
    new = sorted(set(leaving) - set(facts.roster.leaving))
    if new:
        return f"{object_names.list_of_workers(new)} may leave: others wait for the places"
    if not facts.moves.due:
        return "no worker has to leave any more"
    index, why = next(iter(facts.moves.due.items()))
    return f"replacing {object_names.list_of_workers(facts.moves.due)} first, because of worker {index}: {why}"
