"""What a person sees of a job: plain data, the same for a cluster, a run of this machine, and one that has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from everstep.contract import labels

DELETED = "Deleted"  # the status of a job that has been deleted, and may still have pods that end
SPARE = "spare"  # the state of such a worker
EVENTS = 12  # newest events that are kept in a view
Object = Mapping[str, Any]  # as the API server's JSON has it


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """`rank`, `step`, `pid` and the peaks of memory, in bytes, are known of runs of this machine alone. `step`: only of
    the worker with rank 0, because the others report no steps but their first. `incarnation`: how many pods of this
    worker there were before; a loss, a change of the job and a suspension each end one. `state` is `spare` while it
    waits to take the place of a lost worker."""

    worker: int
    pod: str
    node: str
    state: str
    rank: int | None
    step: int | None
    incarnation: int
    pid: int | None
    memory: int | None = None  # the greatest peak of a process of the pod
    device_memory: int | None = None


@dataclass(frozen=True, slots=True)
class EventRow:
    at: str  # RFC 3339; empty if it is not known
    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class View:
    """One job."""

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
    namespace: str = ""  # empty for a run of this machine
    began: str = ""  # RFC 3339
    as_of: str = ""  # RFC 3339: when it was so; empty: now
    observed: bool = True  # the status is about the spec as it is now
    ready: int = 0  # workers
    wanted: int = 0  # workers
    fewest: int | None = None  # of an elastic job: the workers below and above which it is not scaled
    most: int | None = None

    @classmethod
    def unknown(cls, job: str) -> View:
        """Of a job that nobody has seen yet."""
        return cls(job, "Pending", "it has just begun", 0, 0, None, None, None, 0, "", (), (), {})

    @property
    def committed_at(self) -> str:
        """When the newest commit was made, RFC 3339; empty if nothing is committed."""
        return str((self.raw_status.get("checkpoint") or {}).get("committedAt") or "")

    @property
    def checkpoint_url(self) -> str:
        """Where the commits are; empty if the status names no place."""
        return str((self.raw_status.get("checkpoint") or {}).get("url") or "")

    @property
    def spares(self) -> str:
        """How many spares wait, such as `1 of 2`; empty if the job has none."""
        spares = self.raw_status.get("spares") or {}
        return f"{spares.get('ready') or 0} of {spares['wanted']}" if spares.get("wanted") else ""

    @property
    def earlier_runs(self) -> list[str]:
        """What became of the runs before this one, newest first."""
        return [
            f"{run.get('outcome')} at step {run.get('step') if run.get('step') is not None else '–'}, "
            f"{run.get('endedAt') or 'at an unknown time'}: {run.get('message') or ''}"
            for run in self.raw_status.get("history") or ()
        ]

    @property
    def over_at(self) -> datetime | None:
        """When the job was over, or when it was so; None while it goes on."""
        end = str(self.raw_status.get("completionTime") or "") if ended(self.raw_status) else ""
        return moment(end) or moment(self.as_of)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_summary_json(self) -> dict[str, Any]:
        """Without what a summary does not have."""
        return {key: value for key, value in self.to_json().items() if key not in ("workers", "events")}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> View:
        rows = tuple(WorkerRow(**row) for row in body["workers"])
        events = tuple(EventRow(**event) for event in body["events"])
        return cls(**{**body, "workers": rows, "events": events})


def condition(status: Object, type_: str) -> Object:
    """A condition of the job's status; empty if it has none of that type."""
    conditions = status.get("conditions") or ()
    return next((c for c in conditions if c.get("type") == type_), {})


def ended(status: Object) -> bool:
    """Whether the job is complete or has failed."""
    return any(condition(status, end).get("status") == "True" for end in ("Complete", "Failed"))


def of_status(job: str, status: Object, workers: Iterable[WorkerRow], events: Iterable[EventRow]) -> View:
    """What a TrainingJob's status says, with its workers in any order, and its events, oldest first."""
    ready = condition(status, "Ready")
    world, progress = status.get("world") or {}, status.get("progress") or {}
    waiting = (status.get("spares") or {}).get("workers") or ()
    workers = (
        replace(row, state=SPARE) if row.worker in waiting and row.state in ("training", "starting") else row
        for row in workers
    )
    return View(
        job=job,
        status=str(ready.get("reason", "Pending")),
        message=str(ready.get("message", "")),
        round=int(world.get("round", 0)),
        size=int(world.get("size", 0)),
        step=progress.get("step"),
        total_steps=progress.get("totalSteps"),
        committed=(status.get("checkpoint") or {}).get("lastCommittedStep"),
        restarts=int((status.get("restarts") or {}).get("total", 0)),
        goodput=str(status.get("goodput") or ""),
        workers=tuple(sorted(workers, key=lambda row: (row.worker, row.incarnation))),
        events=tuple(events),
        raw_status=dict(status),
        rehearsed=str(progress.get("rehearsed") or ""),
        ready=int(status.get("readyReplicas") or 0),
        wanted=int(status.get("replicas") or 0),
    )


