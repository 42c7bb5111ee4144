"""The vocabulary of a TrainingJob's status: condition types, reasons of Ready, and causes of a loss.

This module has only strings; `meanings` says what each of them means. They are part of the API: scripts wait on them,
so a member is never renamed.
"""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Types in `status.conditions`. Ready, Reconciling and Stalled follow kstatus, which Argo, Flux and Helm read."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    NEEDS_ATTENTION = "NeedsAttention"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    QUORUM_REACHED = "QuorumReached"
    RESIZING = "Resizing"
    RECOVERING = "Recovering"
    CHECKPOINT_HEALTHY = "CheckpointHealthy"


class ConditionStatus(StrEnum):
    """Kubernetes' three values of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ReadyReason(StrEnum):
    """Reasons of the Ready condition, shown as the STATUS column. There is no phase field."""

    PENDING = "Pending"
    WAITING_FOR_QUORUM = "WaitingForQuorum"
    RUNNING = "Running"
    RUNNING_DEGRADED = "RunningDegraded"
    RESIZING = "Resizing"
    UPDATING = "Updating"
    RECOVERING = "Recovering"
    SUSPENDED = "Suspended"
    QUEUED = "Queued"
    COMPLETE = "Complete"
    FAILED = "Failed"


class FailedReason(StrEnum):
    """Reasons of the Failed condition while it is true: why the job ended. `status.failure.message` begins with it."""

    SCRIPT_REFUSED = "ScriptRefused"
    CANNOT_START = "CannotStart"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    NO_PROGRESS = "NoProgress"
    FAILED_BY_RULE = "FailedByRule"
    CHECKPOINT_STORE_UNUSABLE = "CheckpointStoreUnusable"
    START_TIMED_OUT = "StartTimedOut"
    RENDEZVOUS_CLOSED = "RendezvousClosed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"


class Rung(StrEnum):
    """How the training was brought back: `RESTART` by an agent alone, the others by the operator."""

    RECREATE = "recreate"
    RESTART = "restart"
    SPARE = "spare"
    SHRINK = "shrink"
    REGROW = "regrow"
    MIGRATE = "migrate"


class Cause(StrEnum):
    """Why a worker was lost. `spec.recovery.rules[].onReasons` matches these words and recoveries report them."""

    ERROR = "Error"
    OOM_KILLED = "OOMKilled"
    SIGNALED = "Signaled"
    PEER_LOST = "PeerLost"
    EVICTED = "Evicted"
    DISRUPTION_TARGET = "DisruptionTarget"
    NODE_LOST = "NodeLost"
    POD_DELETED = "PodDeleted"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    START_FAILED = "StartFailed"
    START_TIMEOUT = "StartTimeout"
    REJECTED = "Rejected"
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    PEER_MISSING = "PeerMissing"
    PREEMPTED = "Preempted"
    FENCED = "Fenced"
    STORE_UNUSABLE = "StoreUnusable"


class Suspicion(StrEnum):
    """What speaks against a node: a loss that the script cannot have caused, or what its workers report."""

    NODE_LOST = "NodeLost"
    REJECTED = "Rejected"
    START_TIMEOUT = "StartTimeout"
    HARDWARE_ERROR = "HardwareError"
    SLOW_RANK = "SlowRank"
    HANG = "Hang"
