"""Maps events to jobs: turns informer deltas into keys on the work queue, and withdraws dead pods from the round store.

It decides nothing else.
"""

from __future__ import annotations

from everstep_operator.controller import observe
from everstep_operator.controller.caches import BY_NODE, Caches
from everstep_operator.kube.wire import (
    NetworkPolicy,
    Node,
    Pod,
    PodDisruptionBudget,
    Service,
    Unstructured,
    controller_uid,
)
from everstep_operator.rounds.presence import Worker
from everstep_operator.rounds.registry import RoundRegistry
from everstep_operator.runtime.cache import Added, Deleted, Delta, Updated
from everstep_operator.runtime.expectations import Expectations
from everstep_operator.runtime.queue import WorkQueue
from everstep_operator.worker_pods import Key, has_ended, owner_key, worker_labels


class EventHandlers:
    """Adds its handlers to the caches."""

    def __init__(
        self, caches: Caches, queue: WorkQueue[Key], expectations: Expectations[Key], rounds: RoundRegistry
    ) -> None:
        self._caches, self._queue, self._expectations, self._rounds = caches, queue, expectations, rounds
        caches.jobs.add_handler(self._job)
        caches.pods.add_handler(self._pod)
        caches.services.add_handler(self._owned)
        caches.budgets.add_handler(self._owned)
        if caches.policies is not None:
            caches.policies.add_handler(self._owned)
        for groups in caches.pod_groups.values():
            groups.add_handler(self._owned)
        if caches.queues is not None:
            caches.queues.workloads.add_handler(self._workload)
        if caches.nodes is not None:
            caches.nodes.add_handler(self._node)

    def _job(self, delta: Delta[Unstructured]) -> None:
        if isinstance(delta, Deleted):
            self._rounds.forget(delta.object.metadata.uid)
        self._queue.add(delta.object.key)

    def _pod(self, delta: Delta[Pod]) -> None:
        pod = delta.object
        key = owner_key(pod)
        if key is None:
            return
        match delta:
            case Deleted():
                self._expectations.observe_deleted(key, pod.metadata.uid)
                self._withdraw(pod)
            case Added() | Updated():
                self._expectations.observe_created(key, pod.metadata.name)
                if pod.metadata.deletion_timestamp is not None:
                    self._expectations.observe_deleted(key, pod.metadata.uid)
                if has_ended(pod):
                    self._withdraw(pod)
        self._queue.add(key)

    def _withdraw(self, pod: Pod) -> None:
        """Withdraw the pod's agent now: the other agents must not wait until its lease expires."""
        worker, job_uid = worker_labels(pod), controller_uid(pod.metadata)
        if worker is not None and job_uid is not None:
            self._rounds.withdraw_pod(job_uid, Worker(pod.metadata.uid, worker.index, worker.incarnation))

    def _owned(
        self, delta: Delta[Service] | Delta[PodDisruptionBudget] | Delta[NetworkPolicy] | Delta[Unstructured]
    ) -> None:
        if (key := owner_key(delta.object)) is not None:
            self._queue.add(key)

    def _workload(self, delta: Delta[Unstructured]) -> None:
        key = owner_key(delta.object)
        if key is None:
            return
        match delta:
            case Deleted():
                self._expectations.observe_deleted(key, delta.object.metadata.uid)
            case Added() | Updated():
                self._expectations.observe_created(key, delta.object.metadata.name)
        self._queue.add(key)

    def _node(self, delta: Delta[Node]) -> None:
        """React to a change of a node's Ready condition, to its end, and to a notice that its pods have to leave, but
        not to its heartbeats. The agents on a node that is not ready may live: their presence shows it, and expires by
        itself."""
        node = delta.object
        if isinstance(delta, Updated):
            before, now = observe.node_view(delta.old), observe.node_view(node)
            if (before.health, before.leaving) == (now.health, now.leaving):
                return
        lost = isinstance(delta, Deleted)
        for pod in self._caches.pods.by_index(BY_NODE, node.metadata.name):
            if lost:
                self._withdraw(pod)
            if (key := owner_key(pod)) is not None:
                self._queue.add(key)