def observed(generation: int | None, status: Object) -> bool:
    """Whether the operator has written this status with the spec of that generation in view."""
    return generation is None or int(status.get("observedGeneration") or 0) >= generation


def with_bounds(view: View, spec: Object) -> View:
    """The view with the fewest and the most workers of an elastic job; one of a fixed size has none."""
    elastic = spec.get("elastic") or {}
    return replace(view, fewest=elastic.get("minReplicas"), most=elastic.get("maxReplicas"))


def of_objects(job: Object, pods: Iterable[Object] = (), events: Iterable[Object] = ()) -> View:
    """A view of a cluster's objects: the TrainingJob, its pods, its events (events.k8s.io/v1), oldest first."""
    meta = job["metadata"]
    workers = [row for pod in pods if (row := _worker(pod)) is not None]
    view = replace(
        of_status(meta["name"], job.get("status") or {}, workers, map(event_row, events)),
        namespace=meta.get("namespace", ""),
        began=str(meta.get("creationTimestamp", "")),
        observed=observed(meta.get("generation"), job.get("status") or {}),
    )
    view = with_bounds(view, job.get("spec") or {})
    if not meta.get("deletionTimestamp"):
        return view
    waits = ", ".join(meta.get("finalizers") or ())
    return replace(view, status=DELETED, message=f"it has been deleted, and is gone when {waits} allow it")


def _worker(pod: Object) -> WorkerRow | None:
    meta = pod["metadata"]
    marks = meta.get("labels") or {}
    if not str(marks.get(labels.WORKER_INDEX, "")).isdecimal():
        return None
    incarnation = str(marks.get(labels.INCARNATION, "0"))
    return WorkerRow(
        worker=int(marks[labels.WORKER_INDEX]),
        pod=meta["name"],
        node=str((pod.get("spec") or {}).get("nodeName") or ""),
        state=_state(pod),
        rank=None,
        step=None,
        incarnation=int(incarnation) if incarnation.isdecimal() else 0,
        pid=None,
    )


def _state(pod: Object) -> str:
    """One word: what the worker's own container does, and why a pod without one waits."""
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    status = pod.get("status") or {}
    containers = {c["name"]: c.get("state") or {} for c in status.get("containerStatuses") or ()}
    state = containers.get(labels.WORKER_CONTAINER, {})
    if "terminated" in state:
        return "Succeeded" if state["terminated"].get("exitCode") == 0 else "Failed"
    if "running" in state:
        ready = condition(status, "Ready").get("status") == "True"
        return "training" if ready else "starting"
    if status.get("phase") in ("Failed", "Succeeded"):
        return str(status.get("reason") or status["phase"])
    waiting = [
        str(each["state"]["waiting"].get("reason") or "")
        for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
        if "waiting" in (each.get("state") or {})
    ]
    unplaced = condition(status, "PodScheduled")
    if unplaced.get("status") == "False":
        return str(unplaced.get("reason") or "Pending")
    return next((reason for reason in waiting if reason and reason != "PodInitializing"), "Pending")


def event_row(event: Object) -> EventRow:
    return EventRow(
        event_time(event),
        str(event.get("type") or ""),
        str(event.get("reason") or ""),
        str(event.get("note") or ""),
    )


def event_time(event: Object) -> str:
    """When it was seen last, RFC 3339; empty if it does not say."""
    series = event.get("series") or {}
    last = series.get("lastObservedTime") or event.get("deprecatedLastTimestamp") or event.get("eventTime")
    return str(last or event["metadata"].get("creationTimestamp") or "")


def moment(text: str) -> datetime | None:
    """The time that an RFC 3339 text names; None if it is none."""
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        return None
    return parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)


def clock_time(text: str) -> str:
    """HH:MM:SS on the person's own clock of what an RFC 3339 text names, with its date if that is not today's; the text
    itself if it names no time."""
    at = moment(text)
    if at is None:
        return text
    own = at.astimezone()
    return own.strftime("%H:%M:%S" if own.date() == datetime.now().astimezone().date() else "%Y-%m-%d %H:%M:%S")


def byte_size(count: int) -> str:
    """`512 B`, `1.2 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def age(began: str, now: datetime) -> str:
    """`12s`, `3m`, `5h`, `2d` since then; empty if it is not known."""
    at = moment(began)
    if at is None:
        return ""
    seconds = max(0, int((now - at).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
