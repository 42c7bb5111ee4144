"""The spec of a TrainingJob: fields, units, bounds, defaults, and checks across fields.

The CRD and the reference page are generated from it. It does not know what a field does. Invariants: this module and
the CRD accept the same specs. Every string, list and number has an upper bound, which also keeps the CEL rules within
the API server's cost budget.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, WithJsonSchema, field_validator, model_validator

from everstep.contract.labels import WORKER_CONTAINER
from everstep_operator.api import devices
from everstep_operator.api.base import ApiModel, Bool, Check, FieldError, Int32, ObjectName, section
from everstep_operator.api.claims import ClaimRetention, ClaimTemplate
from everstep_operator.api.recovery import YEAR, HangMode, Recovery
from everstep_operator.api.template import TEMPLATE_CHECKS, TEMPLATE_SCHEMA, require_bounded, worker_container

MAX_REPLICAS = 4096
MAX_PROCESSES = 64
MAX_SPARES = 64
# Pods are named <job>-w<index>-<incarnation>: 48 + 2 + 4 digits + 1 + 8 digits are the 63 characters of a host name.
MAX_NAME = 48
DEFAULT_EVERY_SECONDS = 600
AUTO: Literal["auto"] = "auto"


class RendezvousBackend(StrEnum):
    """Where agents agree on the membership."""

    EVERSTEP = "everstep"
    ETCD = "etcd"
    C10D = "c10d"


class PodCleanup(StrEnum):
    """The pods that a finished job deletes."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class SuccessPolicy(StrEnum):
    """The workers that have to succeed before the job is complete."""

    ALL_WORKERS = "AllWorkers"
    WORKER_0 = "Worker0"


class GangScheduler(StrEnum):
    """The scheduler that places the workers of a job together or not at all."""

    KUBERNETES = "Kubernetes"
    COSCHEDULING = "Coscheduling"
    VOLCANO = "Volcano"


class SecretRef(ApiModel):
    """A Secret in the job's namespace."""

    name: ObjectName = Field(description="Name of the Secret.")


Replicas = Annotated[Int32, Field(ge=1, le=MAX_REPLICAS)]
# The generated CRD and the parser accept only these two spellings.
Processes = Annotated[
    Annotated[Int32, Field(ge=1, le=MAX_PROCESSES)] | Literal["auto"],
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "x-kubernetes-validations": [
                {
                    "rule": f"type(self) == int ? self >= 1 && self <= {MAX_PROCESSES} : self == 'auto'",
                    "message": f"spec.processesPerReplica must be a whole number from 1 to {MAX_PROCESSES}, or 'auto'",
                }
            ],
        }
    ),
]


