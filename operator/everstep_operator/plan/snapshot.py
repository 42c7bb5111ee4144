"""Everything that the planner is allowed to know: one job, its pods, their nodes, and the workers' reports.

Everything here is a value taken at `now` by `controller.observe`. Invariant: every pod in `Snapshot.pods` is owned by
this job's UID; an object that merely has a matching name appears only in `name_collisions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from everstep_operator.api.status import Status
from everstep_operator.api.types import GangScheduler, TrainingJobSpec
from everstep_operator.round_view import RoundView


class PodPhase(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


INIT_RUNS = "init container "  # how `WorkerPod.starting` begins while one runs


@dataclass(frozen=True, slots=True)
class Exit:
    """How the worker container ended, as the kubelet reports it."""

    code: int
    reason: str | None = None  # "OOMKilled", "Error", "ContainerCannotRun", …
    message: str | None = None  # termination message: the last lines of the log
    finished_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class InitFailure:
    """The init container that failed, so that its worker never ran."""

    container: str
    code: int
    reason: str | None = None
    message: str | None = None  # termination message
    finished_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class WorkerPod:
    """One pod of the job, current or left over from an earlier round.

    The worker container decides what became of the worker (`state`). The pod's phase sums all
    of its containers up: a side-car that never ends keeps it Running, and one that fails makes it Failed. So the phase
    counts only where the kubelet gives no end of the worker container, as for a pod that was rejected by its node.
    """

    name: str
    uid: str
    index: int
    incarnation: int
    round: int | None  # of the pod, under c10d; None: its agent joins rounds
    phase: PodPhase  # of the whole pod
    ready: bool = False  # the worker container, whatever its side-cars are
    node: str | None = None
    deleted_at: datetime | None = None  # metadata.deletionTimestamp minus the grace period
    reason: str | None = None  # status.reason: "Evicted", "NodeLost", "UnexpectedAdmissionError", …
    disruption: str | None = None  # reason of a true DisruptionTarget condition
    waiting: str | None = None  # "ErrImagePull: …" while the container cannot start
    unschedulable: str | None = None  # message of PodScheduled=False
    created_at: datetime | None = None
    exit: Exit | None = None
    ready_at: datetime | None = None  # when `ready` became what it is
    message: str | None = None  # status.message: the kubelet's explanation of `reason`
    spec_hash: str | None = None  # of the spec that it was made from; None: an older operator made it
    started_at: datetime | None = None  # when the worker container began to run
    joining: bool = False  # the container runs, and its start-up probe has not succeeded
    starting: str | None = None  # what it waits for before that, without any fault that is known; see `INIT_RUNS`
    init_failure: InitFailure | None = None
    disrupted_at: datetime | None = None  # when `disruption` became true, or the pod's own deadline was over
    scheduled_at: datetime | None = None  # when it was bound to its node

    @property
    def over(self) -> bool:
        """Whether all containers have ended."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @property
    def finished(self) -> bool:
        """Whether the worker has ended; side-cars of its pod may still run."""
        return self.exit is not None or self.over

    @property
    def succeeded(self) -> bool:
        """Whether the worker has ended its work. A program that ends with 0 because its pod was asked to stop has
        not."""
        if self.exit is None:
            return self.phase is PodPhase.SUCCEEDED and not self.stop_was_requested
        return self.exit.code == 0 and self.ended_by_itself

    @property
    def state(self) -> PodPhase:
        """What became of the worker, in the words of a pod's phase."""
        if not self.finished:
            return self.phase
        return PodPhase.SUCCEEDED if self.succeeded else PodPhase.FAILED

    @property
    def running(self) -> bool:
        return self.phase is PodPhase.RUNNING and not self.finished

    @property
    def ended_by_itself(self) -> bool:
        """Whether the worker ended before its pod was asked to stop. The times are whole seconds; in the same second
        the request counts as the earlier one."""
        if self.exit is None:
            return False
        if not self.stop_was_requested:
            return True
        ended, requested = self.exit.finished_at, self._stop_requested_at
        return ended is not None and requested is not None and ended < requested

    @property
    def ended_by_kubelet(self) -> bool:
        """Whether the kubelet ended the pod, or rejected it. It gives a reason to no pod that ended otherwise."""
        return self.phase is PodPhase.FAILED and self.reason not in (None, "NodeLost")

    @property
    def stop_was_requested(self) -> bool:
        return self.deleted_at is not None or self.disruption is not None or self.ended_by_kubelet

    @property
    def _stop_requested_at(self) -> datetime | None:
        """The earlier of the known times; None if the time of a request is not known."""
        disrupted = self.disruption is not None or self.ended_by_kubelet
        if disrupted and self.disrupted_at is None:
            return None
        times = [at for at in (self.deleted_at, self.disrupted_at if disrupted else None) if at is not None]
        return min(times, default=None)


