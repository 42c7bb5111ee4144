"""One pass over one job: observe, plan, write the status, act, write events.

The order is the protocol (ADR 0001). The status is written first, by compare-and-swap. Only if that was accepted, the
plan's stages are carried out and its events written. A pass never acts on a view that is older than the last write of
this replica. A pass may stop after any of its writes: the next one derives what is missing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from everstep_operator import object_names
from everstep_operator.api.base import SpecError
from everstep_operator.api.conditions import ConditionStatus, ConditionType, ReadyReason, Rung
from everstep_operator.api.parse import parse_status
from everstep_operator.api.status import Condition, Status
from everstep_operator.api.types import GangScheduler
from everstep_operator.controller import figures, fleet, observe
from everstep_operator.controller.apply import Applied, Applier
from everstep_operator.controller.caches import BY_OWNER, SUSPECT, Caches
from everstep_operator.controller.incidents import Incidents
from everstep_operator.controller.pod_events import AGAIN, PodEvents, PodReason
from everstep_operator.controller.progress import JobProgress
from everstep_operator.controller.queues import queue_name, queue_view
from everstep_operator.controller.record import Recorder
from everstep_operator.kube.wire import Service, Unstructured, controller_uid
from everstep_operator.plan.decide.completion import is_finished
from everstep_operator.plan.explain import explain
from everstep_operator.plan.outcome import Event, Plan
from everstep_operator.plan.planner import plan
from everstep_operator.plan.render import recovery_record
from everstep_operator.plan.snapshot import Fleet, JobView, NodeView, PodGroupView, Settings, Snapshot, WorkerPod
from everstep_operator.round_view import RoundView
from everstep_operator.rounds.documents import WriteFailure
from everstep_operator.runtime.cache import is_not_newer
from everstep_operator.runtime.clock import Clock, within
from everstep_operator.runtime.control_loop import Result
from everstep_operator.runtime.expectations import Expectations
from everstep_operator.telemetry.job_metrics import ClusterFigures
from everstep_operator.telemetry.metrics import Metrics
from everstep_operator.worker_pods import Key

log = logging.getLogger("everstep.reconcile")

# Progress alone is written to the API server no more often than this for one job.
PROGRESS_INTERVAL = timedelta(seconds=5)
EVENT_SECONDS = 5.0
_REFUSED_NEWS = 0.1  # seconds from a refusal to the plan that reports it
_OWN_WRITE_WAIT = 1.0  # seconds; the watch event normally comes first


@dataclass(slots=True)
class _JobMemory:
    """What this replica remembers of a job between passes. Its loss costs a moment, but never changes a decision."""

    uid: str
    progress: JobProgress
    recoveries: Counter[str]  # that began, by cause
    status: Status | None = None  # as it was planned last
    written: str = ""  # resource version of the last status write
    written_at: datetime | None = None
    applied: Applied = field(default_factory=Applied)
    pod_reason: PodReason | None = None


class Reconciler:
    def __init__(
        self,
        caches: Caches,
        applier: Applier,
        recorder: Recorder,
        expectations: Expectations[Key],
        *,
        clock: Clock,
        settings: Settings,
        metrics: Metrics,
        pod_events: PodEvents,
        incidents: Incidents,
        round_view: Callable[[Unstructured], RoundView | None],
        answers: Callable[[Unstructured, str], bool] = lambda _, __: False,
        forget: Callable[[str], None] = lambda _: None,
        rounds_write_failure: Callable[[Unstructured], WriteFailure] = lambda _: WriteFailure(),
    ) -> None:
        """`round_view` gives the round of a job; None if its rounds are not kept here, or are not known yet. `answers`:
        whether an agent of the pod with this UID renews its presence here. `rounds_write_failure`: why the job's
        ConfigMap cannot be written. `forget` gets the UID of a job that is gone, when no pass can use it any more."""
        self._caches = caches
        self._applier = applier
        self._recorder = recorder
        self._expectations = expectations
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        self._pod_events = pod_events
        self._incidents = incidents
        self._round_view = round_view
        self._answers = answers
        self._forget = forget
        self._rounds_write_failure = rounds_write_failure
        self._memory: dict[Key, _JobMemory] = {}
        self._node_losses = figures.NodeLosses()
        self._accusers = fleet.Accusers()
        self._able_nodes = fleet.AbleNodes()

    def trust(self, ca: str) -> None:
        """The authorities by which pods that are made from now on verify the operator, in PEM."""
        self._settings = replace(self._settings, ca=ca)

    def forget_all(self) -> None:
        """A new term of leadership begins: another replica may have decided since."""
        self._memory.clear()
        self._incidents.forget_all()
        self._node_losses.clear()
        self._expectations.expire(self._clock.monotonic())

    def progress_of(self, obj: Unstructured) -> JobProgress:
        return self._remember(obj).progress

    async def reconcile(self, key: Key) -> Result:
        obj = self._caches.jobs.get(*key)
        if obj is None:
            self._expectations.forget(key)
            if (memory := self._memory.pop(key, None)) is not None:
                self._is_gone(memory.uid)
            return Result("the job is gone", gone=True)
        memory = self._remember(obj)
        version = obj.metadata.resource_version
        if version != memory.written and is_not_newer(version, memory.written):
            return Result("waits to observe its own status write", _OWN_WRITE_WAIT)
        if self._is_behind(key, memory):
            return Result("waits to observe its own write of a Workload", _OWN_WRITE_WAIT)
        pending = self._expectations.pending(key, self._clock.monotonic())
        if pending is not None:
            return Result(pending.reason, max(0.0, pending.expires - self._clock.monotonic()))
        try:
            job = observe.job_view(obj, self._settings.checkpoint_url_prefixes)
        except SpecError as e:
            return await self._refuse(obj, memory, e)
        memory.pod_reason = await self._pod_events.read(job.namespace, self._pods_of(job), memory.pod_reason)
        if self._caches.jobs.get(*key) is not obj:
            return Result("the job has changed while events were read", 0.0)
        snapshot = self._snapshot(obj, job, memory)
        decided = plan(snapshot)
        return await self._carry_out(obj, memory, snapshot, decided)

    async def _carry_out(self, obj: Unstructured, memory: _JobMemory, snapshot: Snapshot, decided: Plan) -> Result:
        job = snapshot.job
        if decided.actions or decided.publish:
            log.info(
                "plan",
                extra={
                    "job": job.key,
                    "round": decided.status.world.round,
                    "reason": decided.reason,
                    "plan": explain(snapshot, decided).splitlines()[:50],
                },
            )
        now = self._clock.now()
        # Then the training has gone on already, and reports say since when.
        agents_first = (
            decided.lost is not None
            and decided.lost.at is not None
            and decided.status.holds(ConditionType.QUORUM_REACHED)
        )
        memory.progress.seconds.planned(
            now,
            figures.standing(job, decided.status, snapshot.pods),
            None if agents_first else figures.noticed(job.status, decided.status, now),
            changed=decided.publish,
        )
        held_back = written = False
        if decided.publish or not self._only_progress_changed(job.status, decided.status):
            written = await self._write(obj, memory, job, decided)
        elif decided.status != job.status:
            held_back = self._wrote_just_now(memory)
            written = not held_back and await self._write(obj, memory, job, decided)
        memory.status = decided.status
        self._incidents.follow(job, decided.status, memory.progress, self._clock.now())
        # Events come after the pods, because only people read events. They are written even if some pods were refused.
        events = decided.events if written else ()
        before = memory.applied
        try:
            memory.applied = await self._applier.apply(job, decided.stages)
        except Exception:
            await self._write_events(job, events)
            raise
        await self._write_events(job, events)
        after = decided.requeue.after.total_seconds() if decided.requeue is not None else None
        if memory.applied.left:
            after = 0.0
        elif memory.applied != before:
            # The next plan must know of the refusal soon. After a repeated refusal for the same reason, that plan says
            # how long to wait.
            after = _REFUSED_NEWS if after is None else min(after, _REFUSED_NEWS)
        if memory.pod_reason is not None:  # no change would be observed when another event comes
            after = AGAIN.total_seconds() if after is None else min(after, AGAIN.total_seconds())
        if held_back:
            interval = PROGRESS_INTERVAL.total_seconds()
            after = interval if after is None else min(after, interval)
        return Result(decided.reason, None if after is None else max(0.0, after))

    async def _write_events(self, job: JobView, events: tuple[Event, ...]) -> None:
        """Write events, for a bounded time: only people read them, and the next pass over the job must not wait."""
        if not events:
            return
        try:
            await within(self._clock, EVENT_SECONDS, self._recorder.write_events(job, events))
        except TimeoutError:
            log.warning("events not written in time", extra={"job": job.key, "events": [str(e) for e in events]})

    async def _write(self, obj: Unstructured, memory: _JobMemory, job: JobView, decided: Plan) -> bool:
        """Write the status if it has changed; whether it had."""
        status = decided.status
        if status != job.status:  # that time passes is no reason to write
            seconds = figures.state_seconds(memory.progress.seconds.seconds(self._clock.now()))
            status = status.model_copy(update={"state_seconds": seconds})
        version = await self._recorder.write_status(obj, status)
        if version is None:
            return False
        now = self._clock.now()
        memory.written, memory.written_at = version, now
        old, new = job.status, decided.status
        if is_finished(old) and not is_finished(new):  # a rerun: what the earlier run reported is none of its progress
            memory.progress = JobProgress(status, now)
        if new.world.round > old.world.round:
            memory.progress.published(new.world.round, now)
        if recovery_record.is_open(new.recoveries) and new.recoveries != old.recoveries:
            noticed_at = decided.lost.at if decided.lost is not None else None
            memory.progress.lost(noticed_at or now)
            memory.recoveries[str(new.recoveries[0].cause)] += 1
        if decided.lost is not None:
            self._node_losses.add(decided.lost)
        self._count(old, new)
        return True

    def _wrote_just_now(self, memory: _JobMemory) -> bool:
        """Whether it is too early for another write that changes only progress figures."""
        return memory.written_at is not None and self._clock.now() - memory.written_at < PROGRESS_INTERVAL

    @staticmethod
    def _only_progress_changed(old: Status, new: Status) -> bool:
        quiet = {"progress": old.progress, "checkpoint": old.checkpoint, "goodput_percent": old.goodput_percent}
        informs = old.checkpoint.healthy == new.checkpoint.healthy
        return informs and new.model_copy(update={**quiet, "goodput": old.goodput}) == old

    def _count(self, old: Status, new: Status) -> None:
        if is_finished(new) and not is_finished(old):
            failed = new.condition(ConditionType.FAILED)
            has_failed = new.holds(ConditionType.FAILED)
            self._metrics.ended(failed.reason if failed is not None and has_failed else ConditionType.COMPLETE)
        if not new.recoveries or new.recoveries == old.recoveries:
            return
        newest = new.recoveries[0]
        if not recovery_record.is_open(new.recoveries):
            seconds = None if newest.rung == Rung.REGROW else recovery_record.total_ms(newest) / 1000
            self._metrics.recovered(newest.cause, newest.rung, seconds)

    def _remember(self, obj: Unstructured) -> _JobMemory:
        key, uid = obj.key, obj.metadata.uid
        memory = self._memory.get(key)
        if memory is None or memory.uid != uid:
            if memory is not None:
                self._is_gone(memory.uid)
            status = parse_status(obj.status)
            recoveries = figures.recoveries_by_cause(status.recoveries)
            memory = _JobMemory(uid, JobProgress(status, self._clock.now()), recoveries)
            self._memory[key] = memory
        return memory

    def _is_gone(self, uid: str) -> None:
        self._incidents.gone(uid, self._clock.now())
        self._forget(uid)

    def _is_behind(self, key: Key, memory: _JobMemory) -> bool:
        """Whether a Workload is cached as it was before this replica's last write of it."""
        if self._caches.queues is None:
            return False
        for name, written in memory.applied.workloads.items():
            cached = self._caches.queues.workloads.get(key[0], name)
            version = written if cached is None else cached.metadata.resource_version
            if version != written and is_not_newer(version, written):
                return True
        return False

    def _snapshot(self, obj: Unstructured, job: JobView, memory: _JobMemory) -> Snapshot:
        pods = tuple(_with_reason(pod, memory.pod_reason) for pod in self._pods_of(job))
        service = self._caches.services.get(job.namespace, object_names.service_name(job.name))
        budget = self._caches.budgets.get(job.namespace, object_names.service_name(job.name))
        policies = self._caches.policies
        policy = policies.get(job.namespace, object_names.service_name(job.name)) if policies is not None else None
        queues = self._caches.queues
        nodes = self._nodes_of(pods)
        doubted = {name for name, node in nodes.items() if not node.ready}
        write_failure = self._rounds_write_failure(obj)
        return Snapshot(
            now=self._clock.now(),
            job=job,
            pods=pods,
            service_uid=_own_uid(service, job),
            disruption_budget=observe.disruption_budget_view(budget, job.uid) if budget is not None else None,
            queue=None if queues is None else queue_view(queues, obj, job),
            ignored_queue=queue_name(obj) if queues is None else None,
            network_policy=observe.network_policy_view(policy, job.uid),
            pod_groups=tuple(self._pod_groups_of(job)),
            nodes=nodes,
            fleet=self._fleet(job),
            answering=frozenset(p.uid for p in pods if p.node in doubted and self._answers(obj, p.uid)),
            progress=memory.progress.snapshot(),
            world=self._round_view(obj),
            name_collisions=tuple(filter(None, (*memory.applied.collisions, write_failure.name_taken))),
            create_refused=memory.applied.create_refused,
            object_refused=memory.applied.object_refused or write_failure.refused,
            settings=self._settings,
        )

    def _pod_groups_of(self, job: JobView) -> Iterator[PodGroupView]:
        name = object_names.service_name(job.name)
        for scheduler, groups in self._caches.pod_groups.items():
            view = observe.pod_group_view(groups.get(job.namespace, name), job.uid, GangScheduler(scheduler))
            if view is not None:
                yield view

    def _pods_of(self, job: JobView) -> tuple[WorkerPod, ...]:
        owned = self._caches.pods.by_index(BY_OWNER, job.uid)
        return tuple(w for pod in owned if (w := observe.worker_pod(pod)) is not None)

    def _fleet(self, job: JobView) -> Fleet:
        """All nodes are looked at only if anything speaks against one of them."""
        nodes = self._caches.nodes
        if nodes is None:
            return Fleet()
        faulty = nodes.by_index(SUSPECT, SUSPECT)
        self._accusers.read(self._clock.now(), self._caches.jobs.by_index(SUSPECT, SUSPECT))
        accused = self._accusers.against(job.uid, job.namespace)
        if not (faulty or accused or job.status.restarts.suspect_nodes):
            return Fleet()
        able = self._able_nodes.of(self._clock.now(), job.spec.template, nodes.list)
        return fleet.of(job.spec.template, able, faulty, accused)

    def _nodes_of(self, pods: tuple[WorkerPod, ...]) -> dict[str, NodeView]:
        wanted = sorted({p.node for p in pods if p.node})
        nodes = self._caches.nodes
        if nodes is None:
            return {name: observe.unread_node(name) for name in wanted}
        cached = ((name, nodes.get("", name)) for name in wanted)
        return {name: observe.node_view(node) for name, node in cached if node is not None}

    async def _refuse(self, obj: Unstructured, memory: _JobMemory, error: SpecError) -> Result:
        """Report a spec that the API server should have refused (an older CRD): once, and without any other action."""
        status = parse_status(obj.status)
        if is_finished(status):
            return Result(f"finished; this version refuses its spec: {error}")
        made = {c.type: c for c in status.conditions}
        for type_, value in (
            (ConditionType.READY, ConditionStatus.FALSE),
            (ConditionType.STALLED, ConditionStatus.TRUE),
            (ConditionType.NEEDS_ATTENTION, ConditionStatus.TRUE),
        ):
            old = made.get(type_)
            reason = ReadyReason.PENDING if type_ is ConditionType.READY else "InvalidSpec"
            made[type_] = Condition(
                type=type_,
                status=value,
                reason=reason,
                message=str(error)[:1024],
                last_transition_time=old.last_transition_time if old and old.status == value else self._clock.now(),
                observed_generation=obj.metadata.generation,
            )
        wanted = status.model_copy(
            update={"conditions": tuple(made[t] for t in sorted(made)), "observed_generation": obj.metadata.generation}
        )
        version = await self._recorder.write_status(obj, wanted)
        if version is not None:
            memory.written = version
        return Result(f"invalid spec: {error}")

    def jobs_by_status(self) -> dict[str, int]:
        """The number of jobs by status, for the metric."""
        counts: dict[str, int] = {}
        for obj in self._caches.jobs.list():
            conditions = obj.status.get("conditions", ())
            reason = next((c.get("reason") for c in conditions if c.get("type") == ConditionType.READY), None)
            name = str(reason or ReadyReason.PENDING)
            counts[name] = counts.get(name, 0) + 1
        return counts

    def figures(self) -> ClusterFigures:
        """For the metrics with labels of a job or a node. A job that is finished or gone has none."""
        now = self._clock.now()
        living = [
            (key, memory, memory.status)
            for key, memory in self._memory.items()
            if memory.status is not None and not is_finished(memory.status) and self._is_present(key, memory.uid)
        ]
        nodes = sorted({pod.spec.node_name for pod in self._caches.pods.list() if pod.spec.node_name})
        known = self._caches.nodes.list() if self._caches.nodes is not None else ()
        self._node_losses.keep({*nodes, *(node.metadata.name for node in known)})
        return ClusterFigures(
            tuple(
                figures.of_job(*key, status, memory.progress, memory.recoveries, now)
                for key, memory, status in living[: figures.MAX_JOBS]
            ),
            max(0, len(living) - figures.MAX_JOBS),
            self._node_losses.by_node(nodes),
            figures.exclusions((status for _, _, status in living), nodes),
        )

    def _is_present(self, key: Key, uid: str) -> bool:
        obj = self._caches.jobs.get(*key)
        return obj is not None and obj.metadata.uid == uid

    def peak_memory(self) -> tuple[int, int]:
        """The greatest peaks of a training process of any job that runs, in bytes of RAM and of an accelerator."""
        peaks = [peak for memory in self._memory.values() if (peak := memory.progress.peak_memory) is not None]
        return max((p.host for p in peaks), default=0), max((p.device or 0 for p in peaks), default=0)


def _own_uid(service: Service | None, job: JobView) -> str | None:
    return service.metadata.uid if service is not None and controller_uid(service.metadata) == job.uid else None


def _with_reason(pod: WorkerPod, known: PodReason | None) -> WorkerPod:
    """The pod, with what its events say of the wait for its start."""
    if known is None or known.reason is None or known.pod_uid != pod.uid or pod.starting is None:
        return pod
    return replace(pod, starting=known.reason)