class Elastic(ApiModel):
    """The sizes at which the job may run. Absent: a fixed size; the job waits for all of its workers."""

    min_replicas: Replicas = Field(description="Workers below which the job waits (QuorumLost) and never runs.")
    max_replicas: Replicas = Field(description="Workers above which it never grows.")
    sizes: tuple[Replicas, ...] = Field(
        default=(),
        max_length=64,
        description="Discrete sizes, the largest that fits is used; empty: any size in the bounds.",
    )
    group_size: Replicas = Field(
        default=1,
        description="Workers that need each other (a pipeline or tensor group); every size is a multiple of it, the "
        "largest that `replicas` reaches is used.",
    )
    shrink_after_seconds: Annotated[Int32, Field(ge=0, le=86_400)] = Field(
        default=0,
        description="Seconds that the survivors of a loss wait for a replacement before they go on with fewer workers. "
        "A new value applies to workers that start after the change.",
    )
    regrow: Bool = Field(default=True, description="Whether a job that shrank grows again when there is capacity.")
    spares: Annotated[Int32, Field(ge=0, le=MAX_SPARES)] = Field(
        default=0,
        description="Workers beside `replicas` that wait, with their programs loaded, to take the place of a lost one. "
        "They are pods like the others, which count against quotas. Needs backend everstep.",
    )

    CHECKS: ClassVar[tuple[Check, ...]] = (
        Check(
            cel="self.shrinkAfterSeconds == 0 || self.regrow",
            message="spec.elastic.shrinkAfterSeconds needs regrow: true; without it no replacement comes",
            field=".shrinkAfterSeconds",
            holds=lambda e: e.shrink_after_seconds == 0 or e.regrow,
        ),
        Check(
            cel="self.minReplicas <= self.maxReplicas",
            message="spec.elastic.minReplicas must not be greater than spec.elastic.maxReplicas",
            field=".minReplicas",
            holds=lambda e: e.min_replicas <= e.max_replicas,
        ),
        Check(
            cel="self.sizes.all(s, s >= self.minReplicas && s <= self.maxReplicas)",
            message="spec.elastic.sizes must all be from minReplicas to maxReplicas",
            field=".sizes",
            holds=lambda e: all(e.min_replicas <= s <= e.max_replicas for s in e.sizes),
        ),
        Check(
            cel="self.sizes.all(s, s % self.groupSize == 0)",
            message="spec.elastic.sizes must all be multiples of groupSize",
            field=".sizes",
            holds=lambda e: all(s % e.group_size == 0 for s in e.sizes),
        ),
        Check(
            cel="self.minReplicas % self.groupSize == 0",
            message="spec.elastic.minReplicas must be a multiple of groupSize",
            field=".minReplicas",
            holds=lambda e: e.min_replicas % e.group_size == 0,
        ),
        Check(
            cel="self.maxReplicas % self.groupSize == 0",
            message="spec.elastic.maxReplicas must be a multiple of groupSize",
            field=".maxReplicas",
            holds=lambda e: e.max_replicas % e.group_size == 0,
        ),
    )


class Etcd(ApiModel):
    """An etcd v3 of your own, for `backend: etcd`."""

    endpoints: tuple[
        Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^https?://[^\s/@]+$")], ...
    ] = Field(default=(), max_length=16, description="Client URLs of its members, http:// or https://.")
    prefix: Annotated[str, StringConstraints(max_length=128, pattern=r"^/[A-Za-z0-9._/-]*$")] = Field(
        default="/everstep", description="Keys of all jobs begin with it."
    )
    secret_ref: SecretRef | None = Field(
        default=None,
        description="Secret with username and password, or tls.crt, tls.key and ca.crt, or both; mounted into "
        "the worker container only.",
    )


class Rendezvous(ApiModel):
    """How the workers find each other."""

    backend: RendezvousBackend = Field(
        default=RendezvousBackend.EVERSTEP,
        description="everstep: the operator's store; the image needs the everstep package. etcd: a store of your own, "
        "and the package. c10d: torch's own store on worker 0; any image with torchrun will do, and every loss "
        "replaces all workers.",
    )
    etcd: Etcd | None = Field(default=None, description="Settings of `backend: etcd`.")
    join_timeout_seconds: Annotated[Int32, Field(ge=10, le=86_400)] = Field(
        default=600,
        description="Seconds that a round may take to form before it is given up (RendezvousTimeout). A worker that "
        "waits so long for one that cannot run, for want of a node, quota or image, is replaced too (PeerMissing); "
        "that never ends the job.",
    )

    CHECKS: ClassVar[tuple[Check, ...]] = (
        Check(
            cel="(self.backend == 'etcd') == (has(self.etcd) && self.etcd.endpoints.size() > 0)",
            message="spec.rendezvous.etcd.endpoints must be given with backend etcd, and only with it",
            field=".etcd",
            holds=lambda r: (r.backend == RendezvousBackend.ETCD) == bool(r.etcd and r.etcd.endpoints),
        ),
    )


