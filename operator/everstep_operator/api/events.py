"""The reasons of a TrainingJob's Kubernetes events, and the type of each.

This module has only strings; `meanings` says what each of them means. Invariant: a reason always has the same type, so
that `--field-selector type=Warning` is useful.
"""

from __future__ import annotations

from enum import StrEnum


class EventReason(StrEnum):
    """One member for each kind of event that the people who run a cluster need to see."""

    WORLD_FORMED = "WorldFormed"
    WORLD_RESIZED = "WorldResized"
    WORKER_LOST = "WorkerLost"
    WORKER_REPLACED = "WorkerReplaced"
    WORKER_MIGRATED = "WorkerMigrated"
    SPARE_LOST = "SpareLost"
    WORKERS_UPDATED = "WorkersUpdated"
    QUORUM_LOST = "QuorumLost"
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    WORKER_WAITS = "WorkerWaits"
    NAME_TAKEN = "NameTaken"
    CREATE_REFUSED = "CreateRefused"
    CHECKPOINT_COMMITTED = "CheckpointCommitted"
    CHECKPOINT_COMMIT_FAILED = "CheckpointCommitFailed"
    CHECKPOINT_CORRUPT = "CheckpointCorrupt"
    RESTORED_FROM_CHECKPOINT = "RestoredFromCheckpoint"
    NODE_EXCLUDED = "NodeExcluded"
    STRAGGLER_DETECTED = "StragglerDetected"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    SCRIPT_REFUSED = "ScriptRefused"
    JOB_SUSPENDED = "JobSuspended"
    JOB_RESUMED = "JobResumed"
    JOB_QUEUED = "JobQueued"
    JOB_ADMITTED = "JobAdmitted"
    JOB_EVICTED = "JobEvicted"
    QUEUE_IGNORED = "QueueIgnored"
    JOB_RERUN = "JobRerun"
    JOB_COMPLETED = "JobCompleted"
    JOB_FAILED = "JobFailed"
    EDIT_WITHOUT_EFFECT = "EditWithoutEffect"


class EventType(StrEnum):
    """Kubernetes' two event types."""

    NORMAL = "Normal"
    WARNING = "Warning"


_NORMAL = frozenset(
    {
        EventReason.WORLD_FORMED,
        EventReason.WORLD_RESIZED,
        EventReason.WORKER_REPLACED,
        EventReason.WORKER_MIGRATED,
        EventReason.WORKERS_UPDATED,
        EventReason.CHECKPOINT_COMMITTED,
        EventReason.RESTORED_FROM_CHECKPOINT,
        EventReason.JOB_SUSPENDED,
        EventReason.JOB_RESUMED,
        EventReason.JOB_QUEUED,
        EventReason.JOB_ADMITTED,
        EventReason.JOB_RERUN,
        EventReason.JOB_COMPLETED,
    }
)


def event_type(reason: EventReason) -> EventType:
    """The type that an event with this reason has."""
    return EventType.NORMAL if reason in _NORMAL else EventType.WARNING
