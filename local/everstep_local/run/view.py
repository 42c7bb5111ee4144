"""Makes the view of a local run for a person, live and for `everstep status`. Pure: it turns objects and history into
plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from everstep_local.run.history import StepSeen
from everstep_operator.controller import observe
from everstep_operator.kube.wire import Pod, Unstructured

Peak = tuple[int, int | None]  # bytes of RAM, and of an accelerator's memory
EVENTS = 12  # newest events that are kept in a view


@dataclass(frozen=True, slots=True)
class WorkerRow:
    worker: int
    pod: str
    node: str
    state: str
    rank: int | None
    step: int | None
    restarts: int
    pid: int | None
    memory: int | None = None  # the greatest peak of a process of the pod, in bytes
    device_memory: int | None = None


@dataclass(frozen=True, slots=True)
class EventRow:
    at: str  # HH:MM:SS
    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class View:
    job: str
    status: str  # the reason of Ready: the STATUS column of kubectl
    message: str
    round: int
    size: int
    step: int | None
    total_steps: int | None
    committed: int | None
    restarts: int
    goodput: str
    workers: tuple[WorkerRow, ...]
    events: tuple[EventRow, ...]
    raw_status: Mapping[str, Any]
    rehearsed: str = ""  # the rehearsal of its program
    notice: str = ""  # why nothing happens to the job at the moment

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> View:
        rows = tuple(WorkerRow(**row) for row in body["workers"])
        events = tuple(EventRow(**event) for event in body["events"])
        return cls(**{**body, "workers": rows, "events": events})


def condition(job: Unstructured, type_: str) -> Mapping[str, Any]:
    """A condition of the job's status; empty if it has none of that type."""
    conditions = job.status.get("conditions") or ()
    return next((c for c in conditions if c.get("type") == type_), {})


def view(
    job: Unstructured,
    pods: Iterable[Pod],
    steps: Mapping[str, StepSeen],
    pids: Mapping[str, int],
    events: Iterable[EventRow],
    memory: Mapping[str, Peak],
    notice: str = "",
) -> View:
    """`steps` has each pod's newest report, `pids` its main process, `memory` its greatest peaks."""
    status = job.status
    ready = condition(job, "Ready")
    world, progress = status.get("world") or {}, status.get("progress") or {}
    rows = [row for pod in pods if (row := _row(pod, steps, pids, memory)) is not None]
    # The operator writes progress into the status every few seconds; the workers' own reports are newer.
    reached = [step for step in (progress.get("step"), *(row.step for row in rows)) if step is not None]
    return View(
        job=job.metadata.name,
        status=str(ready.get("reason", "Pending")),
        message=str(ready.get("message", "")),
        round=int(world.get("round", 0)),
        size=int(world.get("size", 0)),
        step=max(reached, default=None),
        total_steps=progress.get("totalSteps"),
        committed=(status.get("checkpoint") or {}).get("lastCommittedStep"),
        restarts=int((status.get("restarts") or {}).get("total", 0)),
        goodput=str(status.get("goodput", "")),
        workers=tuple(sorted(rows, key=lambda r: (r.worker, r.restarts))),
        events=tuple(events)[-EVENTS:],
        raw_status=dict(status),
        rehearsed=str(progress.get("rehearsed") or ""),
        notice=notice,
    )


def _row(
    pod: Pod, steps: Mapping[str, StepSeen], pids: Mapping[str, int], memory: Mapping[str, Peak]
) -> WorkerRow | None:
    worker = observe.worker_pod(pod)
    if worker is None:
        return None
    seen = steps.get(worker.name)
    state = str(worker.state)
    if worker.deleted_at is not None:
        state = "Terminating"
    elif worker.waiting is not None:
        state = worker.waiting
    elif worker.running:
        state = "training" if seen is not None else "starting"
    return WorkerRow(
        worker.index,
        worker.name,
        worker.node or "",
        state,
        seen.rank if seen is not None else None,
        seen.step if seen is not None else None,
        worker.incarnation,
        pids.get(worker.name),
        *memory.get(worker.name, (None, None)),
    )


def clock_time(moment: datetime) -> str:
    """The time on the person's own clock."""
    return moment.astimezone().strftime("%H:%M:%S")