class PodGroup(ApiModel):
    """All pods of the job are one PodGroup: no worker starts before as many can as the smallest size of the job has."""

    scheduler: GangScheduler = Field(
        description="Kubernetes: the scheduler of Kubernetes 1.37 and later, with the feature gate GenericWorkload. "
        "Coscheduling: the plug-in of scheduler-plugins; name a scheduler that has it in the template's schedulerName. "
        "Volcano: `volcano` is the scheduler unless the template names another one. The operator makes PodGroups of "
        "those that the chart value podGroups lists.",
    )
    queue: ObjectName | None = Field(default=None, description="The queue of Volcano; absent: its own default.")
    schedule_timeout_seconds: Annotated[Int32, Field(ge=1, le=86_400)] | None = Field(
        default=None,
        description="Seconds for which Coscheduling keeps the places of the first pods while the others have none; "
        "absent: its own default.",
    )

    CHECKS: ClassVar[tuple[Check, ...]] = (
        Check(
            cel="!has(self.queue) || self.scheduler == 'Volcano'",
            message="spec.scheduling.podGroup.queue is one of Volcano's; give it with scheduler: Volcano, or leave it "
            "out",
            field=".queue",
            holds=lambda g: g.queue is None or g.scheduler is GangScheduler.VOLCANO,
        ),
        Check(
            cel="!has(self.scheduleTimeoutSeconds) || self.scheduler == 'Coscheduling'",
            message="spec.scheduling.podGroup.scheduleTimeoutSeconds is known to Coscheduling alone; give it with "
            "scheduler: Coscheduling, or leave it out",
            field=".scheduleTimeoutSeconds",
            holds=lambda g: g.schedule_timeout_seconds is None or g.scheduler is GangScheduler.COSCHEDULING,
        ),
    )


class Fabric(StrEnum):
    """The network between workers, beyond their Pods' own one."""

    ETHERNET = "Ethernet"
    INFINIBAND = "InfiniBand"
    ROCE = "RoCE"


