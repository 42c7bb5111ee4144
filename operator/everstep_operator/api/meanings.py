"""What each word of a TrainingJob's status and events means, for the reference page.

Invariant: each member of an enumeration has a meaning; a test looks for those that are missing.
"""

from __future__ import annotations

from everstep_operator.api.conditions import Cause, ConditionType, FailedReason, ReadyReason, Rung
from everstep_operator.api.events import EventReason

CONDITIONS: dict[ConditionType, str] = {
    ConditionType.READY: "The workers train, all or enough of them, or the training is done.",
    ConditionType.RECONCILING: "The operator, or the workers, still change something.",
    ConditionType.STALLED: "The job stands still: it waits for a person, or has failed. The message says for what, or "
    "why.",
    ConditionType.NEEDS_ATTENTION: "Something waits for a person, also while the job trains: the message says what. "
    "There is none of this type before the first time.",
    ConditionType.SUSPENDED: "`spec.suspend` is true, and the operator has seen it.",
    ConditionType.COMPLETE: "The training is done.",
    ConditionType.FAILED: "The job ended without success.",
    ConditionType.QUORUM_REACHED: "Enough workers are there to train.",
    ConditionType.RESIZING: "The number of workers changes.",
    ConditionType.RECOVERING: "A recovery is under way.",
    ConditionType.CHECKPOINT_HEALTHY: "The last commit succeeded. There is none of this type before the first report "
    "about a commit.",
}

READY: dict[ReadyReason, str] = {
    ReadyReason.PENDING: "No worker is ready yet.",
    ReadyReason.WAITING_FOR_QUORUM: "Fewer workers are ready than the job needs to train.",
    ReadyReason.RUNNING: "All workers train.",
    ReadyReason.RUNNING_DEGRADED: "Enough workers train, and fewer than the job should have.",
    ReadyReason.RESIZING: "The number of workers changes, because the spec did.",
    ReadyReason.UPDATING: "Workers are replaced, because their template changed.",
    ReadyReason.RECOVERING: "Workers were lost, and no step was reported since.",
    ReadyReason.SUSPENDED: "`spec.suspend` is true: the workers have left, or are leaving.",
    ReadyReason.QUEUED: "The job waits for quota of its queue, or its workers leave because the queue takes it back.",
    ReadyReason.COMPLETE: "The training is done.",
    ReadyReason.FAILED: "The job ended without success; the condition `Failed` says why.",
}

