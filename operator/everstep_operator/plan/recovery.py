"""The record of a recovery: opened when a round is published for a loss, completed from what the workers report."""

from __future__ import annotations

from datetime import datetime

from everstep_operator.api.status import MAX_RECOVERIES, RecoveryRecord
from everstep_operator.plan.failure import Loss
from everstep_operator.plan.snapshot import Progress

RUNG = "recreate"


def opened(now: datetime, loss: Loss, old: tuple[RecoveryRecord, ...]) -> tuple[RecoveryRecord, ...]:
    record = RecoveryRecord(
        at=now,
        cause=loss.cause,
        worker=loss.index,
        node=loss.node,
        rung=RUNG,
        detect_ms=_ms(loss.at, now),
    )
    return (record, *old)[:MAX_RECOVERIES]


def is_open(records: tuple[RecoveryRecord, ...]) -> bool:
    return bool(records) and records[0].first_step_ms is None


def completed(
    records: tuple[RecoveryRecord, ...], progress: Progress, published_at: datetime | None, step_before: int | None
) -> tuple[RecoveryRecord, ...]:
    """Fill the newest record once every rank of the round has taken a step; unchanged until then.

    `published_at` is when the round was published, to the microsecond (the record keeps whole seconds).
    """
    if not is_open(records) or progress.first_step_at is None or progress.restored_at is None:
        return records
    start = published_at or records[0].at
    restore = progress.restore_seconds or 0.0
    total = _ms(start, progress.restored_at) or 0
    restored = progress.restored_step or 0
    done = records[0].model_copy(
        update={
            "rendezvous_ms": max(0, total - round(restore * 1000)),
            "restore_ms": round(restore * 1000),
            "first_step_ms": _ms(progress.restored_at, progress.first_step_at),
            "lost_steps": max(0, step_before - restored) if step_before is not None else None,
        }
    )
    return (done, *records[1:])


def total_ms(record: RecoveryRecord) -> int:
    """From the notice of the loss to the next step of every rank, in milliseconds."""
    return (record.rendezvous_ms or 0) + (record.restore_ms or 0) + (record.first_step_ms or 0)


def _ms(start: datetime | None, end: datetime) -> int | None:
    return None if start is None else max(0, round((end - start).total_seconds() * 1000))
