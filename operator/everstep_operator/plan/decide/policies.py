"""Asks the policies in order about a job that is not finished and is managed by this operator. The first one that
decides ends the walk.

The order matters. A job that has ended is not suspended, resized or started again. A suspended job has no losses, nor
has one whose queue takes its quota. A loss is judged before an update or a resize, so that it is charged.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep_operator.plan.decide import completion, loss, migrate, process_ends, queue, resize, start, suspend, update
from everstep_operator.plan.decide.decision import Decision, Keep
from everstep_operator.plan.state.facts import Facts

POLICIES: tuple[Callable[[Facts], Decision | None], ...] = (
    completion.when_all_succeeded,
    completion.when_worker_0_succeeded,
    suspend.when_suspended,
    queue.when_it_has_no_quota,
    start.when_nothing_is_wanted_yet,
    completion.when_overdue,
    update.when_the_backend_has_changed,
    loss.when_workers_are_lost,
    completion.when_training_ends,
    update.when_workers_are_of_an_older_spec,
    resize.when_the_size_changes,
    migrate.when_workers_move,
    resize.when_out_of_date,
    process_ends.when_a_process_was_replaced,
)


def decide(facts: Facts) -> Decision:
    for policy in POLICIES:
        if (decision := policy(facts)) is not None:
            return decision
    return Keep()
