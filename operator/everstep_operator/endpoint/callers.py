"""Finds the pod and the job of a caller, once for each request.

A token proves which pod sent a request (`token_reviews`). This module finds the other data on that pod in the caches,
and they are passed on with the request: the tenant whose share it uses, the job on which it may report, and the worker
whose agent it is. Invariant: a pod or job of the same name with another UID is never confused with it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from everstep_operator.endpoint.tenant_limits import Tenant
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.errors import RetryableError, TerminalError
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import KubeError, NotFound
from everstep_operator.kube.resources import PODS
from everstep_operator.kube.wire import Pod, Unstructured, controller_uid
from everstep_operator.runtime.informers import Informers
from everstep_operator.worker_pods import Key, WorkerLabels, owner_key, worker_labels

MAX_LOOK_UPS = 8  # requests for pods at once


class CallerRefused(TerminalError):
    """The pod is gone; the message is sent to the caller."""


class CallerUnknown(RetryableError):
    """The pod cannot be looked up at the moment."""


@dataclass(frozen=True, slots=True)
class Caller:
    """`pod` is None if the caches do not know it (yet); `job` is None if they do not know the pod's job."""

    identity: PodIdentity
    pod: Pod | None = None
    job: Unstructured | None = None

    @property
    def tenant(self) -> Tenant:
        """The tenant whose share of the operator the caller uses."""
        job = controller_uid(self.pod.metadata) if self.pod is not None else None
        return Tenant(self.identity.namespace, job or "", self.identity.pod_uid)

    @property
    def job_key(self) -> Key | None:
        """The job that controls the pod, whether it is known or not."""
        return owner_key(self.pod) if self.pod is not None else None

    @property
    def worker(self) -> WorkerLabels | None:
        return worker_labels(self.pod) if self.pod is not None else None


class Callers:
    """`client` is used only for a calling pod that the caches do not know."""

    def __init__(self, pods: Informers[Pod], jobs: Informers[Unstructured], client: KubeClient) -> None:
        self._pods, self._jobs, self._client = pods, jobs, client
        self._look_ups = asyncio.Semaphore(MAX_LOOK_UPS)

    def find(self, identity: PodIdentity) -> Caller:
        """The caller, as far as the caches know it."""
        pod = self._pods.get(identity.namespace, identity.pod_name)
        if pod is None or pod.metadata.uid != identity.pod_uid:
            return Caller(identity)
        return self._with_job(Caller(identity, pod))

    def exists(self, identity: PodIdentity) -> bool:
        """Whether the caches know that pod as one of this operator's."""
        return self.find(identity).pod is not None

    async def look_up(self, caller: Caller) -> Caller:
        """The caller with its pod, read from the API server: a young pod may call before the watch shows it.

        Raises CallerRefused, CallerUnknown.
        """
        if caller.pod is not None:
            return caller
        identity = caller.identity
        try:
            async with self._look_ups:
                pod = await self._client.get(PODS, identity.namespace, identity.pod_name)
        except NotFound as e:
            raise CallerRefused(f"pod {identity.pod_name} is gone") from e
        except KubeError as e:
            raise CallerUnknown(f"pod {identity.pod_name} cannot be looked up: {e}") from e
        if pod.metadata.uid != identity.pod_uid:
            raise CallerRefused(f"pod {identity.pod_name} is gone, another has its name")
        return self._with_job(replace(caller, pod=pod))

    def _with_job(self, caller: Caller) -> Caller:
        assert caller.pod is not None
        key = caller.job_key
        job = self._jobs.get(*key) if key is not None else None
        if job is None or controller_uid(caller.pod.metadata) != job.metadata.uid:
            return caller
        return replace(caller, job=job)
