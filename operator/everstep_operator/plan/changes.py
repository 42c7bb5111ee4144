"""What a new status tells that the one before did not, as events. An event is written only if its status was."""

from __future__ import annotations

from everstep_operator.api.events import EventReason
from everstep_operator.api.status import Status
from everstep_operator.plan import recovery
from everstep_operator.plan.actions import Event
from everstep_operator.plan.snapshot import Snapshot


def events(snapshot: Snapshot, observed: Status) -> tuple[Event, ...]:
    """Rounds that formed, recoveries that ended, commits."""
    before = snapshot.job.status
    found = []
    if observed.world.formed_at is not None and before.world.formed_at is None:
        world = observed.world
        found.append(Event(EventReason.WORLD_FORMED, f"round {world.round} formed with {world.size} workers"))
    if observed.recoveries != before.recoveries and observed.recoveries:
        found += _recovered(snapshot, observed)
    return (*found, *_commits(snapshot, observed))


def _recovered(snapshot: Snapshot, observed: Status) -> list[Event]:
    done = observed.recoveries[0]
    found = [
        Event(
            EventReason.WORKER_REPLACED,
            f"training goes on {recovery.total_ms(done) / 1000:.1f} s after worker {done.worker} was lost "
            f"({done.cause}); {done.lost_steps if done.lost_steps is not None else 'unknown'} steps are retaken",
        )
    ]
    if (step := snapshot.progress.restored_step) is not None:
        took = snapshot.progress.restore_seconds or 0.0
        text = f"the state after step {step} was restored in {took:.1f} s"
        found.append(Event(EventReason.RESTORED_FROM_CHECKPOINT, text))
    return found


def _commits(snapshot: Snapshot, observed: Status) -> list[Event]:
    before = snapshot.job.status
    found = []
    committed = observed.checkpoint.last_committed_step
    if committed is not None and committed != before.checkpoint.last_committed_step:
        found.append(Event(EventReason.CHECKPOINT_COMMITTED, f"committed step {committed}"))
    if observed.checkpoint.healthy is False and before.checkpoint.healthy is not False:
        seen = snapshot.progress
        if seen.checkpoint_error is None and seen.checkpoint_damaged is not None:
            found.append(Event(EventReason.CHECKPOINT_CORRUPT, seen.checkpoint_damaged, warning=True))
        else:
            message = seen.checkpoint_error or "a commit failed"
            found.append(Event(EventReason.CHECKPOINT_COMMIT_FAILED, message, warning=True))
    return found
