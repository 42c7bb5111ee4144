"""Counts what speaks against a node, and says which nodes new pods avoid, why, and until when (ADR 0066).

Each loss that comes from the node itself adds points. Points are halved each hour. A node with `LIMIT` points is
avoided until it has half of that. What the script may have done accuses no node: an error, a lack of memory, a signal
look the same on each.

Invariants: every exclusion ends by itself, or with the fact in the node's own status that it follows. If losses speak
against more than half of the nodes that the job could use, the nodes are not the cause, and these losses count for
nothing. What other jobs say never takes away what the job itself has met. One node that is ready is always left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from everstep_operator.api.conditions import Cause, Suspicion
from everstep_operator.api.status import (
    MAX_EXCLUDED_NODES,
    MAX_EXCLUSION_REASON,
    MAX_EXCLUSION_REASONS,
    MAX_SUSPECT_NODES,
    ExcludedNode,
    Restarts,
    SuspectNode,
)
from everstep_operator.plan.snapshot import INIT_RUNS, Fleet, Snapshot, WorkerPod
from everstep_operator.plan.state.losses import Loss

HALF_LIFE = timedelta(hours=1)
LIMIT = 100
MOST = 4 * LIMIT  # so that a node is avoided for three hours after its last loss, and no longer
POINTS = 60  # of one loss: the second in half an hour reaches the limit
# Of what the script may have done as well: then it takes more.
POINTS_OF = {Suspicion.HANG: 30}
# A rank that is slow is reported again in each round, and in short steps every few seconds.
SAME_REPORT = timedelta(minutes=10)
FORGOTTEN = LIMIT // 20
# The workers of one node are not all seen to be lost in one pass.
ONE_LOSS = timedelta(seconds=10)

_OF_CAUSE = {
    Cause.NODE_LOST: Suspicion.NODE_LOST,
    Cause.REJECTED: Suspicion.REJECTED,
    Cause.START_TIMEOUT: Suspicion.START_TIMEOUT,
}
# Errors that name the hardware, of CUDA, NCCL, ROCm and the kernel. A program that is wrong does not cause them.
_HARDWARE = re.compile(
    r"uncorrectable (?:NVLink|ECC) error|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|fallen off the bus|hardware stack error"
    r"|\bXid \(|Unrecovered (?:ECC|memory) error|HSA_STATUS_ERROR_HARDWARE|\[Hardware Error\]",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Accusation:
    """Something that speaks against a node."""

    node: str
    what: Suspicion


def of_losses(lost: Iterable[Loss], current: Mapping[int, WorkerPod]) -> list[Accusation]:
    """What these losses say about nodes."""
    accusations = []
    for loss in lost:
        pod = current.get(loss.index)
        # An image or a configuration that cannot be used is the same on each node, and so is an init container that
        # takes too long.
        has_fault_of_its_own = (
            loss.cause is Cause.START_TIMEOUT
            and pod is not None
            and (pod.waiting is not None or (pod.starting or "").startswith(INIT_RUNS))
        )
        what = _suspicion(loss)
        if loss.node is not None and what is not None and not has_fault_of_its_own:
            accusations.append(Accusation(loss.node, what))
    return accusations


def _suspicion(loss: Loss) -> Suspicion | None:
    if loss.cause is Cause.ERROR and any(_HARDWARE.search(line) for line in (loss.detail, *loss.log_lines)):
        return Suspicion.HARDWARE_ERROR
    return _OF_CAUSE.get(loss.cause)


def of_slow_rank(snapshot: Snapshot, current: Mapping[int, WorkerPod]) -> list[Accusation]:
    """What a report says that names a slow rank for the first time. Rank 0 does more than the others in many scripts,
    so it accuses nobody."""
    seen, view, before = snapshot.progress, snapshot.world, snapshot.job.status
    rank, processes = seen.straggler_rank, snapshot.job.spec.processes()
    if not rank or seen.straggler == before.progress.straggler or view is None or view.round != seen.round:
        return []
    worker = view.members[rank // processes : rank // processes + 1]
    pod = current.get(worker[0][0]) if worker else None
    if pod is None or pod.node is None or pod.incarnation != worker[0][1]:
        return []
    known = next((node for node in before.restarts.suspect_nodes if node.name == pod.node), None)
    if known is not None and Suspicion.SLOW_RANK in known.reasons and snapshot.now - known.at < SAME_REPORT:
        return []
    return [Accusation(pod.node, Suspicion.SLOW_RANK)]


def counted(now: datetime, restarts: Restarts, accusations: Iterable[Accusation]) -> Restarts:
    """The counters after these accusations: each node is charged once for what happened to it at one time."""
    by_node: dict[str, list[Suspicion]] = {}
    for accusation in accusations:
        by_node.setdefault(accusation.node, []).append(accusation.what)
    if not by_node:
        return restarts
    before = {node.name: node for node in restarts.suspect_nodes if _points(node, now) >= FORGOTTEN}
    charged = [_charged(before.get(name), name, reasons, now) for name, reasons in by_node.items()]
    others = [node for node in before.values() if node.name not in by_node]
    return restarts.model_copy(update={"suspect_nodes": (*charged, *others)[:MAX_SUSPECT_NODES]})


def _charged(before: SuspectNode | None, name: str, reasons: list[Suspicion], now: datetime) -> SuspectNode:
    points = max(POINTS_OF.get(reason, POINTS) for reason in reasons)
    at = now
    if before is not None:
        reasons = [*reasons, *before.reasons]
        if timedelta(0) <= now - before.at <= ONE_LOSS:
            points, at = max(points, before.points), before.at
        else:
            points = min(MOST, _points(before, now) + points)
    # What is charged to an avoided node never ends its exclusion, also if the points do not reach the limit again.
    is_avoided = before is not None and excluded_until(before, now) is not None
    unique = tuple(dict.fromkeys(reasons))
    return SuspectNode(name=name, points=points, at=at, excluded=is_avoided or points >= LIMIT, reasons=unique)


def _points(node: SuspectNode, now: datetime) -> int:
    """The points that are left."""
    return int(min(node.points, MOST) * 0.5 ** (max(now - node.at, timedelta(0)) / HALF_LIFE))


def excluded_until(node: SuspectNode, now: datetime) -> datetime | None:
    """Until when new pods avoid the node; None if they do not."""
    if not node.excluded or 2 * node.points <= LIMIT:
        return None
    end = node.at + HALF_LIFE * math.log2(2 * min(node.points, MOST) / LIMIT)
    end = end.replace(microsecond=0)
    return end if now < end else None


def excluded(snapshot: Snapshot, restarts: Restarts, *, creates: bool) -> tuple[ExcludedNode, ...]:
    """The nodes that new pods avoid, the one with the longest time first. `creates`: whether pods are about to be
    created. What others say about a node is news to the job only then: a device plugin that restarts changes nothing
    for it."""
    now, fleet, before = snapshot.now, snapshot.fleet, snapshot.job.status.excluded_nodes
    if fleet is None:
        return tuple(node for node in before if node.until is None or node.until > now)
    until, reasons = _by_losses(snapshot, restarts, fleet)
    for name, faults in fleet.faults.items():
        if name in fleet.able:
            reasons.setdefault(name, []).extend(faults)
    if not creates:
        known = {*(node.name for node in before), *(node.name for node in restarts.suspect_nodes)}
        reasons = {name: texts for name, texts in reasons.items() if name in known}
    if not any(ready and name not in reasons for name, ready in fleet.able.items()):
        return ()
    names = sorted(reasons, key=lambda name: (-(until[name].timestamp() if name in until else 0.0), name))
    return tuple(
        ExcludedNode(
            # While its status says so, its exclusion has no end that is known.
            name=name,
            until=None if name in fleet.faults else until.get(name),
            reasons=tuple(text[:MAX_EXCLUSION_REASON] for text in reasons[name][:MAX_EXCLUSION_REASONS]),
        )
        for name in names[:MAX_EXCLUDED_NODES]
    )


def _by_losses(
    snapshot: Snapshot, restarts: Restarts, fleet: Fleet
) -> tuple[dict[str, datetime], dict[str, list[str]]]:
    """The nodes that losses speak against, until when, and why."""
    until: dict[str, datetime] = {}
    reasons: dict[str, list[str]] = {}
    for node in restarts.suspect_nodes:
        if node.name in fleet.able and (end := excluded_until(node, snapshot.now)) is not None:
            until[node.name], reasons[node.name] = end, [", ".join(node.reasons) or "losses there"]
    if 2 * len(until) > len(fleet.able):
        until, reasons = {}, {}
    accused = {name: end for name, end in fleet.accused.items() if name in fleet.able and end > snapshot.now}
    if 2 * len({*until, *accused}) <= len(fleet.able):
        for name, end in accused.items():
            until[name] = max(end, until.get(name, end))
            reasons.setdefault(name, []).append("other jobs exclude it")
    return until, reasons


def ends(now: datetime, nodes: Iterable[ExcludedNode]) -> datetime | None:
    """When the first of these exclusions ends."""
    return min((node.until for node in nodes if node.until is not None and node.until > now), default=None)
