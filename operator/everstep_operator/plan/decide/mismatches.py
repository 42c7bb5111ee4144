"""Judges collectives that do not match: one rank calls another one than its peers, so no rank goes on.

The agents name the lines. The same script repeats the mistake, so a second mismatch at the same lines, without a new
step in between, ends the job. The first one is charged like any failure of the program, because other data may help.
"""

from __future__ import annotations

import re
from datetime import timedelta

from everstep.contract.calls import NO_MATCH
from everstep_operator.api.status import MAX_MISMATCH, Restarts
from everstep_operator.plan.state.losses import Loss

TOGETHER = timedelta(seconds=10)  # from the first worker that a mismatch ends to the last one
# The count of a collective and the folder of a worker's stacks differ between two mismatches at the same lines.
_NOT_THE_LOCATION = re.compile(r", (?:the \d{1,12}\w\w|after \d{1,12} collectives) in this round|; stacks in .*$")


def location(loss: Loss) -> str | None:
    """Which ranks waited in which collective, at which lines. None if the loss has another reason."""
    _, separator, text = loss.detail.partition(NO_MATCH)
    return _NOT_THE_LOCATION.sub("", text)[:MAX_MISMATCH] if separator else None


def is_final(restarts: Restarts, loss: Loss, step: int | None) -> bool:
    """Whether the same mismatch preceded the last restart, with no new step since. `step`: the highest one so far."""
    new = step is not None and (restarts.last_step is None or step > restarts.last_step)
    return restarts.mismatch is not None and restarts.mismatch == location(loss) and not new


def is_late(restarts: Restarts, loss: Loss) -> bool:
    """Whether the worker ended in the last incident, as several do whose collectives gloo aborts, and the status of its
    pod took long to come."""
    return loss.at is not None and restarts.incident_at is not None and loss.at - restarts.incident_at < TOGETHER


def message(loss: Loss) -> str:
    return (
        f"worker {loss.index}: {loss.detail}; it was the same before the last restart: correct the script, so that all "
        "ranks call the same collectives in the same order, and create the job again"
    )
