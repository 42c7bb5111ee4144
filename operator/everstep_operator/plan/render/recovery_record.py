"""Keeps the record of a recovery. It is opened when a roster is published for a loss, and completed from the workers'
reports."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from everstep_operator.api.conditions import Rung
from everstep_operator.api.status import MAX_RECOVERIES, RecoveryRecord
from everstep_operator.plan.snapshot import ReportedProgress
from everstep_operator.plan.state.losses import Loss

KUBERNETES_SECOND = timedelta(seconds=1)


def opened(
    now: datetime,
    loss: Loss,
    old: tuple[RecoveryRecord, ...],
    rung: Rung,
    detected: timedelta | None,
    step: int | None,
) -> tuple[RecoveryRecord, ...]:
    record = RecoveryRecord(
        at=now,
        cause=loss.cause,
        worker=loss.index,
        node=loss.node,
        rung=rung,
        step=step,
        detect_ms=None if detected is None else round(detected.total_seconds() * 1000),
    )
    return (record, *old)[:MAX_RECOVERIES]


def detected_after(fault_at: datetime | None, noticed_at: datetime) -> timedelta | None:
    """How long after the fault it was noticed, at least: Kubernetes gives whole seconds, and cuts the rest off."""
    if fault_at is None:
        return None
    return max(timedelta(0), noticed_at - fault_at - KUBERNETES_SECOND)


def is_open(records: tuple[RecoveryRecord, ...]) -> bool:
    return bool(records) and records[0].first_step_ms is None


def completed(
    records: tuple[RecoveryRecord, ...], progress: ReportedProgress, step_before: int | None, rung: Rung
) -> tuple[RecoveryRecord, ...]:
    """Complete the newest record once every rank has taken a step since the loss; until then it stays as it is. `rung`
    is the one that brought the training back."""
    if not is_open(records) or progress.first_step_at is None or progress.restored_at is None:
        return records
    # If this operator noticed the loss, it knows the microsecond; the record keeps whole seconds.
    start = progress.lost_at or records[0].at
    if progress.first_step_at <= start:
        return records  # the step was taken in the round before
    restore = progress.restore_seconds or 0.0
    total = _ms(start, progress.restored_at) or 0
    done = records[0].model_copy(
        update={
            "rung": rung,
            "rendezvous_ms": max(0, total - round(restore * 1000)),
            "restore_ms": round(restore * 1000),
            "first_step_ms": _ms(progress.restored_at, progress.first_step_at),
            "lost_steps": _repeated(progress, step_before),
        }
    )
    return (done, *records[1:])


def moved(
    records: tuple[RecoveryRecord, ...], progress: ReportedProgress, left_at: datetime
) -> tuple[RecoveryRecord, ...]:
    """Complete the record of a move, which is made when the world trains without the worker that left."""
    since = replace(progress, lost_at=left_at)
    done = completed(records, since, progress.step_before, Rung.MIGRATE)
    if not is_open(done):
        return done
    # Nobody has reported a step.
    return (records[0].model_copy(update={"first_step_ms": 0}), *records[1:])


def regrown(
    now: datetime, progress: ReportedProgress, records: tuple[RecoveryRecord, ...]
) -> tuple[RecoveryRecord, ...]:
    """The records, with a new one if the world has its full size again after the newest recovery had shrunk it."""
    if not records or records[0].rung != Rung.SHRINK or is_open(records):
        return records
    milliseconds = _ms(progress.restored_at, progress.first_step_at) if progress.first_step_at is not None else None
    before = records[0]
    grown = RecoveryRecord(
        at=now,
        cause=before.cause,
        worker=before.worker,
        node=before.node,
        rung=Rung.REGROW,
        first_step_ms=milliseconds or 0,
    )
    return (grown, *records)[:MAX_RECOVERIES]


def _repeated(progress: ReportedProgress, step_before: int | None) -> int | None:
    """The steps that had been completed and were taken again; None if no process reported where the training resumed.
    They are counted from the first step that the processes took, not from the step that they restored. Members that
    kept their memory restored nothing and lost nothing, and a script may keep its state by other means.
    """
    resumed = progress.restored_step if progress.resumed_step is None else progress.resumed_step
    if step_before is None or resumed is None:
        return None
    # A loss that was noticed late: the steps of this round were completed after it.
    before = step_before if progress.step_before is None else min(step_before, progress.step_before)
    return max(0, before - resumed)


def total_ms(record: RecoveryRecord) -> int:
    """Milliseconds from the fault to the next step of every rank: all parts of the record. Whoever shows one duration
    of a recovery shows this one."""
    parts = (record.detect_ms, record.rendezvous_ms, record.restore_ms, record.first_step_ms)
    return sum(part or 0 for part in parts)


def _ms(start: datetime | None, end: datetime) -> int | None:
    return None if start is None else max(0, round((end - start).total_seconds() * 1000))
