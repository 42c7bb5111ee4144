"""Which event concerns which job: from informer deltas and reports to keys on the work queue. Decides nothing else."""

from __future__ import annotations

from everstep.contract import labels
from everstep.contract.messages import Report
from everstep_operator.kube.client import KubeClient, TokenIdentity
from everstep_operator.kube.wire import Node, Pod, Service, Unstructured, controller_uid
from everstep_operator.runtime.cache import Added, Deleted, Delta, Updated
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.expectations import Expectations
from everstep_operator.runtime.queue import WorkQueue
from everstep_operator.shell import observe
from everstep_operator.shell.apply import Key
from everstep_operator.shell.identity import Authenticate, PodIdentity
from everstep_operator.shell.intake import ReportRefused
from everstep_operator.shell.reconcile import BY_NODE, Caches, Reconciler

# Progress is written every few seconds at most, so a report that only moves figures need not be looked at before that.
_REPORT_DELAY = 2.0


def owner_key(obj: Pod | Service) -> Key | None:
    """The job that controls this object, if one does."""
    for owner in obj.metadata.owner_references:
        if owner.controller and owner.kind == labels.KIND and owner.api_version == labels.API_VERSION:
            return (obj.metadata.namespace, owner.name)
    return None


def index_owner(pod: Pod) -> tuple[str, ...]:
    uid = controller_uid(pod.metadata)
    return (uid,) if uid else ()


def index_node(pod: Pod) -> tuple[str, ...]:
    return (pod.spec.node_name,) if pod.spec.node_name else ()


class Wiring:
    """Connects caches and reports to the queue."""

    def __init__(
        self,
        caches: Caches,
        queue: WorkQueue[Key],
        expectations: Expectations[Key],
        reconciler: Reconciler,
        clock: Clock,
    ) -> None:
        self._caches = caches
        self._queue = queue
        self._expectations = expectations
        self._reconciler = reconciler
        self._clock = clock
        caches.jobs.add_handler(self._job)
        caches.pods.add_handler(self._pod)
        caches.services.add_handler(self._service)
        caches.nodes.add_handler(self._node)

    def _job(self, delta: Delta[Unstructured]) -> None:
        self._queue.add(delta.object.key)

    def _pod(self, delta: Delta[Pod]) -> None:
        pod = delta.object
        key = owner_key(pod)
        if key is None:
            return
        match delta:
            case Deleted():
                self._expectations.observe_deleted(key, pod.metadata.uid)
            case Added() | Updated():
                self._expectations.observe_created(key, pod.metadata.name)
                if pod.metadata.deletion_timestamp is not None:
                    self._expectations.observe_deleted(key, pod.metadata.uid)
        self._queue.add(key)

    def _service(self, delta: Delta[Service]) -> None:
        if (key := owner_key(delta.object)) is not None:
            self._queue.add(key)

    def _node(self, delta: Delta[Node]) -> None:
        """A node's heartbeat changes nothing; its Ready condition, and its end, do."""
        node = delta.object
        if isinstance(delta, Updated) and observe.node_view(delta.old).ready == observe.node_view(node).ready:
            return
        for pod in self._caches.pods.by_index(BY_NODE, node.metadata.name):
            if (key := owner_key(pod)) is not None:
                self._queue.add(key)

    def accept(self, identity: PodIdentity, report: Report) -> None:
        """Take a report from a pod of a job that exists; raises ReportRefused from any other."""
        pod = self._caches.pods.get(identity.namespace, identity.pod_name)
        if pod is None or pod.metadata.uid != identity.pod_uid:
            raise ReportRefused(f"pod {identity.pod_name} is not known as a worker, or was replaced")
        key = owner_key(pod)
        job = self._caches.jobs.get(*key) if key is not None else None
        worker = observe.worker_pod(pod)
        if key is None or job is None or worker is None or controller_uid(pod.metadata) != job.metadata.uid:
            raise ReportRefused(f"pod {identity.pod_name} belongs to no TrainingJob")
        if report.round != worker.round:
            raise ReportRefused(f"pod {identity.pod_name} is of round {worker.round}, not {report.round}")
        if self._reconciler.progress_of(job).accept(report, self._clock.now()):
            self._queue.add(key)
        else:
            self._queue.add_after(key, _REPORT_DELAY)


def authenticator(client: KubeClient) -> Authenticate:
    """Who a bearer token is, by TokenReview: a deleted pod's token dies with it."""

    async def authenticate(token: str) -> PodIdentity | None:
        review = await client.review_token(token, (labels.TOKEN_AUDIENCE,))
        if not isinstance(review, TokenIdentity) or not review.pod_uid:
            return None
        return PodIdentity(review.namespace, review.pod_name, review.pod_uid)

    return authenticate
