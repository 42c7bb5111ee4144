"""Counts pods that nodes rejected, and decides how long their successors wait and which nodes they avoid.

A kubelet rejects a pod before a container runs: its devices are not healthy, its memory is taken, it restarts or shuts
down. The scheduler does not know why, and would choose the same node again at once. No program is to blame, so nothing
is charged and no start has failed (ADR 0036). The same holds for a pod that is taken away before its container runs:
a template that names its node, or tolerates all taints, brings the next pod to a node that is lost, tainted or short of
memory, and without a wait one pod would follow another without an end.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from everstep_operator.api.conditions import Cause
from everstep_operator.api.recovery import Backoff
from everstep_operator.api.status import MAX_REJECTED_BY, Restarts
from everstep_operator.plan.state.losses import Loss

# After this time a node may accept pods again. Rejections within this time count as one series.
REMEMBERED = timedelta(minutes=30)
# Also with `backoffSeconds.initial: 0`: a kubelet rejects a pod in milliseconds.
SHORTEST = timedelta(seconds=1)
# Workers that were lost for other reasons wait for this time too.
LONGEST = timedelta(seconds=60)


def counted(now: datetime, restarts: Restarts, lost: Iterable[Loss]) -> Restarts:
    """The counters after these losses. Pods that are rejected together count once."""
    # A node on which a pod did not start in time is avoided like one that rejected it. A pod without a node needs none.
    late = (loss for loss in lost if loss.cause is Cause.START_TIMEOUT and loss.node is not None)
    rejected = [*(loss for loss in lost if _is_rejection(loss)), *late]
    if not rejected:
        return restarts
    before, nodes = (restarts.rejections, restarts.rejected_by) if is_remembered(now, restarts.rejected_at) else (0, ())
    nodes = (*(loss.node for loss in rejected if loss.node is not None), *nodes)
    return restarts.model_copy(
        update={
            "rejections": before + 1,
            "rejected_at": now,
            "rejected_by": tuple(dict.fromkeys(nodes))[:MAX_REJECTED_BY],
        }
    )


def _is_rejection(loss: Loss) -> bool:
    taken_away = loss.cause in (Cause.EVICTED, Cause.DISRUPTION_TARGET) and loss.unstarted and loss.node is not None
    return loss.cause is Cause.REJECTED or loss.came_late or taken_away


def back_off_until(restarts: Restarts, back_off: Backoff) -> datetime | None:
    """The time from which missing workers may be created; None if nothing was rejected."""
    if restarts.rejected_at is None or restarts.rejections == 0:
        return None
    first = max(timedelta(seconds=back_off.initial), SHORTEST)
    wait: timedelta = first * (1 << min(restarts.rejections - 1, 10))
    return restarts.rejected_at + min(wait, LONGEST)


def avoided(now: datetime, restarts: Restarts) -> tuple[str, ...]:
    """The nodes on which new pods are placed only if there is no other."""
    return restarts.rejected_by if is_remembered(now, restarts.rejected_at) else ()


def is_remembered(now: datetime, last: datetime | None) -> bool:
    """Whether what happens now is of one series with what happened last at this time."""
    return last is not None and now - last <= REMEMBERED
