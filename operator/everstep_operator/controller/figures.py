"""What the leader's metrics say of one job, and the nodes on which workers were lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta

from everstep_operator.api.conditions import Cause, ConditionType, ReadyReason, Rung
from everstep_operator.api.status import RecoveryRecord, StateSeconds, Status
from everstep_operator.controller.job_seconds import Noticed, Standing, State
from everstep_operator.controller.progress import JobProgress
from everstep_operator.plan.decide.completion import is_finished
from everstep_operator.plan.outcome import LostWorker
from everstep_operator.plan.render import recovery_record
from everstep_operator.plan.snapshot import JobView, WorkerPod
from everstep_operator.telemetry.job_metrics import JobFigures

MAX_JOBS = 1000
MAX_NODES = 1000

# Losses that may come from the worker's node. Who deletes a pod, drains a node or stops a peer says nothing about it.
_MAY_COME_FROM_NODE = frozenset(
    {
        Cause.ERROR,
        Cause.OOM_KILLED,
        Cause.SIGNALED,
        Cause.EVICTED,
        Cause.NODE_LOST,
        Cause.START_FAILED,
        Cause.START_TIMEOUT,
        Cause.REJECTED,
    }
)
_CHANGES = (ReadyReason.RECOVERING, ReadyReason.RESIZING, ReadyReason.UPDATING)


def recoveries_by_cause(records: Iterable[RecoveryRecord]) -> Counter[str]:
    """The recoveries that a status remembers. A world that is whole again has lost nobody, so it does not count."""
    return Counter(str(record.cause) for record in records if record.rung != Rung.REGROW)


def of_job(
    namespace: str,
    name: str,
    status: Status,
    reports: JobProgress,
    recoveries: Mapping[str, int],
    now: datetime,
) -> JobFigures:
    """The figures of a job from its last planned status and the reports since."""
    world, checkpoint, progress = status.world, status.checkpoint, reports.snapshot()
    trains = status.holds(ConditionType.QUORUM_REACHED)
    commit_step = progress.committed_step
    committed_at = progress.committed_at
    if commit_step is None:
        commit_step, committed_at = checkpoint.last_committed_step, checkpoint.committed_at
    if commit_step is None and checkpoint.url is not None:
        commit_step = 0
    active = status.active_seconds(now)
    productive = progress.productive_seconds
    last = _last_completed(status.recoveries)
    return JobFigures(
        namespace,
        name,
        workers=world.size if trains else 0,
        workers_wanted=world.size if status.roster is None else status.roster.wanted,
        spares=None if status.spares is None else status.spares.ready,
        start=_seconds(status.start_time),
        step=progress.step if progress.step is not None else status.progress.step,
        last_step=_seconds(progress.stepped_at),
        commit_step=commit_step,
        last_commit=_seconds(committed_at),
        goodput=min(1.0, productive / active) if productive > 0 and active > 0 else None,
        seconds={str(state): value for state, value in reports.seconds.seconds(now).items()},
        # Each cause from the beginning: the first recovery then is an increase.
        recoveries={**dict.fromkeys(map(str, Cause), 0), **recoveries},
        recovery_seconds={} if last is None else _stages(last),
        recovery_lost_steps=None if last is None else last.lost_steps,
    )


def standing(job: JobView, status: Status, pods: Iterable[WorkerPod]) -> Standing:
    """What a pass that made this status shows that the job does."""
    wanted = status.world.size if status.roster is None else status.roster.wanted
    if status.start_time is None or wanted == 0 or is_finished(status):
        return Standing.IDLE
    if status.holds(ConditionType.QUORUM_REACHED):
        ready = status.condition(ConditionType.READY)
        changes = ready is not None and ready.reason in _CHANGES
        trains = status.progress.updated_at is not None and not changes
        return Standing.TRAIN if trains else Standing.START
    running = sum(pod.running and _is_current(status, pod) for pod in pods)
    elastic = job.spec.elastic
    return Standing.FORM if running >= (wanted if elastic is None else elastic.min_replicas) else Standing.WAIT


def noticed(old: Status, new: Status, now: datetime) -> Noticed | None:
    """The loss for which `new` opens a recovery."""
    if not recovery_record.is_open(new.recoveries) or new.recoveries == old.recoveries:
        return None
    detect_ms = new.recoveries[0].detect_ms
    at = min(now, new.recoveries[0].at)  # the agents may have noticed it before this pass
    return Noticed(at, None if detect_ms is None else at - timedelta(milliseconds=detect_ms))


def state_seconds(seconds: Mapping[State, float]) -> StateSeconds:
    """For the status, in whole seconds: what is cut off is counted by the next leader."""
    return StateSeconds(**{str(state): int(value) for state, value in seconds.items()})


def _is_current(status: Status, pod: WorkerPod) -> bool:
    if status.roster is None:
        return pod.round == status.world.round
    return any(w.first <= pod.index <= w.last and w.incarnation == pod.incarnation for w in status.roster.workers)


def exclusions(statuses: Iterable[Status], in_use: Iterable[str]) -> dict[str, int]:
    """How many of these jobs avoid each node: the most avoided ones, and 0 for the other nodes that run workers."""
    counts = Counter(node.name for status in statuses for node in status.excluded_nodes)
    by_node = dict(counts.most_common(MAX_NODES))
    for node in in_use:
        if len(by_node) >= MAX_NODES:
            break
        by_node.setdefault(node, 0)
    return by_node


class NodeLosses:
    """How often a node was the first to lose a worker, for the nodes that did so last."""

    def __init__(self) -> None:
        self._losses: dict[str, int] = {}

    def add(self, lost: LostWorker) -> None:
        if lost.node is None or lost.cause not in _MAY_COME_FROM_NODE:
            return
        self._losses[lost.node] = self._losses.pop(lost.node, 0) + 1
        if len(self._losses) > MAX_NODES:
            del self._losses[next(iter(self._losses))]

    def by_node(self, in_use: Iterable[str]) -> dict[str, int]:
        """The losses, and 0 for the other nodes that run workers: the first loss then is an increase."""
        losses = dict(self._losses)
        for node in in_use:
            if len(losses) >= MAX_NODES:
                break
            losses.setdefault(node, 0)
        return losses

    def keep(self, nodes: Collection[str]) -> None:
        """Forget all others: a node that is gone has no series."""
        for name in self._losses.keys() - set(nodes):
            del self._losses[name]

    def clear(self) -> None:
        self._losses.clear()


def _last_completed(records: tuple[RecoveryRecord, ...]) -> RecoveryRecord | None:
    return next((r for r in records if r.rung != Rung.REGROW and r.first_step_ms is not None), None)


def _stages(record: RecoveryRecord) -> dict[str, float]:
    parts = {
        "detect": record.detect_ms,
        "rendezvous": record.rendezvous_ms,
        "restore": record.restore_ms,
        "first-step": record.first_step_ms,
    }
    return {stage: milliseconds / 1000 for stage, milliseconds in parts.items() if milliseconds is not None}


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()