FAILED: dict[FailedReason, str] = {
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

RUNGS: dict[Rung, str] = {
    Rung.RECREATE: "The lost worker was replaced.",
    Rung.RESTART: "A training process was killed, or hung; its agent started another in the same pod.",
    Rung.SPARE: "A spare took the place of the lost worker.",
    Rung.SHRINK: "Of an elastic job: the training resumed with fewer workers.",
    Rung.REGROW: "Of an elastic job: it has its full size again, after a shrink.",
    Rung.MIGRATE: "Nothing was lost: another worker took the place of one that had to leave its node.",
}

CAUSES: dict[Cause, str] = {
    Cause.ERROR: "The program ended with a non-zero exit code.",
    Cause.OOM_KILLED: "The kernel killed a container that passed its memory limit.",
    Cause.SIGNALED: "The program was ended by a signal that nobody announced (SIGKILL, SIGSEGV, …).",
    Cause.PEER_LOST: "Another worker was lost first, and this one's collective failed by that.",
    Cause.EVICTED: "The kubelet evicted the pod: node pressure.",
    Cause.DISRUPTION_TARGET: "The pod was evicted through the API (a drain), preempted, or its node got a taint.",
    Cause.NODE_LOST: "The node is gone or silent.",
    Cause.POD_DELETED: "Somebody deleted the pod.",
    Cause.DEADLINE_EXCEEDED: "The pod ran longer than its template's own `activeDeadlineSeconds`.",
    Cause.START_FAILED: "The container never ran: image, configuration or volume.",
    Cause.START_TIMEOUT: "The container did not run within `spec.recovery.startTimeoutSeconds`.",
    Cause.REJECTED: "The node's kubelet did not let the pod run: devices, resources, affinity, a shutdown.",
    Cause.RENDEZVOUS_TIMEOUT: "No round formed within `spec.rendezvous.joinTimeoutSeconds`.",
    Cause.PEER_MISSING: "It waited `joinTimeoutSeconds` for a worker that could not run (no node, quota, …).",
    Cause.PREEMPTED: "It was asked to stop (SIGTERM), committed its state and left; so did its peers.",
    Cause.FENCED: "A newer round owns the training state.",
    Cause.STORE_UNUSABLE: "The checkpoint store cannot be used, and trying again cannot help.",
}

EVENTS: dict[EventReason, str] = {
    EventReason.WORLD_FORMED: "A round formed: its number and its workers.",
    EventReason.WORLD_RESIZED: "The number of workers changed: by the spec, or after a loss, with fewer.",
    EventReason.WORKER_LOST: "Workers were lost, or a process of one: which ones, where, by what cause, and what "
    "follows.",
    EventReason.WORKER_REPLACED: "A recovery ended: the world has its workers again.",
    EventReason.WORKER_MIGRATED: (
        "Another worker has taken the place of one that had to leave its node: why, from which node, how long it took."
    ),
    EventReason.SPARE_LOST: "Spares were lost: which ones, where, by what cause. All workers train.",
    EventReason.WORKERS_UPDATED: "Workers are replaced, because their template changed.",
    EventReason.QUORUM_LOST: "Of an elastic job: fewer workers are left than `minReplicas`.",
    EventReason.INSUFFICIENT_CAPACITY: "Workers are not scheduled: the scheduler's reason.",
    EventReason.WORKER_WAITS: "A worker does not start: image, init container, volume, quota, scheduling gate.",
    EventReason.NAME_TAKEN: "An object of the job's has a name that another object has already.",
    EventReason.CREATE_REFUSED: "An object beside the pods cannot be made: quota, admission, rights.",
    EventReason.CHECKPOINT_COMMITTED: "A commit was made. It is a series: one event in ten minutes, with a count.",
    EventReason.CHECKPOINT_COMMIT_FAILED: "A commit failed; the training goes on.",
    EventReason.CHECKPOINT_CORRUPT: "A commit was found damaged.",
    EventReason.RESTORED_FROM_CHECKPOINT: "The training state was read from a commit: its step.",
    EventReason.NODE_EXCLUDED: "New pods avoid a node: why, and until when.",
    EventReason.STRAGGLER_DETECTED: "A rank is slower than the others, and they wait for it.",
    EventReason.RESTART_BUDGET_EXHAUSTED: "The job failed: more failures than `spec.recovery.maxRestarts`.",
    EventReason.SCRIPT_REFUSED: "The job failed: the script was refused, and a restart would be refused again.",
    EventReason.JOB_SUSPENDED: "The operator has seen `spec.suspend: true`; the workers leave.",
    EventReason.JOB_RESUMED: "The operator has seen that the job is no longer suspended.",
    EventReason.JOB_QUEUED: "The job waits for quota of its queue.",
    EventReason.JOB_ADMITTED: "The job has quota of its queue: for how many pods.",
    EventReason.JOB_EVICTED: "The queue takes the job's quota back: why. The workers save and leave.",
    EventReason.QUEUE_IGNORED: "The job names a queue of Kueue, and this operator obeys none: it runs without quota.",
    EventReason.JOB_RERUN: "A finished job begins anew, because `spec.rerun` was raised.",
    EventReason.JOB_COMPLETED: "The training is done.",
    EventReason.JOB_FAILED: "The job failed for another reason: the condition `Failed` has it.",
    EventReason.EDIT_WITHOUT_EFFECT: "A finished job was edited, and no field that still has an effect; or "
    "`spec.rerun` is a value that was acted on already.",
}
