"""Keeps what this replica's caches have shown of each job, as a run of one machine keeps its history.

Every replica has it, because it needs no reports: the status of a job has its step, loss and world every few seconds.
Pods that were there before have their own times. Bounds: so many jobs, those that changed last; of each so many
entries, from which step reports go first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from everstep.jobs.history import READY, Entry, PodSeen, StatusSeen, StepSeen
from everstep.jobs.view import condition
from everstep_operator.controller import observe
from everstep_operator.controller.caches import BY_OWNER, Caches
from everstep_operator.kube.wire import Pod, Unstructured, controller_uid
from everstep_operator.plan.snapshot import PodPhase
from everstep_operator.runtime.cache import Added, Deleted, Delta

JOBS = 300
ENTRIES = 400  # of a job: about 60 KiB


@dataclass(slots=True)
class _Kept:
    """Times of the entries are seconds since the epoch."""

    namespace: str
    entries: list[Entry] = field(default_factory=list)
    status: tuple[Any, ...] = ()
    step: int | None = None


class Recorder:
    """It records from its making on. A pod belongs to the job that it names as its owner, in its own namespace."""

    def __init__(self, caches: Caches, now: Callable[[], datetime]) -> None:
        self._caches, self._now = caches, now
        self.since = now()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by the job's UID
        caches.jobs.add_handler(self._job)
        caches.pods.add_handler(self._pod)

    def history(self, uid: str, began: datetime) -> list[Entry]:
        """What was seen of a job, in order, in seconds since `began`."""
        kept = self._kept.get(uid)
        if kept is None:
            return []
        zero = began.timestamp()
        moved = [replace(entry, at=max(0.0, entry.at - zero)) for entry in kept.entries]
        return sorted(moved, key=lambda entry: entry.at)

    def _of(self, job: Unstructured) -> _Kept:
        uid = job.metadata.uid
        kept = self._kept.get(uid)
        if kept is None:
            kept = self._kept[uid] = _Kept(job.metadata.namespace)
            for pod in self._caches.pods.by_index(BY_OWNER, uid):
                self._pod(Added(pod))
        self._kept.move_to_end(uid)
        while len(self._kept) > JOBS:
            self._kept.popitem(last=False)
        return kept

    def _job(self, delta: Delta[Unstructured]) -> None:
        job = delta.object
        if isinstance(delta, Deleted):
            self._kept.pop(job.metadata.uid, None)
            return
        status, at = job.status, self._now().timestamp()
        ready, world, progress = condition(status, "Ready"), status.get("world") or {}, status.get("progress") or {}
        kept = self._of(job)
        if not ready:
            return
        committed = (status.get("checkpoint") or {}).get("lastCommittedStep")
        round_, size = int(world.get("round", 0)), int(world.get("size", 0))
        seen = str(ready.get("reason", "Pending")), round_, size, committed
        if seen != kept.status:
            kept.status = seen
            self._add(kept, StatusSeen(at, seen[0], "", round_, size, committed))
        step = progress.get("step")
        if step is not None and step != kept.step:
            kept.step = step
            self._add(kept, StepSeen(at, "", 0, 0, size, step, _loss(progress), round_))

    def _pod(self, delta: Delta[Pod]) -> None:
        pod = delta.object
        kept = self._kept.get(controller_uid(pod.metadata) or "")
        if kept is None or kept.namespace != pod.metadata.namespace:
            return
        worker = observe.worker_pod(pod)
        if worker is None:
            return
        now = self._now()
        seen: list[tuple[str, datetime]] = []
        if isinstance(delta, Deleted):
            seen = [("Deleted", now)]
        else:
            seen = [("Pending", worker.created_at or now)]
            if worker.ready:
                seen.append((READY, worker.ready_at or now))
            if worker.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED):
                seen.append((str(worker.phase), now))
        known = {entry.phase for entry in kept.entries if isinstance(entry, PodSeen) and entry.pod == worker.name}
        for phase, at in seen:
            if phase not in known:
                row = worker.name, worker.index, worker.round or 0, worker.node or "", phase
                self._add(kept, PodSeen(at.timestamp(), *row))

    def _add(self, kept: _Kept, entry: Entry) -> None:
        kept.entries.append(entry)
        if len(kept.entries) <= ENTRIES:
            return
        steps = [index for index, each in enumerate(kept.entries) if isinstance(each, StepSeen)]
        dropped = set(steps[::2]) if len(steps) > ENTRIES // 4 else set(range(ENTRIES // 8))
        kept.entries = [each for index, each in enumerate(kept.entries) if index not in dropped]


def _loss(progress: Any) -> float | None:
    try:
        loss = float((progress.get("metrics") or {}).get("loss", "nan"))
    except ValueError:
        return None
    return loss if math.isfinite(loss) else None
