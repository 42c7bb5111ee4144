"""The informers of one replica, and the indexes by which they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everstep.contract import labels
from everstep_operator.controller import fleet
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.resources import NETWORK_POLICIES, NODES, PDBS, PODS, SERVICES, Resource
from everstep_operator.kube.wire import (
    NetworkPolicy,
    Node,
    Pod,
    PodDisruptionBudget,
    Service,
    Unstructured,
    controller_uid,
)
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.informer import Informer
from everstep_operator.runtime.randomness import Random

BY_OWNER, BY_NODE = "owner", "node"  # of pods
SUSPECT = "suspect"  # of nodes against which their status speaks, and of jobs whose losses speak against nodes


@dataclass(frozen=True, slots=True)
class Caches:
    jobs: Informer[Unstructured]
    pods: Informer[Pod]
    services: Informer[Service]
    nodes: Informer[Node]
    budgets: Informer[PodDisruptionBudget]
    policies: Informer[NetworkPolicy] | None  # None: jobs have none, and the operator has no right to list them

    @classmethod
    def of(
        cls,
        client: KubeClient,
        jobs: Resource[Unstructured],
        *,
        clock: Clock,
        rng: Random,
        relisted: Callable[[str], None],
        network_policies: bool = False,
    ) -> Caches:
        """`relisted`: see `Informer`."""
        # A label of our own domain: other tools rewrite app.kubernetes.io/managed-by. All versions of the operator set
        # both. Whose an object is, its owner says (`_owner`).
        ours = labels.JOB_UID
        common: dict[str, Any] = {"clock": clock, "rng": rng, "relisted": relisted}
        of_pods = {BY_OWNER: _owner, BY_NODE: _node}
        return cls(
            jobs=Informer(client, jobs, indexers={SUSPECT: _accuses}, **common),
            pods=Informer(client, PODS, label_selector=ours, indexers=of_pods, **common),
            services=Informer(client, SERVICES, label_selector=ours, **common),
            nodes=Informer(client, NODES, indexers={SUSPECT: _is_suspect}, **common),
            budgets=Informer(client, PDBS, label_selector=ours, **common),
            policies=Informer(client, NETWORK_POLICIES, label_selector=ours, **common) if network_policies else None,
        )

    def all(self) -> tuple[Informer[Any], ...]:
        optional = () if self.policies is None else (self.policies,)
        return (self.jobs, self.pods, self.services, self.nodes, self.budgets, *optional)

    def waiting(self) -> str | None:
        """Which lists have not come yet; None if this replica is ready."""
        names = [informer.plural for informer in self.all() if not informer.has_synced]
        return f"waits for the first list of {', '.join(names)}" if names else None


def _accuses(job: Unstructured) -> tuple[str, ...]:
    return (SUSPECT,) if fleet.accuses(job) else ()


def _is_suspect(node: Node) -> tuple[str, ...]:
    return (SUSPECT,) if fleet.is_suspect(node) else ()


def _owner(pod: Pod) -> tuple[str, ...]:
    uid = controller_uid(pod.metadata)
    return (uid,) if uid else ()


def _node(pod: Pod) -> tuple[str, ...]:
    return (pod.spec.node_name,) if pod.spec.node_name else ()
