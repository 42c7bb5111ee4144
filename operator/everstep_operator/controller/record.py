"""Writes a plan's status and events: one status patch a pass, and events only after it.

The patch contains the observed resource version, so it is a compare-and-swap. Of two operators, only one can publish a
round or charge a restart, and an operator with an old view cannot. Fields that are gone are deleted explicitly; fields
that this version does not know are left alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from everstep.contract import labels
from everstep_operator.api.events import EventReason, event_type
from everstep_operator.api.status import Status
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import AlreadyExists, KubeError
from everstep_operator.kube.resources import EVENTS, Resource
from everstep_operator.kube.wire import Unstructured, micro_time
from everstep_operator.plan.outcome import Event
from everstep_operator.plan.snapshot import JobView
from everstep_operator.runtime.fair_queueing import Flow
from everstep_operator.runtime.write_limit import WriteLane, WriteLimit

log = logging.getLogger("everstep.record")

MAX_NOTE = 1000
# Events that repeat as long as a job runs: one event object with a count for so many seconds, instead of one object
# each time. The API server lets nobody change an event's text, so it is that of the first one, and says so.
SERIES_SECONDS = 600
_SERIES = {
    EventReason.CHECKPOINT_COMMITTED: "; for ten minutes this event counts the following commits, "
    "and status.checkpoint.lastCommittedStep has the newest"
}
_KNOWN = frozenset(field.alias or name for name, field in Status.model_fields.items())


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) that turns `old` into `new`."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := merge_patch(before, value):
                patch[key] = inner
        elif value != before:
            patch[key] = value
    return patch


class Recorder:
    """`require_leading` raises when this replica may not write."""

    def __init__(
        self,
        client: KubeClient,
        jobs: Resource[Unstructured],
        *,
        instance: str,
        require_leading: Callable[[], object],
        now: Callable[[], datetime],
        limit: WriteLimit,
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._instance = instance
        self._require_leading = require_leading
        self._now = now
        self._limit = limit

    async def write_status(self, obj: Unstructured, status: Status) -> str | None:
        """Compare-and-swap the status; the new resource version, None if nothing differs. Raises Conflict."""
        old = {key: value for key, value in obj.status.items() if key in _KNOWN}
        patch = merge_patch(old, status.to_wire())
        if not patch:
            return None
        namespace, name = obj.metadata.namespace, obj.metadata.name
        async with self._limit.slot(WriteLane.CHANGE, Flow(namespace, name)):
            self._require_leading()
            written = await self._client.patch_status(
                self._jobs, namespace, name, patch, resource_version=obj.metadata.resource_version
            )
        return written.metadata.resource_version

    async def write_events(self, job: JobView, events: tuple[Event, ...]) -> None:
        """Write events. An event that cannot be written is only logged, because events are for people."""
        for event in events:
            try:
                async with self._limit.slot(WriteLane.EVENT, Flow(job.namespace, job.name)):
                    self._require_leading()
                    await self._write_event(job, event)
            except KubeError as e:
                log.warning("event not written", extra={"job": job.key, "reason": event.reason, "error": str(e)})

    async def _write_event(self, job: JobView, event: Event) -> None:
        moment = self._now()
        now = micro_time(moment)
        series = _SERIES.get(event.reason)
        note = f"{event.message}{series or ''}"[:MAX_NOTE]
        # A series has one name per job, reason and window; any other event is named by its content and moment.
        window = int(moment.timestamp()) // SERIES_SECONDS
        seed = f"{job.uid}/{event.reason}/{window}" if series else f"{job.uid}/{event.reason}/{note}/{now}"
        name = f"{job.name}.{hashlib.sha256(seed.encode()).hexdigest()[:16]}"
        try:
            await self._client.create(EVENTS, job.namespace, self._event(job, event, name, note, now))
        except AlreadyExists:
            existing = await self._client.get(EVENTS, job.namespace, name)
            count = (existing.series.count if existing.series is not None else 1) + 1
            patch = {"series": {"count": count, "lastObservedTime": now}}
            await self._client.merge_patch(EVENTS, job.namespace, name, patch)

    def _event(self, job: JobView, event: Event, name: str, note: str, now: str) -> dict[str, Any]:
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": job.namespace, "labels": {labels.JOB: job.name}},
            "eventTime": now,
            "reportingController": "everstep.dev/operator",
            "reportingInstance": self._instance[:128],
            "action": "Reconcile",
            "reason": event.reason,
            "type": event_type(event.reason),
            "note": note,
            "regarding": {
                "apiVersion": labels.API_VERSION,
                "kind": labels.KIND,
                "namespace": job.namespace,
                "name": job.name,
                "uid": job.uid,
                "resourceVersion": job.resource_version,
            },
        }
