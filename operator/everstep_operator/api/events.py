"""Reasons of the Kubernetes events that concern a TrainingJob, with the type each is written as.

Strings only. Invariant: a reason is always of one type, so that `--field-selector type=Warning` means something.
"""

from __future__ import annotations

from enum import StrEnum


class EventReason(StrEnum):
    """One member for each thing that an operator of a cluster would want to be told."""

    WORLD_FORMED = "WorldFormed"
    WORLD_RESIZED = "WorldResized"
    WORKER_LOST = "WorkerLost"
    WORKER_REPLACED = "WorkerReplaced"
    QUORUM_LOST = "QuorumLost"
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    CHECKPOINT_COMMITTED = "CheckpointCommitted"  # a series: one event with a count, not one a commit
    CHECKPOINT_COMMIT_FAILED = "CheckpointCommitFailed"
    CHECKPOINT_CORRUPT = "CheckpointCorrupt"
    RESTORED_FROM_CHECKPOINT = "RestoredFromCheckpoint"
    STRAGGLER_DETECTED = "StragglerDetected"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    SCRIPT_REFUSED = "ScriptRefused"
    JOB_SUSPENDED = "JobSuspended"
    JOB_RESUMED = "JobResumed"
    JOB_COMPLETED = "JobCompleted"
    JOB_FAILED = "JobFailed"


class EventType(StrEnum):
    """Kubernetes' two event types."""

    NORMAL = "Normal"
    WARNING = "Warning"


_NORMAL = frozenset(
    {
        EventReason.WORLD_FORMED,
        EventReason.WORLD_RESIZED,
        EventReason.WORKER_REPLACED,
        EventReason.CHECKPOINT_COMMITTED,
        EventReason.RESTORED_FROM_CHECKPOINT,
        EventReason.JOB_SUSPENDED,
        EventReason.JOB_RESUMED,
        EventReason.JOB_COMPLETED,
    }
)


def event_type(reason: EventReason) -> EventType:
    """The type that an event with this reason has."""
    return EventType.NORMAL if reason in _NORMAL else EventType.WARNING
