"""The status of a TrainingJob. Each of its fields is either a counter, or rebuilt from observation.

This module does not know how values are found. Invariants: lists and maps are bounded. Restart state is counters, never
commands. A field derived from another is computed here and never read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from everstep.contract.messages import MAX_METRIC_NAME, MAX_METRICS
from everstep_operator.api.base import Count, Int32, StatusModel, Timestamp
from everstep_operator.api.conditions import Cause, ConditionStatus, ConditionType, Rung, Suspicion
from everstep_operator.api.types import MAX_SPARES

MAX_RECOVERIES = 10
MAX_HISTORY = 10
MAX_WORKERS = 4096
MAX_INCARNATION = 99_999_999  # eight digits of a pod's name
MAX_LOG_LINES = 20
MAX_REJECTED_BY = 8
MAX_LOST_NODES = 16
MAX_SUSPECT_NODES = 16
MAX_EXCLUDED_NODES = 16
MAX_EXCLUSION_REASONS = 8
MAX_EXCLUSION_REASON = 200  # characters
MAX_MISMATCH = 512  # characters of the place where collectives did not match

Workers = Annotated[Int32, Field(ge=0)]
WorkerIndex = Annotated[Int32, Field(ge=0, le=MAX_WORKERS - 1)]
Incarnation = Annotated[Int32, Field(ge=0, le=MAX_INCARNATION)]
LogLine = Annotated[str, StringConstraints(max_length=1000)]
MetricName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_METRIC_NAME)]
NodeName = Annotated[str, StringConstraints(max_length=253)]
MetricText = Annotated[str, StringConstraints(max_length=32)]


def _either(data: Mapping[str, Any], alias: str, name: str) -> Any:
    return data.get(alias, data.get(name))


class World(StatusModel):
    """The agreed membership that trains now."""

    round: Count = Field(
        default=0,
        description="Number of the last published round. It only grows, and fences every join, report and commit.",
    )
    size: Workers = Field(default=0, description="Workers in this round.")
    since: Timestamp | None = Field(default=None, description="When the round was published.")
    formed_at: Timestamp | None = Field(
        default=None, description="When all of its workers were Ready for the first time."
    )
    formed_round: Count | None = Field(
        default=None,
        description="If the agents form rounds: the round that size, since and formedAt describe. A greater `round` is "
        "being formed.",
    )


class WorkerRange(StatusModel):
    """Neighbouring workers in the same incarnation."""

    first: WorkerIndex = Field(description="Index of the first of them.")
    last: WorkerIndex = Field(description="Index of the last of them.")
    incarnation: Incarnation = Field(description="Their incarnation: a pod is named <job>-w<index>-<incarnation>.")
    started: bool = Field(
        default=False,
        description="Whether their pods have been Ready. Then a missing pod is lost; before, it was not created yet.",
    )


class Roster(StatusModel):
    """The workers that should exist, if the agents form rounds. It is published before a pod is created or deleted."""

    wanted: Workers = Field(
        default=0, description="Workers that this roster was made for, without spares; 0 while suspended."
    )
    spares: Workers = Field(default=0, description="Workers beside them that it was made for.")
    surge: Workers = Field(
        default=0, description="Further ones, which take the places of workers that have to leave their nodes."
    )
    leaving: tuple[WorkerIndex, ...] = Field(
        default=(),
        max_length=MAX_WORKERS,
        description="Workers that are asked to leave, because others wait for their places.",
    )
    next_incarnation: Incarnation = Field(
        default=0, description="Incarnation of the next index that is added. It is above all that were taken out."
    )
    workers: tuple[WorkerRange, ...] = Field(
        default=(), max_length=MAX_WORKERS, description="The workers, each with its incarnation."
    )


class Spares(StatusModel):
    """The workers that wait to take the place of a lost one. Which ones they are changes with each loss."""

    wanted: Workers = Field(default=0, description="How many the job should have: spec.elastic.spares.")
    ready: Workers = Field(default=0, description="How many wait now, with their programs loaded.")
    workers: tuple[WorkerIndex, ...] = Field(
        default=(), max_length=MAX_SPARES, description="The indices of those that wait."
    )


class PeakMemory(StatusModel):
    """The most memory that a training process has held at once: that of the rank that has held the most."""

    bytes: Count = Field(default=0, description="RAM, as resident set size. Loader workers are not in it.")
    rank: Count = Field(default=0, description="The rank that held it.")
    device_bytes: Count | None = Field(
        default=None, description="Memory of an accelerator in tensors, as torch counts it."
    )
    device_rank: Count | None = Field(default=None, description="The rank that held that.")


class Progress(StatusModel):
    """The progress of the training, as its processes last reported it. While they run it is at most a few seconds
    old."""

    step: Count | None = Field(default=None, description="Highest completed optimizer step.")
    total_steps: Count | None = Field(default=None, description="Steps the script will take, if it reported them.")
    epoch: Count | None = Field(default=None, description="Epoch of that step, if the script reported it.")
    eta_seconds: Count | None = Field(default=None, description="Seconds to the last step at the present rate.")
    metrics: dict[MetricName, MetricText] = Field(
        default_factory=dict,
        max_length=MAX_METRICS,
        description="The script's own figures, as text so that no precision is lost.",
    )
    straggler: Annotated[str, StringConstraints(max_length=1024)] | None = Field(
        default=None, description="The rank that the others wait for in each step, with its time. It is only reported."
    )
    rehearsed: Annotated[str, StringConstraints(max_length=1024)] | None = Field(
        default=None,
        description="When the program that runs was rehearsed, with how many ranks and steps, if `everstep rehearse` "
        "has left a stamp of it. It is only reported.",
    )
    memory: PeakMemory | None = Field(
        default=None, description="The greatest peak of memory of a training process in this round."
    )
    stepped_at: Timestamp | None = Field(
        default=None, description="When the last new step was reported. Steps that are taken again are not new."
    )
    updated_at: Timestamp | None = Field(default=None, description="When the newest of these figures was reported.")


class CheckpointStatus(StatusModel):
    """The newest commit that the workers reported. The commit log itself is the source of truth."""

    last_committed_step: Count | None = Field(default=None, description="Step of the newest commit.")
    committed_at: Timestamp | None = Field(default=None, description="When it was committed.")
    url: Annotated[str, StringConstraints(max_length=1024)] | None = Field(
        default=None, description="Where the commits are: spec.checkpoint.url."
    )
    healthy: bool | None = Field(default=None, description="False if the last attempt to commit failed.")
    skipped_saves: Count = Field(
        default=0,
        description="Saves that were due while the one before was still being written, because the store is slower "
        "than the interval. A skipped save loses nothing.",
    )


class LostNode(StatusModel):
    """A node that was lost with workers of this job."""

    name: NodeName = Field(description="Name of the node.")
    times: Count = Field(description="How often, at most half an hour apart.")
    at: Timestamp = Field(description="When it was last lost.")


class SuspectNode(StatusModel):
    """A node that something speaks against."""

    name: NodeName = Field(description="Name of the node.")
    points: Count = Field(description="What speaks against it, when it was last charged. Halved each hour.")
    at: Timestamp = Field(description="When it was last charged.")
    excluded: bool = Field(
        default=False,
        description="Whether it had 100 points. New pods avoid it until it has 50; `excludedNodes` says when.",
    )
    reasons: tuple[Suspicion, ...] = Field(
        default=(), max_length=len(Suspicion), description="What it was charged for, the newest first."
    )


class ExcludedNode(StatusModel):
    """A node that new pods of this job avoid."""

    name: NodeName = Field(description="Name of the node.")
    until: Timestamp | None = Field(
        default=None, description="Until when. Absent: as long as the node's own status names the fault."
    )
    reasons: tuple[Annotated[str, StringConstraints(max_length=MAX_EXCLUSION_REASON)], ...] = Field(
        default=(), max_length=MAX_EXCLUSION_REASONS, description="Why, each in a few words."
    )


class Restarts(StatusModel):
    """Restarts so far by cause, and the counters by which the restart budget is judged."""

    user_code: Count = Field(
        default=0, description="Failures of the program itself: charged to spec.recovery.maxRestarts."
    )
    infrastructure: Count = Field(default=0, description="Lost nodes, pods and processes: never charged.")
    preemption: Count = Field(default=0, description="Evictions and preemptions: never charged.")
    total: Count = Field(default=0, description="Sum of the three, for the RESTARTS column. Derived.")
    window_started_at: Timestamp | None = Field(
        default=None, description="Start of the current spec.recovery.restartWindowSeconds window."
    )
    in_window: Count = Field(default=0, description="Charged restarts in the current window.")
    without_progress: Count = Field(default=0, description="Restarts in a row that brought no new step.")
    start_failures: Count = Field(
        default=0, description="Failed starts of a program that has never run, such as one without its script."
    )
    unstarted: Count = Field(
        default=0,
        description="Restarts after losses of workers whose container had not begun to run: rejected, evicted or "
        "deleted before. They do not show that the program has ever run.",
    )
    start_timeouts: Count = Field(
        default=0, description="Times in a row that workers did not start in time: never charged."
    )
    mismatch: Annotated[str, StringConstraints(max_length=MAX_MISMATCH)] | None = Field(
        default=None,
        description="Where the ranks' collectives did not match, at the last restart for that reason. The same again, "
        "without a new step in between, ends the job.",
    )
    last_step: Count | None = Field(
        default=None, description="Highest completed step when the last restart was decided."
    )
    last_at: Timestamp | None = Field(
        default=None, description="When the last charged restart was decided; the back-off runs from it."
    )
    incident_at: Timestamp | None = Field(
        default=None,
        description="When the last incident began, if workers are replaced one by one. A loss soon after it counts as "
        "part of it, if the worker existed before.",
    )
    rejections: Count = Field(
        default=0, description="Times in a row that nodes rejected pods of this job: never charged."
    )
    rejected_at: Timestamp | None = Field(
        default=None, description="When a pod was last rejected; the back-off after rejections runs from it."
    )
    rejected_by: tuple[NodeName, ...] = Field(
        default=(),
        max_length=MAX_REJECTED_BY,
        description="Nodes that rejected pods, or did not start them in time, the last one first. For half an hour new "
        "pods prefer other nodes.",
    )
    lost_nodes: tuple[LostNode, ...] = Field(
        default=(),
        max_length=MAX_LOST_NODES,
        description="Nodes that were lost with workers in the last half hour, the last one first. New pods prefer "
        "other nodes, and an elastic job grows by workers on such a node only when it has been ready for a minute, "
        "twice as long after each further loss.",
    )
    suspect_nodes: tuple[SuspectNode, ...] = Field(
        default=(),
        max_length=MAX_SUSPECT_NODES,
        description="Nodes that losses of this job speak against, the last one first. They are kept when the job is "
        "run again.",
    )
    spare_failures: Count = Field(
        default=0, description="Times in a row that the programs of spares failed while all workers trained: no charge."
    )
    spare_failed_at: Timestamp | None = Field(
        default=None, description="When one last failed; the back-off before the next spare runs from it."
    )

    @model_validator(mode="before")
    @classmethod
    def _sum(cls, data: Any) -> Any:
        """The total is always computed: otherwise one that somebody edited would stay wrong."""
        if not isinstance(data, Mapping):
            return data
        parts = [_either(data, "userCode", "user_code"), data.get("infrastructure"), data.get("preemption")]
        return {**data, "total": sum(part for part in parts if isinstance(part, int))}


class RecoveryRecord(StatusModel):
    """One recovery: what was lost and where, how the training was brought back, and how long each part took."""

    at: Timestamp = Field(description="When the loss was noticed.")
    cause: Cause = Field(description="Why the worker was lost.")
    worker: Count | None = Field(default=None, description="Index of the worker that was lost first.")
    node: Annotated[str, StringConstraints(max_length=253)] | None = Field(default=None, description="Node it ran on.")
    rung: Annotated[str, StringConstraints(max_length=32)] = Field(
        description=f"Step of the recovery ladder: {', '.join(Rung)}."
    )
    step: Count | None = Field(default=None, description="Highest completed step when it was noticed.")
    detect_ms: Count | None = Field(
        default=None,
        description="Milliseconds from the fault until it was noticed, if known; at least so many, because Kubernetes "
        "gives whole seconds. The parts add up to the time from the fault to the next step of every rank.",
    )
    rendezvous_ms: Count | None = Field(default=None, description="Milliseconds from the notice to the new round.")
    restore_ms: Count | None = Field(default=None, description="Milliseconds that reading the training state took.")
    first_step_ms: Count | None = Field(
        default=None, description="Milliseconds from the restored state to the next step."
    )
    lost_steps: Count | None = Field(default=None, description="Optimizer steps that had to be taken again.")


class StateSeconds(StatusModel):
    """Seconds of the job's active life by what it did, for the metric `everstep_job_seconds_total`."""

    productive: Count = Field(default=0, description="It took new steps.")
    replay: Count = Field(default=0, description="It took steps again after a loss.")
    detect: Count = Field(default=0, description="From a fault until it was noticed.")
    form: Count = Field(default=0, description="Enough workers ran, and had no world that trained.")
    restore: Count = Field(default=0, description="It read the training state.")
    wait: Count = Field(default=0, description="Too few workers ran: capacity, images, start-up, back-off.")
    unknown: Count = Field(default=0, description="Its script reported nothing, or an older operator saw to it.")


