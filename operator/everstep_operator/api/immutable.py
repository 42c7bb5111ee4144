"""The fields of a job that may not change while it runs.

Pods of one job that were made from two different specs could not form one world, so the API server refuses such
changes. `spec.template` is immutable too, but the CRD cannot see into it: the chart's ValidatingAdmissionPolicy
protects it. As in batch/v1, an update is judged by `suspend` before and after it: one update may suspend a job and put
its template back, and one may set node selectors and resume the job, as queues do. Workers that are still there then
are replaced, because their pods say what they were made from (`plan.state.pod_hash`, ADR 0035). A rerun ends all pods
of the run before it, so the update that asks for one may change everything (ADR 0064). Invariant: each rule compares
presence as well as value, because a rule over an absent field would fail.
"""

from __future__ import annotations

from everstep_operator.api.base import Check

NO_PODS = "self.suspend || oldSelf.suspend || self.rerun > oldSelf.rerun"
HOW = "set spec.suspend: true in the same update, or before it; of a finished job raise spec.rerun in the same update"
REMEDY = f"is immutable while the job is not suspended; {HOW}"


def _while_running(field: str, same: str) -> Check:
    return Check(cel=f"{NO_PODS} || ({same})", message=f"spec{field} {REMEDY}", field=field)


def _optional(field: str, parent: str = "") -> str:
    """CEL for 'absent before and after, or equal'; `parent` is an optional object that holds the field."""
    has = f"has(self.{parent or field}) == has(oldSelf.{parent or field})"
    path = f"{parent}.{field}" if parent else field
    return f"{has} && (!has(self.{parent or field}) || self.{path} == oldSelf.{path})"


# `self` and `oldSelf` are the spec.
IMMUTABLE: tuple[Check, ...] = (
    _while_running(".rendezvous", "self.rendezvous == oldSelf.rendezvous"),
    _while_running(".scheduling", _optional("scheduling")),
    _while_running(".network", _optional("network")),
    _while_running(".checkpoint.url", _optional("url", "checkpoint")),
    _while_running(  # with it should_save is a collective of all ranks in each step
        ".checkpoint.onPreemption",
        "(has(self.checkpoint) && self.checkpoint.onPreemption) == "
        "(has(oldSelf.checkpoint) && oldSelf.checkpoint.onPreemption)",
    ),
    _while_running(".processesPerReplica", "self.processesPerReplica == oldSelf.processesPerReplica"),
    _while_running(
        ".elastic.groupSize",
        "(has(self.elastic) ? self.elastic.groupSize : 1) == (has(oldSelf.elastic) ? oldSelf.elastic.groupSize : 1)",
    ),
    # With etcd, running agents keep the sizes that they were started with, and refuse an agent that asks for others.
    Check(
        cel=f"{NO_PODS} || self.rendezvous.backend != 'etcd' || (has(self.elastic) == has(oldSelf.elastic) && "
        "(has(self.elastic) ? self.elastic.minReplicas == oldSelf.elastic.minReplicas && "
        "self.elastic.maxReplicas == oldSelf.elastic.maxReplicas && self.elastic.sizes == oldSelf.elastic.sizes "
        ": self.replicas == oldSelf.replicas))",
        message="with spec.rendezvous.backend etcd, the sizes of a job (spec.elastic, or spec.replicas without it) are "
        f"immutable while it is not suspended; {HOW}",
        field=".elastic",
    ),
    *(
        Check(
            cel=f"self.{field} == oldSelf.{field}",
            message=f"spec.{field} is immutable; delete the job and create it anew",
            field=f".{field}",
        )
        for field in ("volumeClaimTemplates", "persistentVolumeClaimRetentionPolicy")
    ),
    Check(
        cel=_optional("managedBy"),
        message="spec.managedBy is immutable; delete the job and create it anew",
        field=".managedBy",
    ),
)
