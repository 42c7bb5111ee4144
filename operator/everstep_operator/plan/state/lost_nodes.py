"""Remembers nodes that were lost with workers, and says when an elastic job grows by workers on them (ADR 0065).

A node that comes and goes would cost a round each time: one without its worker, and one with it. So after a loss the
worker of such a node waits for its place until the node has been ready for a while. The others train meanwhile. The
wait ends by itself, and is never longer than `LONGEST`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from everstep_operator.api.conditions import Cause
from everstep_operator.api.status import MAX_LOST_NODES, LostNode, Restarts
from everstep_operator.plan import times
from everstep_operator.plan.snapshot import Snapshot
from everstep_operator.plan.state.losses import Loss

REMEMBERED = timedelta(minutes=30)
STEADY = timedelta(minutes=1)  # after the first loss; doubled with each further one
LONGEST = timedelta(minutes=15)
# The workers of one node are not all seen to be lost in one pass.
ONE_LOSS = timedelta(seconds=10)
MOST = 99  # times that are counted; the wait is at its longest long before


def counted(now: datetime, restarts: Restarts, lost: Iterable[Loss]) -> Restarts:
    """The counters after these losses."""
    names = dict.fromkeys(loss.node for loss in lost if loss.cause is Cause.NODE_LOST and loss.node is not None)
    if not names:
        return restarts
    before = {node.name: node for node in remembered(now, restarts)}
    again = [_again(before.get(name), name, now) for name in names]
    others = [node for node in before.values() if node.name not in names]
    return restarts.model_copy(update={"lost_nodes": (*again, *others)[:MAX_LOST_NODES]})


def avoided(now: datetime, restarts: Restarts) -> tuple[str, ...]:
    """The nodes on which new pods are placed only if there is no other: as those that rejected a pod (ADR 0036)."""
    return tuple(node.name for node in remembered(now, restarts))


def steady_at(snapshot: Snapshot, name: str) -> datetime | None:
    """The time from which workers on this node may get a place; None if they may now."""
    lost = find(snapshot, name)
    if lost is None:
        return None
    since, node = lost.at, snapshot.nodes.get(name)
    if node is not None and node.changed_at is not None and times.may_be(node.changed_at, snapshot.now):
        since = max(since, min(node.changed_at, snapshot.now))
    at = since + min(STEADY * (1 << min(max(lost.times, 1) - 1, 10)), LONGEST)
    return at if snapshot.now < at else None


def remembered(now: datetime, restarts: Restarts) -> tuple[LostNode, ...]:
    """The nodes that were lost lately, the last one first."""
    return tuple(node for node in restarts.lost_nodes if now - node.at <= REMEMBERED)


def find(snapshot: Snapshot, name: str) -> LostNode | None:
    """The node, if it was lost lately."""
    lately = remembered(snapshot.now, snapshot.job.status.restarts)
    return next((node for node in lately if node.name == name), None)


def _again(before: LostNode | None, name: str, now: datetime) -> LostNode:
    if before is None:
        return LostNode(name=name, times=1, at=now)
    return LostNode(name=name, times=min(before.times + (now - before.at > ONE_LOSS), MOST), at=now)
