"""Which event concerns which job: from informer deltas, reports and agents' calls to keys on the work queue, and to the
round store. Decides nothing else.
"""

from __future__ import annotations

import asyncio
import logging

from everstep.contract import labels
from everstep.contract.messages import Report
from everstep_operator.controller import observe
from everstep_operator.controller.apply import Key
from everstep_operator.controller.reconcile import BY_NODE, Caches, Reconciler
from everstep_operator.endpoint.server import ReportRefused
from everstep_operator.endpoint.tenant_limits import Tenant
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.endpoint.token_reviews import Authenticate
from everstep_operator.kube.client import KubeClient, TokenIdentity
from everstep_operator.kube.errors import KubeError, NotFound
from everstep_operator.kube.resources import PODS
from everstep_operator.kube.wire import Node, Pod, PodDisruptionBudget, Service, Unstructured, controller_uid
from everstep_operator.plan.snapshot import RoundView
from everstep_operator.rounds.documents import JobRef, RoundsRefused, RoundsUnavailable, published_round
from everstep_operator.rounds.presence import Worker
from everstep_operator.rounds.store import Agent, RoundStore
from everstep_operator.runtime.cache import Added, Deleted, Delta, Updated
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.expectations import Expectations
from everstep_operator.runtime.queue import WorkQueue

log = logging.getLogger("everstep.event_handlers")

BY_UID = "uid"
BACKEND = "everstep"  # of spec.rendezvous, and its default
MAX_ASKING = 8  # pods looked up at once
# Progress is written every few seconds at most, so a report that only moves figures need not be looked at before that.
_REPORT_DELAY = 2.0


def owner_key(obj: Pod | Service | PodDisruptionBudget) -> Key | None:
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


class EventHandlers:
    """Connects caches and reports to the queue."""

    def __init__(
        self,
        caches: Caches,
        queue: WorkQueue[Key],
        expectations: Expectations[Key],
        reconciler: Reconciler,
        clock: Clock,
        rounds: RoundStore,
        client: KubeClient,
    ) -> None:
        """`client` is asked for a pod only if one calls that the caches do not know."""
        self._caches = caches
        self._queue = queue
        self._expectations = expectations
        self._reconciler = reconciler
        self._clock = clock
        self._rounds = rounds
        self._client = client
        self._asking = asyncio.Semaphore(MAX_ASKING)
        caches.jobs.add_handler(self._job)
        caches.pods.add_handler(self._pod)
        caches.services.add_handler(self._owned)
        caches.budgets.add_handler(self._owned)
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
        """Its agent is dead: the others are told now, not when its lease lapses."""
        worker, uid = observe.worker_pod(pod), controller_uid(pod.metadata)
        if worker is not None and uid is not None:
            self._rounds.withdraw_pod(uid, Worker(worker.uid, worker.index, worker.incarnation))

    def _owned(self, delta: Delta[Service] | Delta[PodDisruptionBudget]) -> None:
        if (key := owner_key(delta.object)) is not None:
            self._queue.add(key)

    def _node(self, delta: Delta[Node]) -> None:
        """A node's heartbeat changes nothing; its Ready condition, and its end, do."""
        node = delta.object
        if isinstance(delta, Updated) and observe.node_view(delta.old).ready == observe.node_view(node).ready:
            return
        lost = isinstance(delta, Deleted) or not observe.node_view(node).ready
        for pod in self._caches.pods.by_index(BY_NODE, node.metadata.name):
            if lost:
                self._withdraw(pod)
            if (key := owner_key(pod)) is not None:
                self._queue.add(key)

    def exists(self, identity: PodIdentity) -> bool:
        """Whether the caches know that pod, of this operator's."""
        pod = self._caches.pods.get(identity.namespace, identity.pod_name)
        return pod is not None and pod.metadata.uid == identity.pod_uid

    def tenant(self, identity: PodIdentity) -> Tenant:
        """Whose part of the operator a pod has."""
        pod = self._caches.pods.get(identity.namespace, identity.pod_name)
        job = controller_uid(pod.metadata) if pod is not None and pod.metadata.uid == identity.pod_uid else None
        return Tenant(identity.namespace, job or "", identity.pod_uid)

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
        # A pod whose agent joins rounds has none of its own; its reports are sorted by the round that each names.
        if worker.round > 0 and report.round != worker.round:
            raise ReportRefused(f"pod {identity.pod_name} is of round {worker.round}, not {report.round}")
        newest = worker.round or self._newest_round(job)
        if newest is not None and report.round > newest:
            raise ReportRefused(f"round {report.round} has not begun: the newest of {job.metadata.name} is {newest}")
        claimant = pod.metadata.uid if newest is None else None
        if self._reconciler.progress_of(job).accept(report, self._clock.now(), claimant):
            self._queue.add(key)
        else:
            self._queue.add_after(key, _REPORT_DELAY)

    def _newest_round(self, job: Unstructured) -> int | None:
        """The round that no worker can be ahead of; None: nobody but the agents knows their rounds."""
        if rendezvous_backend(job) != BACKEND:
            return None
        view = self._rounds.view(job_ref(job))
        # Not read yet by a leader that has just begun: the number is in the status before any agent hears of it.
        return view.round if view is not None else published_round(job)

    async def agent(self, identity: PodIdentity) -> Agent:
        """The pod as an agent of a job whose rounds are kept here. Raises RoundsRefused, RoundsUnavailable."""
        pod = self._caches.pods.get(identity.namespace, identity.pod_name)
        if pod is None or pod.metadata.uid != identity.pod_uid:
            pod = await self._find(identity)
        if has_ended(pod):
            raise RoundsRefused(f"pod {identity.pod_name} has ended")
        key = owner_key(pod)
        job = self._caches.jobs.get(*key) if key is not None else None
        worker = observe.worker_pod(pod)
        if key is None or worker is None:
            raise RoundsRefused(f"pod {identity.pod_name} belongs to no TrainingJob")
        if job is None or controller_uid(pod.metadata) != job.metadata.uid:
            # Not for good: the two caches are of different moments. A job that is gone takes its pods with it.
            raise RoundsUnavailable(f"pod {identity.pod_name}: its TrainingJob {key[1]} is not known at the moment")
        backend = rendezvous_backend(job)
        if backend != BACKEND:
            raise RoundsRefused(
                f"job {job.metadata.name} has rendezvous.backend {backend}: its rounds are not kept here"
            )
        return Agent(job_ref(job), Worker(worker.uid, worker.index, worker.incarnation))

    async def _find(self, identity: PodIdentity) -> Pod:
        """A pod that the cache does not know (yet): a young one is ahead of the watch."""
        try:
            async with self._asking:
                pod = await self._client.get(PODS, identity.namespace, identity.pod_name)
        except NotFound as e:
            raise RoundsRefused(f"pod {identity.pod_name} is gone") from e
        except KubeError as e:
            raise RoundsUnavailable(f"pod {identity.pod_name} cannot be looked up: {e}") from e
        if pod.metadata.uid != identity.pod_uid:
            raise RoundsRefused(f"pod {identity.pod_name} is gone, another has its name")
        return pod


