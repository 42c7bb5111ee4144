"""Makes the view of a local run. Pure: it turns objects and history into plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.cli.jobs.view import EVENTS, EventRow, View, WorkerRow, condition
from everstep_local.run.history import StepSeen
from everstep_operator.controller import observe
from everstep_operator.kube.wire import Pod, Unstructured

Peak = tuple[int, int | None]  # bytes of RAM, and of an accelerator's memory


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
    ready = condition(status, "Ready")
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
        began=created.isoformat() if (created := job.metadata.creation_timestamp) is not None else "",
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