class Failure(StatusModel):
    """The first root cause of a failed job. Later failures do not replace it."""

    cause: Cause = Field(description="Why the worker was lost.")
    message: Annotated[str, StringConstraints(max_length=1024)] = Field(description="One sentence for a person.")
    at: Timestamp | None = Field(default=None, description="When it was noticed.")
    worker: Count | None = Field(default=None, description="Index of the worker.")
    pod: Annotated[str, StringConstraints(max_length=253)] | None = Field(default=None, description="Name of its pod.")
    node: Annotated[str, StringConstraints(max_length=253)] | None = Field(default=None, description="Node it ran on.")
    exit_code: Annotated[int, Field(ge=0, le=255)] | None = Field(
        default=None, description="Exit code of the worker container; 128 + n when signal n ended it."
    )
    log_lines: tuple[LogLine, ...] = Field(
        default=(), max_length=MAX_LOG_LINES, description="Last lines of its log, redacted by the agent."
    )


class EarlierRun(StatusModel):
    """One run of a job that was run again since."""

    rerun: Count = Field(default=0, description="The value of spec.rerun that it was begun by.")
    outcome: Annotated[str, StringConstraints(max_length=64)] = Field(
        description="Complete, or the reason of the condition Failed."
    )
    message: Annotated[str, StringConstraints(max_length=256)] = Field(default="", description="What its end said.")
    started_at: Timestamp | None = Field(
        default=None, description="Since when it wanted workers; if it was suspended, since the last resume."
    )
    ended_at: Timestamp | None = Field(default=None, description="When it became Complete or Failed.")
    active_seconds: Count = Field(default=0, description="Seconds for which it wanted workers.")
    step: Count | None = Field(default=None, description="Its highest completed step.")
    committed_step: Count | None = Field(default=None, description="Step of its newest commit.")
    restarts: Count = Field(default=0, description="How often workers of it were restarted, for any reason.")