class Network(ApiModel):
    """Variables of NCCL and gloo, so that all workers have the same ones. A variable in the template wins."""

    fabric: Fabric | None = Field(
        default=None,
        description="Ethernet: sockets alone (NCCL_IB_DISABLE=1). InfiniBand, RoCE: adapters (NCCL_IB_DISABLE=0); the "
        "pods need the devices. Absent: NCCL chooses.",
    )
    interface: Annotated[str, StringConstraints(max_length=15, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = Field(
        default=None,
        description="The interface of the pods for sockets, such as eth0 (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).",
    )
    adapters: tuple[
        Annotated[str, StringConstraints(max_length=36, pattern=r"^[A-Za-z0-9_.-]{1,32}(:[0-9]{1,3})?$")], ...
    ] = Field(
        default=(),
        max_length=32,
        description="InfiniBand or RoCE adapters, such as mlx5_0 or mlx5_0:1 (NCCL_IB_HCA); empty: NCCL chooses.",
    )
    gid_index: Annotated[Int32, Field(ge=0, le=255)] | None = Field(
        default=None, description="The index of the adapters' address that is used over RoCE (NCCL_IB_GID_INDEX)."
    )

    CHECKS: ClassVar[tuple[Check, ...]] = (
        Check(
            cel="self.adapters.size() == 0 || (has(self.fabric) && self.fabric != 'Ethernet')",
            message="spec.network.adapters needs fabric: InfiniBand or RoCE",
            field=".adapters",
            holds=lambda n: not n.adapters or n.fabric not in (None, Fabric.ETHERNET),
        ),
        Check(
            cel="!has(self.gidIndex) || (has(self.fabric) && self.fabric == 'RoCE')",
            message="spec.network.gidIndex needs fabric: RoCE",
            field=".gidIndex",
            holds=lambda n: n.gid_index is None or n.fabric is Fabric.ROCE,
        ),
    )


class Scheduling(ApiModel):
    """How a scheduler places the workers, beyond what the template says of each pod."""

    pod_group: PodGroup | None = Field(
        default=None,
        description="The PodGroup of the job; absent: none, each worker is placed by itself.",
    )


class Checkpoint(ApiModel):
    """Where and how often the training state is committed. Absent: the script saves its state itself."""

    url: Annotated[
        str, StringConstraints(min_length=4, max_length=1024, pattern=r"^[a-z][a-z0-9+.-]*://[^/\s]*(/[^\s]*)?$")
    ] = Field(description="Any fsspec URL on the operator's allow-list, such as s3://bucket/path. Given to the script.")
    every_seconds: Annotated[Int32, Field(ge=1, le=YEAR)] | None = Field(
        default=None,
        description=f"Seconds from one commit to the next; {DEFAULT_EVERY_SECONDS} when everySteps is absent too.",
    )
    every_steps: Annotated[Int32, Field(ge=1)] | None = Field(
        default=None, description="Optimizer steps from one commit to the next, instead of everySeconds."
    )
    keep: Annotated[Int32, Field(ge=1, le=100)] = Field(
        default=3, description="Newest valid commits that are never deleted."
    )
    keep_every_steps: Annotated[Int32, Field(ge=1)] | None = Field(
        default=None,
        description="The first commit of each interval of so many steps is kept for good, beside the newest.",
    )
    keep_every_hours: Annotated[Int32, Field(ge=1, le=8760)] | None = Field(
        default=None,
        description="A commit so many hours after the one kept before it is kept for good, beside the newest.",
    )
    secret_ref: SecretRef | None = Field(
        default=None, description="Secret with the store's credentials; its keys become variables of the workers only."
    )
    on_preemption: Bool = Field(
        default=False,
        description="What a loop of the script's own with a Checkpointer does when a pod is asked to end (evicted, "
        "preempted, or the job is suspended): all ranks save the same step, and end when it is committed. The session "
        "and the adapters always do that.",
    )

    CHECKS: ClassVar[tuple[Check, ...]] = (
        Check(
            cel="!(has(self.everySeconds) && has(self.everySteps))",
            message="spec.checkpoint.everySeconds and everySteps exclude each other; give one",
            field=".everySteps",
            holds=lambda c: c.every_seconds is None or c.every_steps is None,
        ),
        Check(
            cel="!self.url.split('/').exists(part, part == '..')",
            message="spec.checkpoint.url must not contain '..' as a part of its path",
            field=".url",
            holds=lambda c: ".." not in c.url.split("/"),
        ),
    )

    @property
    def interval_seconds(self) -> int | None:
        """Seconds between commits, with the default filled in; None if steps are counted instead."""
        if self.every_steps is not None:
            return None
        return self.every_seconds if self.every_seconds is not None else DEFAULT_EVERY_SECONDS


class TrainingJobSpec(ApiModel):
    """The training program, its number of workers, and how it recovers."""

    replicas: Replicas = Field(description="Number of workers wanted; each is one pod.")
    elastic: Elastic | None = Field(default=None, description="Sizes at which the job may run; absent: fixed.")
    processes_per_replica: Processes = Field(
        default=1,
        description="Training processes a worker: 1 to 64, or auto = the devices that the worker container "
        "requests, else 1: GPUs, MIG instances and other partitions, Gaudi, cores of Neuron. Of resource claims and of "
        "resources that it does not know, auto is refused. (torchrun's own auto counts CPUs.)",
    )
    rendezvous: Rendezvous = section(Rendezvous, "How the workers find each other.")
    scheduling: Scheduling | None = Field(
        default=None, description="How workers are placed together; absent: each by itself."
    )
    network: Network | None = Field(
        default=None, description="The network between workers; absent: NCCL and gloo choose."
    )
    checkpoint: Checkpoint | None = Field(default=None, description="Where the training state is committed.")
    recovery: Recovery = section(Recovery, "What happens after a loss.")
    suspend: Bool = Field(default=False, description="True: no pods. False: continue from the last commit.")
    rerun: Annotated[Int32, Field(ge=0)] = Field(
        default=0,
        description="A counter. A finished job begins anew when it is above status.rerun, and goes on from the newest "
        "commit at checkpoint.url; all other fields may change in the same update. Only a finished job takes a higher "
        "value.",
    )
    active_deadline_seconds: Annotated[Int32, Field(ge=1, le=YEAR)] | None = Field(
        default=None,
        description="Seconds after its start at which the job fails, even while it trains. As in batch/v1, suspending "
        "the job stops this clock, and resuming it begins the whole time again.",
    )
    ttl_seconds_after_finished: Annotated[Int32, Field(ge=0, le=YEAR)] | None = Field(
        default=None, description="Seconds after its end at which the job is deleted; absent: never."
    )
    managed_by: (
        Annotated[
            str,
            StringConstraints(
                max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
            ),
        ]
        | None
    ) = Field(default=None, description="Another controller (domain/name) that acts on this job instead. Immutable.")
    success_policy: SuccessPolicy = Field(
        default=SuccessPolicy.ALL_WORKERS,
        description="The workers that have to succeed before the job is complete. AllWorkers: all of the world. "
        "Worker0: the one of index 0, as soon as its container has ended with exit code 0; the others are then asked "
        "to end, with the grace period of the template, whatever podCleanup is. For processes with roles.",
    )
    pod_cleanup: PodCleanup = Field(
        default=PodCleanup.RUNNING,
        description="Pods that a finished job deletes: those still running, all, or none. A pod in which only "
        "side-cars run is deleted anyway, after its grace period.",
    )
    pod_disruption_budget: Bool = Field(
        default=True,
        description="Keep elastic.minReplicas workers during drains while the job trains. Without elastic it has no "
        "effect, because then it would block every drain.",
    )
    volume_claim_templates: tuple[ClaimTemplate, ...] = Field(
        default=(),
        max_length=8,
        description="Volumes of which each worker has its own, by its index; a volume of the template with the same "
        "name is replaced by it. Needs the chart value volumeClaims.enabled. Immutable.",
    )
    persistent_volume_claim_retention_policy: ClaimRetention = section(
        ClaimRetention, "When the claims of volumeClaimTemplates are deleted. Immutable."
    )
    template: dict[str, Any] = Field(
        description=f"PodTemplateSpec of a worker. The container named {WORKER_CONTAINER!r} is the trainer.",
        json_schema_extra={"x-schema": TEMPLATE_SCHEMA},
    )

    CHECKS: ClassVar[tuple[Check, ...]] = (
        Check(
            cel="!has(self.elastic) || "
            "(self.replicas >= self.elastic.minReplicas && self.replicas <= self.elastic.maxReplicas)",
            message="spec.replicas must be from spec.elastic.minReplicas to spec.elastic.maxReplicas",
            field=".replicas",
            holds=lambda s: s.elastic is None or s.elastic.min_replicas <= s.replicas <= s.elastic.max_replicas,
        ),
        Check(
            cel="!has(self.elastic) || self.elastic.sizes.size() == 0 || "
            "self.elastic.sizes.exists(s, s <= self.replicas)",
            message="spec.replicas must reach the smallest of spec.elastic.sizes",
            field=".replicas",
            holds=lambda s: s.elastic is None or not s.elastic.sizes or min(s.elastic.sizes) <= s.replicas,
        ),
        Check(
            cel="!has(self.elastic) || self.rendezvous.backend != 'c10d'",
            message="spec.elastic needs a spec.rendezvous.backend other than c10d, whose world has one size",
            field=".elastic",
            holds=lambda s: s.elastic is None or s.rendezvous.backend != RendezvousBackend.C10D,
        ),
        Check(
            cel="!has(self.elastic) || self.elastic.spares == 0 || self.rendezvous.backend == 'everstep'",
            message="spec.elastic.spares needs spec.rendezvous.backend everstep: with another one the operator does "
            "not see which workers train",
            field=".elastic.spares",
            holds=lambda s: (
                s.elastic is None or s.elastic.spares == 0 or s.rendezvous.backend == RendezvousBackend.EVERSTEP
            ),
        ),
        Check(
            cel=f"!has(self.elastic) || self.elastic.maxReplicas + self.elastic.spares <= {MAX_REPLICAS}",
            message=f"spec.elastic.maxReplicas and spares must not be more than {MAX_REPLICAS} workers together",
            field=".elastic.spares",
            holds=lambda s: s.elastic is None or s.elastic.max_replicas + s.elastic.spares <= MAX_REPLICAS,
        ),
        Check(
            cel="self.successPolicy != 'Worker0' || !has(self.elastic) || self.elastic.spares == 0",
            message="spec.successPolicy Worker0 needs spec.elastic.spares: 0; a spare may have taken worker 0's place",
            field=".successPolicy",
            holds=lambda s: s.success_policy != SuccessPolicy.WORKER_0 or s.elastic is None or s.elastic.spares == 0,
        ),
        Check(
            cel="self.volumeClaimTemplates.all(t, !t.metadata.name.startsWith('everstep-'))",
            message="spec.volumeClaimTemplates must not have names that begin with everstep-, as the operator's own do",
            field=".volumeClaimTemplates",
            holds=lambda s: not any(t.metadata.name.startswith("everstep-") for t in s.volume_claim_templates),
        ),
        Check(
            cel="self.volumeClaimTemplates.all(t, self.volumeClaimTemplates.exists_one(o, o.metadata.name == "
            "t.metadata.name))",
            message="spec.volumeClaimTemplates must all have names of their own",
            field=".volumeClaimTemplates",
            holds=lambda s: len({t.metadata.name for t in s.volume_claim_templates}) == len(s.volume_claim_templates),
        ),
        Check(
            cel="self.recovery.hang.mode != 'Fixed' || self.rendezvous.backend != 'c10d'",
            message="spec.recovery.hang.mode Fixed needs a spec.rendezvous.backend other than c10d, "
            "under which nobody watches the processes",
            field=".recovery.hang.mode",
            holds=lambda s: s.recovery.hang.mode != HangMode.FIXED or s.rendezvous.backend != RendezvousBackend.C10D,
        ),
        Check(
            cel=f"self.template.spec.containers.exists_one(c, c.name == '{WORKER_CONTAINER}')",
            message=f"spec.template.spec.containers must have one container named '{WORKER_CONTAINER}', the trainer",
            field=".template",
            holds=lambda s: worker_container(s.template) is not None,
        ),
        *TEMPLATE_CHECKS,
    )

    @field_validator("template")
    @classmethod
    def _template_is_bounded(cls, template: dict[str, Any]) -> dict[str, Any]:
        require_bounded(template)
        return template

    @model_validator(mode="after")
    def _auto_is_known(self) -> TrainingJobSpec:
        if self.processes_per_replica == AUTO:
            try:
                count = self._devices()
            except devices.Uncountable as e:
                raise FieldError(".processesPerReplica", f"auto {e}, such as 8") from None
            if count > MAX_PROCESSES:
                problem = f"auto finds {count} devices, and a worker has at most {MAX_PROCESSES} processes"
                raise FieldError(".processesPerReplica", problem)
        return self

    @property
    def pod_group(self) -> PodGroup | None:
        """`scheduling.podGroup`, if it is given."""
        return None if self.scheduling is None else self.scheduling.pod_group

    def processes(self) -> int:
        """The number of training processes of a worker. `auto` is the number of devices that the worker container
        requests."""
        if isinstance(self.processes_per_replica, int):
            return self.processes_per_replica
        return max(1, self._devices())

    def _devices(self) -> int:
        container = worker_container(self.template)
        assert container is not None  # the check above
        return devices.count(container)