def round_views(caches: Caches, rounds: RoundStore) -> observe.RoundViews:
    """A job's round by its UID, for a plan; None where rounds are not kept here, or not known yet."""

    def view(job_uid: str) -> RoundView | None:
        job = next(iter(caches.jobs.by_index(BY_UID, job_uid)), None)
        if job is None or rendezvous_backend(job) != BACKEND:
            return None
        return rounds.view(job_ref(job))

    return view


def has_ended(pod: Pod) -> bool:
    """Whether nothing of the worker runs any more."""
    worker = observe.worker_pod(pod)
    return pod.status.phase in ("Succeeded", "Failed") or (worker is not None and worker.exit is not None)


def rendezvous_backend(job: Unstructured) -> str:
    """Without the rest of the spec: agents must not wait for a spec that this version does not understand."""
    return str((job.spec.get("rendezvous") or {}).get("backend", BACKEND))


def job_ref(job: Unstructured) -> JobRef:
    return JobRef(job.metadata.namespace, job.metadata.name, job.metadata.uid)


def index_uid(job: Unstructured) -> tuple[str, ...]:
    return (job.metadata.uid,)


def authenticator(client: KubeClient) -> Authenticate:
    """Who a bearer token is, by TokenReview: a deleted pod's token dies with it."""

    async def authenticate(token: str) -> PodIdentity | None:
        review = await client.review_token(token, (labels.TOKEN_AUDIENCE,))
        if not isinstance(review, TokenIdentity) or not review.pod_uid:
            return None
        # A server that does not know audiences answers for its own, and names none.
        if labels.TOKEN_AUDIENCE not in review.audiences:
            log.warning(
                "the API server confirmed a token for other audiences: it is refused",
                extra={"namespace": review.namespace, "pod": review.pod_name, "audiences": review.audiences[:8]},
            )
            return None
        return PodIdentity(review.namespace, review.pod_name, review.pod_uid)

    return authenticate
