"""Reads why the kubelet does not start a pod: a volume that does not mount stands in the pod's events alone.

Bounds: one list a minute for each job, of one page of one pod's warnings, and few at a time. Whatever goes wrong here
costs only the reason: the status then names the command that shows it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from everstep_operator.controller.pod_start import MAX_WORDS, NOT_PREPARED
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import KubeError
from everstep_operator.kube.resources import EVENTS
from everstep_operator.kube.wire import Event
from everstep_operator.plan.render.waits import START_PATIENCE
from everstep_operator.plan.snapshot import WorkerPod
from everstep_operator.runtime.clock import Clock, within

log = logging.getLogger("everstep.reconcile")

AGAIN = timedelta(seconds=60)
SECONDS = 2.0  # that a list may take: the pass waits for it
AT_A_TIME = 4
# The reasons of the kubelet, and of the controller that attaches volumes.
_REASONS = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox"})
_LONG_AGO = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class PodReason:
    """Why the pod with this UID did not start when it was read; None if no event said so."""

    pod_uid: str
    reason: str | None
    read_at: datetime


class PodEvents:
    """Shared by all jobs: at most `AT_A_TIME` lists are under way."""

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._slots = asyncio.Semaphore(AT_A_TIME)

    async def read(self, namespace: str, pods: Iterable[WorkerPod], known: PodReason | None) -> PodReason | None:
        """The reason of the pod of which the status speaks: the first that has waited long for its volumes or its
        network. `known`: what was read before. None: no pod waits for that."""
        now = self._clock.now()
        waiting = [
            pod for pod in pods if pod.starting == NOT_PREPARED and pod.deleted_at is None and _has_waited(pod, now)
        ]
        if not waiting:
            return None
        pod = min(waiting, key=lambda pod: pod.index)
        if known is not None and known.pod_uid == pod.uid and now - known.read_at < AGAIN:
            return known
        return PodReason(pod.uid, await self._newest(namespace, pod), now)

    async def _newest(self, namespace: str, pod: WorkerPod) -> str | None:
        try:
            async with self._slots:
                selector = f"regarding.uid={pod.uid},type=Warning"
                listed = await within(
                    self._clock, SECONDS, self._client.list(EVENTS, namespace, field_selector=selector, pages=1)
                )
        except (KubeError, TimeoutError) as error:
            log.warning("events of a pod not read", extra={"pod": f"{namespace}/{pod.name}", "error": str(error)})
            return None
        events = [event for event in listed.items if event.reason in _REASONS]
        if not events:
            return None
        newest = max(events, key=_seen_at)
        return f"{newest.reason}: {' '.join(newest.note.split())[:MAX_WORDS]}"


def _has_waited(pod: WorkerPod, now: datetime) -> bool:
    return pod.created_at is not None and now - pod.created_at >= START_PATIENCE


def _seen_at(event: Event) -> datetime:
    series = event.series.last_observed_time if event.series is not None else None
    times = (series, event.deprecated_last_timestamp, event.event_time, event.metadata.creation_timestamp)
    return max((time for time in times if time is not None), default=_LONG_AGO)
