"""The jobs of a cluster, from the caches of this replica. Only the events of a job are asked for.

Invariant: nothing of a namespace in which the reader may not get TrainingJobs is answered, not even that it exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from everstep.jobs.history import ActionTaken, Entry
from everstep.jobs.view import event_time, moment, of_objects
from everstep_operator import object_names
from everstep_operator.controller.caches import BY_OWNER, Caches
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import KubeError
from everstep_operator.kube.resources import EVENTS
from everstep_operator.kube.wire import ObjectMeta, Pod, Unstructured, rfc3339, to_body
from everstep_operator.page.model import Detail, Fleet, JobUnknown, Listed, May, Stack, Unavailable
from everstep_operator.page.recorder import Recorder
from everstep_operator.worker_pods import worker_labels

NAMESPACES = 1000  # that are looked at for one list of jobs
AT_ONCE = 250  # jobs, from one turn of the event loop to the next
LISTED_SECONDS = 2.0
PODS = 256  # of a job
EVENTS_READ = 500


class ClusterJobs:
    """`client`: for events alone."""

    def __init__(self, caches: Caches, client: KubeClient, recorder: Recorder, monotonic: Callable[[], float]) -> None:
        self._caches, self._client, self._recorder, self._monotonic = caches, client, recorder, monotonic
        self._all: list[Listed] = []  # what all readers share for `LISTED_SECONDS`
        self._until = float("-inf")  # monotonic seconds
        self._listing = asyncio.Lock()

    async def fleet(self, may: May) -> Fleet:
        notes = [] if (starting := self._caches.waiting()) is None else [f"This replica starts: it {starting}."]
        listed = await self._listed()
        namespaces = sorted({each.where for each in listed})
        if len(namespaces) > NAMESPACES:
            notes.append(f"Jobs of the first {NAMESPACES} of {len(namespaces)} namespaces are shown.")
            namespaces = namespaces[:NAMESPACES]
        # The first answer may be about all of them, which makes the others free.
        first = [await may(name) for name in namespaces[:1]]
        rights = [*first, *await asyncio.gather(*map(may, namespaces[1:]))]
        allowed = {name for name, right in zip(namespaces, rights, strict=True) if right}
        if namespaces and not allowed:
            notes.append("There are jobs in no namespace in which you may get trainingjobs.everstep.dev.")
        return Fleet([each for each in listed if each.where in allowed], notes)

    async def _listed(self) -> list[Listed]:
        """All jobs. Ten thousand take 0.4 s, so readers share them, and the event loop turns meanwhile."""
        async with self._listing:
            if self._monotonic() >= self._until:
                listed: list[Listed] = []
                for index, job in enumerate(self._caches.jobs.list(), 1):
                    listed.append(_listed(job))
                    if index % AT_ONCE == 0:
                        await asyncio.sleep(0)
                self._all, self._until = listed, self._monotonic() + LISTED_SECONDS
            return self._all

    async def detail(self, may: May, key: str) -> Detail:
        job = await self._job(may, key)
        uid, created = job.metadata.uid, job.metadata.creation_timestamp
        notes: list[str] = []
        events: Sequence[Mapping[str, Any]] = ()
        try:
            read = await self._client.list(
                EVENTS, job.metadata.namespace, field_selector=f"regarding.uid={uid}", limit=EVENTS_READ, pages=1
            )
            events = sorted((to_body(event) for event in read.items), key=event_time)
        except KubeError as e:
            notes.append(f"The events cannot be read: {e}")
        own = self._caches.pods.by_index(BY_OWNER, uid)
        pods = sorted((pod for pod in own if pod.metadata.namespace == job.metadata.namespace), key=_index)
        if len(pods) > PODS:
            notes.append(f"The first {PODS} of {len(pods)} pods are shown.")
        view = of_objects(_body(job), [to_body(pod) for pod in pods[:PODS]], events)
        url = view.checkpoint_url
        name, namespace = job.metadata.name, job.metadata.namespace
        history = [] if created is None else [*self._recorder.history(uid, created), *_losses(job, created)]
        return Detail(
            Listed(key, namespace, view),
            view.events,
            sorted(history, key=lambda entry: entry.at),
            f"Seen by this replica since {rfc3339(self._recorder.since)}; pods of before have their own times.",
            None,
            f"The operator has no account of the store. With yours: everstep ckpt list {url}" if url else "",
            f"everstep stacks {name} -n {namespace}",
            notes,
        )

    async def stacks(self, may: May, key: str) -> Sequence[Stack]:
        job = await self._job(may, key)
        command = f"everstep stacks {job.metadata.name} -n {job.metadata.namespace}"
        raise Unavailable(f"The operator asks no processes. With your own rights: {command}")

    async def _job(self, may: May, key: str) -> Unstructured:
        namespace, _, name = key.partition("/")
        # Asked first, so that the time of the answer says nothing about whether the job exists.
        if not object_names.is_namespace(namespace) or not await may(namespace):
            raise JobUnknown(key)
        job = self._caches.jobs.get(namespace, name)
        if job is None:
            raise JobUnknown(key)
        return job


def _listed(job: Unstructured) -> Listed:
    return Listed(f"{job.metadata.namespace}/{job.metadata.name}", job.metadata.namespace, of_objects(_body(job)))


def _body(job: Unstructured) -> dict[str, Any]:
    """What `of_objects` reads of a TrainingJob; its spec and status are the cache's own."""
    return {"metadata": _meta(job.metadata), "spec": job.spec, "status": job.status}


def _meta(meta: ObjectMeta) -> dict[str, Any]:
    body: dict[str, Any] = {"name": meta.name, "namespace": meta.namespace, "generation": meta.generation or None}
    if meta.creation_timestamp is not None:
        body["creationTimestamp"] = rfc3339(meta.creation_timestamp)
    if meta.deletion_timestamp is not None:
        body |= {"deletionTimestamp": rfc3339(meta.deletion_timestamp), "finalizers": list(meta.finalizers)}
    return body


def _index(pod: Pod) -> tuple[int, int]:
    worker = worker_labels(pod)
    return (worker.index, worker.incarnation) if worker is not None else (2**31, 0)


def _losses(job: Unstructured, created: datetime) -> list[Entry]:
    """The recoveries of the status as marks in the timeline."""
    marks: list[Entry] = []
    for record in job.status.get("recoveries") or ():
        at = moment(str(record.get("at") or ""))
        if at is not None and record.get("rung") != "regrow":
            worker = record.get("worker")
            text = f"worker {worker}: {record.get('cause')}"
            marks.append(ActionTaken(max(0.0, (at - created).total_seconds()), text, worker))
    return marks
