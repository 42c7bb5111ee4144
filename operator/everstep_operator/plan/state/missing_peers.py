"""Separates workers that ended because others could not run from workers that ran together and formed no round.

A worker that waits for a peer without a node, quota or image ends after `spec.rendezvous.joinTimeoutSeconds`. Its
program did not fail, and may be able to take a step. Without this distinction 30 minutes without capacity would end a
healthy job.

Invariant: workers that are enough for a round, and that all ran while one of them waited, are never excused. So a
job whose workers cannot reach each other still ends by `spec.recovery.noProgressLimit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from everstep.contract.document import Sizes
from everstep_operator.api.conditions import Cause
from everstep_operator.api.types import TrainingJobSpec
from everstep_operator.plan.snapshot import Snapshot, WorkerPod
from everstep_operator.plan.state.losses import Loss, root_cause_first
from everstep_operator.plan.state.roster import Roster

# A pod that runs so soon after its creation has not waited for capacity.
PROMPT = timedelta(seconds=30)


def excused(
    snapshot: Snapshot, roster: Roster, current: Mapping[int, WorkerPod], sizes: Sizes, lost: tuple[Loss, ...]
) -> tuple[Loss, ...]:
    """The losses, with the cause PeerMissing where a worker waited in vain for others that could not run."""
    patience = _patience(snapshot.job.spec)
    judged = tuple(_excused(snapshot, roster, current, sizes, loss, patience) for loss in lost)
    return judged if judged == lost else root_cause_first(judged)


def _excused(
    snapshot: Snapshot,
    roster: Roster,
    current: Mapping[int, WorkerPod],
    sizes: Sizes,
    loss: Loss,
    patience: timedelta,
) -> Loss:
    if not _waited(snapshot, roster, loss):
        return loss
    ended = loss.at or snapshot.now
    missing = [
        index
        for index in roster.workers
        if index != loss.index and not _ran(current.get(index), ended - patience, roster.workers[index].started)
    ]
    if not missing or sizes.largest(len(roster.workers) - len(missing)) > 0:
        return loss
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    detail = f"gave up after {patience.total_seconds():.0f} s, because worker {missing[0]}{more} could not run"
    return replace(loss, cause=Cause.PEER_MISSING, detail=detail)


def _patience(spec: TrainingJobSpec) -> timedelta:
    """How long an agent waits for a round: see `render.rendezvous`."""
    shrink_after = spec.elastic.shrink_after_seconds if spec.elastic is not None else 0
    return timedelta(seconds=spec.rendezvous.join_timeout_seconds + shrink_after)


def _waited(snapshot: Snapshot, roster: Roster, loss: Loss) -> bool:
    """Whether the worker ended because it waited too long for others. Under c10d a worker that cannot reach worker 0,
    which has the store, reports a lost peer. In a round that was never complete there was no peer to lose."""
    if loss.cause is Cause.RENDEZVOUS_TIMEOUT:
        return True
    return roster.replaces_all and loss.cause is Cause.PEER_LOST and snapshot.job.status.world.formed_at is None


def _ran(pod: WorkerPod | None, since: datetime, started: bool) -> bool:
    """Whether this worker ran from `since` on, or ran as soon as its pod was made."""
    if pod is None:
        return started  # its pod is gone: another loss, and not a wait
    began = pod.started_at or (pod.ready_at if pod.ready else None)
    if began is None:
        return pod.ready or pod.exit is not None  # an edited status may lack the start
    return began <= since or (pod.created_at is not None and began - pod.created_at < PROMPT)
