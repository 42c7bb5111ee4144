"""The NetworkPolicy of a job: its workers reach each other on all ports, and nobody else does.

Stores, collectives and links of agents have no authentication and no encryption, and most of them listen on ports that
the system chooses. So all ports are the job's own, but for those that the template declares (`containerPorts`): a user
who declares a port wants it reached, TensorBoard's or Prometheus's. Policies add up: a policy of the user's own can
allow more. The job owns it. Invariant: a policy is never needed for training, so nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.contract import labels
from everstep_operator import object_names
from everstep_operator.plan.actions import Action, CreateNetworkPolicy, DeleteNetworkPolicy
from everstep_operator.plan.snapshot import JobView, Snapshot
from everstep_operator.plan.state.facts import Facts

OPEN_PORTS = f"{labels.GROUP}/open-ports"  # annotation: what the policy was made of
PROTOCOLS = ("TCP", "UDP", "SCTP")


def actions(facts: Facts) -> tuple[Action, ...]:
    """Create the policy, or delete one that was made for other ports or is not wanted any more. It is created again
    once it is gone."""
    job, existing = facts.job, facts.snapshot.network_policy
    name, ports = object_names.service_name(job.name), _ports(facts.snapshot)
    if existing is not None and existing.open_ports != ports:
        why = "no policy is wanted" if ports is None else f"it was made for other ports than {ports or 'none'}"
        return (DeleteNetworkPolicy(name, existing.uid, why),)
    if existing is None and ports is not None and facts.roster.wanted > 0:
        return (CreateNetworkPolicy(name, _body(job, name, ports), "its workers alone reach each other"),)
    return ()


def deletion(snapshot: Snapshot) -> tuple[Action, ...]:
    """Delete the policy of a finished job."""
    existing = snapshot.network_policy
    if existing is None:
        return ()
    return (DeleteNetworkPolicy(object_names.service_name(snapshot.job.name), existing.uid, "the job is finished"),)


def _ports(snapshot: Snapshot) -> str | None:
    """The ports that everybody may reach, such as `6006/TCP,9100/TCP`; None: no policy. A pod with its node's network
    has no address of its own, which a policy could know."""
    spec = snapshot.job.spec.template.get("spec") or {}
    if not snapshot.settings.network_policies or spec.get("hostNetwork"):
        return None
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    declared = {port for c in containers for p in c.get("ports") or () if (port := _declared(p)) is not None}
    return ",".join(f"{number}/{protocol}" for number, protocol in sorted(declared))


def _declared(port: Any) -> tuple[int, str] | None:
    """A declared port. One that the API server would refuse is left to it. The rendezvous is the job's own, declared or
    not."""
    if not isinstance(port, Mapping):
        return None
    number, protocol = port.get("containerPort"), port.get("protocol") or "TCP"
    if not isinstance(number, int) or not 0 < number < 2**16 or protocol not in PROTOCOLS:
        return None
    return None if (number, protocol) == (labels.RENDEZVOUS_PORT, "TCP") else (number, protocol)


def _body(job: JobView, name: str, ports: str) -> dict[str, Any]:
    workers = {"matchLabels": {labels.JOB_UID: job.uid}}
    rules: list[dict[str, Any]] = [{"from": [{"podSelector": workers}]}]
    if ports:
        pairs = (port.split("/") for port in ports.split(","))
        rules.append({"ports": [{"port": int(number), "protocol": protocol} for number, protocol in pairs]})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            **object_names.metadata(name, job.name, job.namespace, job.uid),
            "annotations": {OPEN_PORTS: ports},
        },
        "spec": {"podSelector": workers, "policyTypes": ["Ingress"], "ingress": rules},
    }
