"""The informers of one replica, and the indexes by which they are read.

Invariant: a job is known only when everything else of its namespace is. A pass over a job whose pods are not listed yet
would take all of them for lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from everstep.contract import labels
from everstep_operator.controller import fleet
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.resources import (
    FLAVORS,
    NETWORK_POLICIES,
    NODES,
    PDBS,
    POD_GROUPS,
    PODS,
    PRIORITY_CLASSES,
    SERVICES,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
    Resource,
)
from everstep_operator.kube.wire import (
    KubeObject,
    NetworkPolicy,
    Node,
    Pod,
    PodDisruptionBudget,
    PriorityClass,
    Service,
    Unstructured,
    controller_uid,
)
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.informer import Informer
from everstep_operator.runtime.informers import EVERYWHERE, Informers
from everstep_operator.runtime.randomness import Random

BY_OWNER, BY_NODE = "owner", "node"  # of pods
SUSPECT = "suspect"  # of nodes against which their status speaks, and of jobs whose losses speak against nodes

T = TypeVar("T", bound=KubeObject)


@dataclass(frozen=True, slots=True)
class QueueCaches:
    """What concerns queues of Kueue. A cluster may not have its kinds, or this account no right to them: then jobs of
    queues wait, and no others."""

    workloads: Informers[Unstructured]
    flavors: Informer[Unstructured]
    workload_classes: Informer[PriorityClass]
    pod_classes: Informer[PriorityClass]

    def of_the_cluster(self) -> tuple[Informer[Any], ...]:
        return (self.flavors, self.workload_classes, self.pod_classes)


@dataclass(frozen=True, slots=True)
class Caches:
    namespaces: tuple[str, ...]  # that are watched; empty: all
    jobs: Informers[Unstructured]
    pods: Informers[Pod]
    services: Informers[Service]
    nodes: Informer[Node] | None  # None: the operator has no right to list them
    budgets: Informers[PodDisruptionBudget]
    policies: Informers[NetworkPolicy] | None  # None: jobs have none, and the operator has no right to list them
    # By the scheduler; of others the operator has no right. The cluster may not serve them: then jobs that ask for one
    # wait, and no others.
    pod_groups: Mapping[str, Informers[Unstructured]]
    queues: QueueCaches | None = None  # None: the operator obeys no queue

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
        pod_groups: Collection[str] = (),
        namespaces: tuple[str, ...] = (),
        nodes: bool = True,
        queues: bool = False,
    ) -> Caches:
        """`relisted`: see `Informer`. `nodes`, `queues`: whether they are read."""
        # A label of our own domain: other tools rewrite app.kubernetes.io/managed-by. All versions of the operator set
        # both. Whose an object is, its owner says (`_owner`).
        ours = labels.JOB_UID
        common: dict[str, Any] = {"clock": clock, "rng": rng, "relisted": relisted}
        of_pods = {BY_OWNER: _owner, BY_NODE: _node}

        def informers(resource: Resource[T], **more: Any) -> Informers[T]:
            return Informers(namespaces, lambda name: Informer(client, resource, namespace=name, **more, **common))

        def of_the_cluster(resource: Resource[T]) -> Informer[T]:
            return Informer(client, resource, optional=True, **common)

        return cls(
            namespaces=namespaces,
            jobs=informers(jobs, indexers={SUSPECT: _accuses}),
            pods=informers(PODS, label_selector=ours, indexers=of_pods),
            services=informers(SERVICES, label_selector=ours),
            nodes=Informer(client, NODES, indexers={SUSPECT: _is_suspect}, **common) if nodes else None,
            budgets=informers(PDBS, label_selector=ours),
            policies=informers(NETWORK_POLICIES, label_selector=ours) if network_policies else None,
            pod_groups={
                name: informers(POD_GROUPS[name], label_selector=ours, optional=True) for name in sorted(pod_groups)
            },
            queues=QueueCaches(
                informers(WORKLOADS, label_selector=ours, indexers={BY_OWNER: _owner}, optional=True),
                of_the_cluster(FLAVORS),
                of_the_cluster(WORKLOAD_PRIORITY_CLASSES),
                of_the_cluster(PRIORITY_CLASSES),
            )
            if queues
            else None,
        )

    async def run(self) -> None:
        """Keep all of them until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self.nodes is not None:
                group.create_task(self.nodes.run())
            for informer in self.queues.of_the_cluster() if self.queues is not None else ():
                group.create_task(informer.run())
            for namespace in self._watched():
                group.create_task(self._run_in(namespace))

    async def _run_in(self, namespace: str | None) -> None:
        *others, jobs = self._of(namespace)
        async with asyncio.TaskGroup() as group:
            for informer in others:
                group.create_task(informer.run())
            for informer in others:
                await informer.wait_synced()
            for groups in self.pod_groups.values():
                group.create_task(groups.of(namespace).run())
                await groups.of(namespace).wait_answered()
            if self.queues is not None:
                workloads = self.queues.workloads.of(namespace)
                group.create_task(workloads.run())
                await workloads.wait_answered()
            group.create_task(jobs.run())

    async def wait_synced(self) -> None:
        """Return when this replica may lead. A namespace whose lists are refused, as that of a team which has left,
        keeps it from no other: its jobs are known from when they can be listed."""
        if self.nodes is not None:
            await self.nodes.wait_synced()
        for namespace in self._watched():
            for informer in self._of(namespace):
                await (informer.wait_synced() if namespace is EVERYWHERE else informer.wait_answered())
                if informer.is_refused:
                    break

    def waiting(self) -> str | None:
        """Which lists have not come yet; None if this replica is ready."""
        lists = [] if self.nodes is None or self.nodes.has_synced else [self.nodes.plural]
        for namespace in self._watched():
            missing = [i for i in self._of(namespace) if not i.has_synced]
            if namespace is EVERYWHERE or not any(informer.is_refused for informer in missing):
                lists += [i.plural if namespace is EVERYWHERE else f"{i.plural} in {namespace}" for i in missing]
        return f"waits for the first list of {', '.join(lists)}" if lists else None

    def _watched(self) -> tuple[str | None, ...]:
        return tuple(sorted(self.namespaces)) or (EVERYWHERE,)

    def _of(self, namespace: str | None) -> Iterator[Informer[Any]]:
        """Those of one namespace; that of jobs is the last one."""
        for informers in (self.pods, self.services, self.budgets, self.policies, self.jobs):
            if informers is not None:
                yield informers.of(namespace)


def _accuses(job: Unstructured) -> tuple[str, ...]:
    return (SUSPECT,) if fleet.accuses(job) else ()


def _is_suspect(node: Node) -> tuple[str, ...]:
    return (SUSPECT,) if fleet.is_suspect(node) else ()


def _owner(obj: KubeObject) -> tuple[str, ...]:
    uid = controller_uid(obj.metadata)
    return (uid,) if uid else ()


def _node(pod: Pod) -> tuple[str, ...]:
    return (pod.spec.node_name,) if pod.spec.node_name else ()
