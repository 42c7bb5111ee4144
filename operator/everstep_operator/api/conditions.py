"""The vocabulary of a TrainingJob's status: condition types, reasons of Ready, and causes of a loss.

This module has only strings. They are part of the API: scripts wait on them, so a member is never renamed.
"""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Types in `status.conditions`. Ready, Reconciling and Stalled follow kstatus, which Argo, Flux and Helm read."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
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


FAILED_MEANINGS: dict[FailedReason, str] = {
    FailedReason.SCRIPT_REFUSED: "The script was [refused](session-refusals.md) (`LoopError`, "
    "`StateMismatch` and others) in one of its first four steps, or before, and the job had not trained. The message "
    "says what to write instead, and where. No restart is tried or charged, because the same script would be refused "
    "again. Or the ranks' collectives did not match, the same had happened before the last restart, and no step was "
    "new since. A rule of `spec.recovery.rules` that matches goes first.",
    FailedReason.CANNOT_START: "The program failed `spec.recovery.noProgressLimit` times and never ran: there is no "
    "such script or module, or its arguments are wrong.",
    FailedReason.RESTART_BUDGET_EXHAUSTED: "The program failed more often than `spec.recovery.maxRestarts` allows.",
    FailedReason.NO_PROGRESS: "Workers were lost `spec.recovery.noProgressLimit` times in a row without one new step.",
    FailedReason.FAILED_BY_RULE: "A rule of `spec.recovery.rules` says `Fail`.",
    FailedReason.CHECKPOINT_STORE_UNUSABLE: "The checkpoint store cannot be used, and trying again cannot help.",
    FailedReason.START_TIMED_OUT: "Workers did not start within `spec.recovery.startTimeoutSeconds`, "
    "`spec.recovery.noProgressLimit` times in a row, and too few others trained. The message says what the last one "
    "waited for.",
    FailedReason.RENDEZVOUS_CLOSED: "The agents gave the job up.",
    FailedReason.DEADLINE_EXCEEDED: "`spec.activeDeadlineSeconds` is over.",
}


class Rung(StrEnum):
    """How the operator brought the training back. Recoveries that the agents make alone are not in the status."""

    RECREATE = "recreate"  # with the lost worker replaced
    SHRINK = "shrink"  # with fewer workers
    REGROW = "regrow"  # to the full size, after a shrink


class Cause(StrEnum):
    """Why a worker was lost. `spec.recovery.rules[].onReasons` matches these words and recoveries report them."""

    ERROR = "Error"  # the program ended with a non-zero exit code
    OOM_KILLED = "OOMKilled"  # the kernel killed a container that passed its memory limit
    SIGNALED = "Signaled"  # ended by a signal that nobody declared (SIGKILL, SIGSEGV, ...)
    PEER_LOST = "PeerLost"  # another worker went first and took this one's collective with it
    EVICTED = "Evicted"  # the kubelet evicted the pod: node pressure
    DISRUPTION_TARGET = "DisruptionTarget"  # eviction API, preemption, drain, taint manager
    NODE_LOST = "NodeLost"  # the node is gone or silent
    POD_DELETED = "PodDeleted"  # somebody deleted the pod
    DEADLINE_EXCEEDED = "DeadlineExceeded"  # the pod outlived its template's own activeDeadlineSeconds
    START_FAILED = "StartFailed"  # the container never ran: image, configuration or volume
    START_TIMEOUT = "StartTimeout"  # its container did not run within spec.recovery.startTimeoutSeconds
    REJECTED = "Rejected"  # the node's kubelet did not let the pod run: devices, resources, affinity, a shutdown
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"  # no round formed within joinTimeoutSeconds
    PEER_MISSING = "PeerMissing"  # it waited joinTimeoutSeconds for a worker that could not run (no node, quota, ...)
    PREEMPTED = "Preempted"  # asked to stop (SIGTERM), it committed its state and left; so did its peers
    FENCED = "Fenced"  # a newer round owns the training state
    STORE_UNUSABLE = "StoreUnusable"  # the checkpoint store cannot be used; repeating cannot help
