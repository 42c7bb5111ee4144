"""Makes the view of a local run. Pure: it turns objects and history into plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from everstep.jobs.history import StepSeen
from everstep.jobs.view import DELETED, EVENTS, EventRow, View, WorkerRow, observed, of_status, with_bounds
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
    *,
    deleted: bool = False,
) -> View:
    """`steps` has each pod's newest report, `pids` its main process, `memory` its greatest peaks. `deleted`: the job
    has been deleted, and this is what was seen of it last."""
    rows = [row for pod in pods if (row := _row(pod, steps, pids, memory)) is not None]
    seen = of_status(job.metadata.name, job.status, rows, tuple(events)[-EVENTS:])
    # The operator writes progress into the status every few seconds; the workers' own reports are newer.
    reached = [step for step in (seen.step, *(row.step for row in rows)) if step is not None]
    created = job.metadata.creation_timestamp
    began = created.isoformat() if created is not None else ""
    seen = with_bounds(seen, job.spec)
    if deleted:
        seen = replace(seen, status=DELETED, message="the job has been deleted; its workers end, its commits stay")
    return replace(
        seen,
        step=max(reached, default=None),
        notice=notice,
        began=began,
        observed=observed(job.metadata.generation, job.status),
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
        seen.step if seen is not None and seen.rank == 0 else None,
        worker.incarnation,
        pids.get(worker.name),
        *memory.get(worker.name, (None, None)),
    )