class Condition(StatusModel):
    """A condition as in metav1.Condition."""

    type: ConditionType = Field(description="Name of the condition.")
    status: ConditionStatus = Field(description="True, False or Unknown.")
    reason: Annotated[str, StringConstraints(min_length=1, max_length=64)] = Field(
        description="One word for programs; for Ready it is the STATUS column."
    )
    message: Annotated[str, StringConstraints(max_length=1024)] = Field(
        default="", description="A sentence for people."
    )
    last_transition_time: Timestamp = Field(description="When `status` last changed.")
    observed_generation: Count | None = Field(default=None, description="metadata.generation that this was judged by.")


class Status(StatusModel):
    """The operator's findings. A pass writes them in one patch, and only if they changed."""

    observed_generation: Count | None = Field(default=None, description="Newest metadata.generation that was acted on.")
    replicas: Workers = Field(
        default=0,
        description="Workers that have a pod, without spares (scale subresource); 0 once the job is finished.",
    )
    ready_replicas: Workers = Field(default=0, description="Worker pods that are Ready, without spares.")
    spares: Spares | None = Field(default=None, description="The spares. Absent: the job has none.")
    selector: Annotated[str, StringConstraints(max_length=512)] = Field(
        default="", description="Label selector of the worker pods, as text (scale subresource)."
    )
    start_time: Timestamp | None = Field(
        default=None,
        description="Since when the job wants workers; spec.activeDeadlineSeconds runs from it. Absent while the job "
        "is suspended, and set anew when it is resumed.",
    )
    earlier_active_seconds: Count = Field(
        default=0,
        description="Seconds for which the job wanted workers before startTime, also in earlier runs, without those "
        "for which it was suspended. goodputPercent counts them.",
    )
    completion_time: Timestamp | None = Field(
        default=None, description="When it became Complete or Failed; spec.ttlSecondsAfterFinished runs from it."
    )
    refused_since: Timestamp | None = Field(
        default=None,
        description="Since when a worker of the present roster cannot be created: the API server refuses an object, "
        "or its name is taken. spec.recovery.startTimeoutSeconds runs from it. Absent: no worker waits for that.",
    )
    rerun: Count = Field(
        default=0, description="The value of spec.rerun that the present run was begun by: a higher one begins another."
    )
    history: tuple[EarlierRun, ...] = Field(
        default=(), max_length=MAX_HISTORY, description="The runs before this one, newest first: the last ten."
    )
    world: World = Field(default=World(), description="The membership that trains now.")
    roster: Roster | None = Field(
        default=None,
        description="The workers that should exist. Absent with backend c10d: `world` is the roster there.",
    )
    progress: Progress = Field(default=Progress(), description="Progress of the training.")
    checkpoint: CheckpointStatus = Field(default=CheckpointStatus(), description="The newest known commit.")
    restarts: Restarts = Field(default=Restarts(), description="Restarts so far, and the restart budget's counters.")
    excluded_nodes: tuple[ExcludedNode, ...] = Field(
        default=(),
        max_length=MAX_EXCLUDED_NODES,
        description="Nodes on which new pods are placed only if no other has room, by what this job and others have "
        "met there, and by what the nodes' own status says.",
    )
    recoveries: tuple[RecoveryRecord, ...] = Field(
        default=(), max_length=MAX_RECOVERIES, description="The last recoveries, newest first."
    )
    goodput_percent: Annotated[int, Field(ge=0, le=100)] | None = Field(
        default=None,
        description="The time of new steps, with what the script does between them (stateSeconds.productive), as a "
        "share of the time that the job was not suspended, in percent.",
    )
    goodput: Annotated[str, StringConstraints(max_length=5)] | None = Field(
        default=None,
        description="goodputPercent with its sign, for the GOODPUT column, which can only print a field. Derived.",
    )
    state_seconds: StateSeconds | None = Field(
        default=None,
        description="Where the job's time went until this status was written. A new leader counts on from here.",
    )
    failure: Failure | None = Field(
        default=None,
        description="The first root cause of a failed job. Absent if no worker was lost, for example at the deadline: "
        "the condition Failed says why.",
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=len(ConditionType),
        description="Conditions, at most one of each type.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )

    @model_validator(mode="before")
    @classmethod
    def _print_goodput(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        percent = _either(data, "goodputPercent", "goodput_percent")
        return {**data, "goodput": None if percent is None else f"{percent}%"}

    def active_seconds(self, now: datetime) -> float:
        """Seconds for which the job has wanted workers until `now`."""
        present = 0.0 if self.start_time is None else max(0.0, (now - self.start_time).total_seconds())
        return self.earlier_active_seconds + present

    def condition(self, type_: ConditionType) -> Condition | None:
        """The condition of this type, if it was ever set."""
        return next((c for c in self.conditions if c.type == type_), None)

    def holds(self, type_: ConditionType) -> bool:
        """Whether the condition of this type is true."""
        condition = self.condition(type_)
        return condition is not None and condition.status is ConditionStatus.TRUE