class NodeHealth(StrEnum):
    """The state of a node by its Ready condition."""

    READY = "Ready"
    NOT_READY = "NotReady"  # reported by the kubelet, which is alive
    SILENT = "Silent"  # set by the node controller: the kubelet has not answered for its whole grace period


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node that runs a pod of this job. `changed_at` is when its Ready condition last changed, and `reason` its
    reason. `leaving`: why its pods have to leave soon, such as `is removed by Karpenter`; None if they may stay."""

    name: str
    health: NodeHealth
    changed_at: datetime | None = None
    reason: str = ""
    leaving: str | None = None

    @property
    def ready(self) -> bool:
        return self.health is NodeHealth.READY


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the cluster's nodes and other jobs say that matters to the place of a new pod. It is empty while nothing
    speaks against any node. `able`: the nodes on which the pod could run, and whether each is ready. `faults`: what
    the status of such a node says against it. `accused`: nodes that enough others avoid, and until when."""

    able: Mapping[str, bool] = field(default_factory=dict)
    faults: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    accused: Mapping[str, datetime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReportedPeak:
    """The greatest memory in bytes of a process of the current round, and its rank. `device`: of an accelerator's
    memory."""

    host: int
    rank: int
    device: int | None = None
    device_rank: int | None = None


@dataclass(frozen=True, slots=True)
class ReportedProgress:
    """What the workers of the current round have reported. In memory only: an operator restart starts it empty."""

    round: int = 0
    step: int | None = None  # highest completed step ever seen for this job
    total_steps: int | None = None
    epoch: int | None = None
    step_seconds: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    stepped_at: datetime | None = None  # the last new step was reported
    updated_at: datetime | None = None
    committed_step: int | None = None
    committed_at: datetime | None = None
    skipped_saves: int = 0  # since the job began
    checkpoint_error: str | None = None  # why the last attempt to commit failed
    straggler: str | None = None  # which rank the others wait for, while they do
    straggler_rank: int | None = None
    rehearsed: str | None = None  # the rehearsal of the program, in words
    memory: ReportedPeak | None = None
    checkpoint_damaged: str | None = None  # which commit was stepped over at the last restore, and why
    productive_seconds: float = 0.0
    # The current round's recovery, in the operator's clock:
    lost_at: datetime | None = None  # of the last loss, to the microsecond, where the status keeps seconds
    trained_at: datetime | None = None  # the first rank has completed a step in this round
    started_at: datetime | None = None  # all ranks have reported START
    restored_at: datetime | None = None  # all ranks have restored
    restored_step: int | None = None
    step_before: int | None = None  # the highest completed step when the first report of this round came
    resumed_step: int | None = None  # the last step that was complete when the round began to train
    restore_seconds: float | None = None
    first_step_at: datetime | None = None  # all ranks have completed one step


@dataclass(frozen=True, slots=True)
class DisruptionBudgetView:
    """The job's PodDisruptionBudget. `min_available` is None if it is not a plain number."""

    uid: str
    min_available: int | None


@dataclass(frozen=True, slots=True)
class NetworkPolicyView:
    """The job's NetworkPolicy. `open_ports`: those that it was made for; None if it does not say."""

    uid: str
    open_ports: str | None


@dataclass(frozen=True, slots=True)
class PodGroupView:
    """A PodGroup of the job. `least`: the pods that it asks for; None if it does not say. `made_of`: see
    `render.pod_group`."""

    scheduler: GangScheduler
    uid: str
    least: int | None
    made_of: str | None
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class WorkloadView:
    """A Workload of Kueue that this job owns. `assigned`: for how many pods quota was reserved; None: for none.
    `evicted` and `finished` are reasons of true conditions; None: they are not true."""

    name: str
    uid: str
    version: str
    number: int  # at the end of its name
    queue: str
    count: int  # of the pods that it asks for
    minimum: int | None = None  # of the pods that it may be admitted with
    priority: int = 0
    made_from: str = ""  # see `state.charged`
    assigned: int | None = None
    flavors: tuple[str, ...] = ()  # of the nodes on which quota was reserved
    reclaimable: int = 0  # of `count`: pods that are not needed any more
    admitted: bool = False
    evicted: str | None = None
    evicted_message: str = ""
    finished: str | None = None
    finished_at: datetime | None = None
    created_at: datetime | None = None
    replaces: str | None = None  # name of the smaller one that this one is to replace
    active: bool = True
    deleting: bool = False
    waits: str = ""  # why no quota is reserved, in Kueue's words
    inadmissible: bool = False  # Kueue cannot admit it as things are: there is no such queue, or it is stopped
    pods_ready: bool | None = None  # None: nobody has said it
    conditions: tuple[Mapping[str, Any], ...] = ()  # as they are stored

    @property
    def charged(self) -> int:
        """For how many pods quota is taken. Kueue counts what is reclaimable from `count`, which a partial admission
        does not change."""
        return 0 if self.assigned is None else max(0, min(self.assigned, self.count - self.reclaimable))


@dataclass(frozen=True, slots=True)
class PodChanges:
    """What an admission gives to the pods: by its flavor, and by its admission checks."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class QueueView:
    """What concerns a job of a queue of Kueue. `name` None: its label is gone, and Workloads of it are left."""

    name: str | None
    workloads: tuple[WorkloadView, ...] = ()  # by number
    priority: int = 0
    priority_class: Mapping[str, str] | None = None  # `spec.priorityClassRef` of a Workload
    refusal: str | None = None  # why no Workload can be made
    changes: PodChanges = field(default_factory=PodChanges)  # of the pods of what is admitted
    obstacle: str | None = None  # why no pods can be made for what is admitted
    unread: str | None = None  # why Workloads are not known


@dataclass(frozen=True, slots=True)
class JobView:
    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    spec: TrainingJobSpec
    status: Status
    created_at: datetime
    deleting: bool = False
    migrate: frozenset[str] = frozenset()  # names of pods that a person wants on another node

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def rerun(self) -> int:
        """The value of `spec.rerun` that the present run was begun by. The first run takes the one that it finds."""
        has_begun = self.status.roster is not None or self.status.world.round > 0
        return self.status.rerun if has_begun else max(self.status.rerun, self.spec.rerun)


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's own configuration, as far as a plan depends on it."""

    report_url: str = ""
    checkpoint_url_prefixes: tuple[str, ...] = ()
    # The remaining pods are created in the following passes.
    max_pods_per_plan: int = 200
    network_policies: bool = False  # whether each job gets one
    volume_claims: bool = False  # whether the operator may make them
    pod_groups: frozenset[GangScheduler] = frozenset()  # the schedulers whose groups the operator may make
    ca: str = ""  # PEM of the authorities by which workers verify the operator; empty: those of their image


@dataclass(frozen=True, slots=True)
class Snapshot:
    now: datetime
    job: JobView
    pods: tuple[WorkerPod, ...] = ()
    service_uid: str | None = None  # of the headless service, if it is there and ours
    nodes: dict[str, NodeView] = field(default_factory=dict)
    progress: ReportedProgress = ReportedProgress()
    name_collisions: tuple[str, ...] = ()  # each as `object_names.name_collision` describes it
    create_refused: str | None = None  # the API server's last refusal of a pod create (quota, admission)
    object_refused: str | None = None  # the same of another object that the job needs, with its kind and name
    settings: Settings = Settings()
    world: RoundView | None = None  # None: this operator cannot see the agents' rounds, or there are none
    disruption_budget: DisruptionBudgetView | None = None  # the PodDisruptionBudget, if it is there and ours
    network_policy: NetworkPolicyView | None = None  # if it is there and ours
    pod_groups: tuple[PodGroupView, ...] = ()  # those that are there and ours
    queue: QueueView | None = None  # None: the job waits in none
    ignored_queue: str | None = None  # that the job names, and this operator does not obey
    fleet: Fleet | None = Fleet()  # None: not known, so the exclusions stay as they were

    @property
    def create_obstacle(self) -> str | None:
        """Why the last creates failed; None if they succeeded, or nothing was to be created."""
        return next(iter(self.name_collisions), self.create_refused or self.object_refused)

    answering: frozenset[str] = frozenset()  # UIDs of the pods on nodes that are not ready whose agents answer us
