"""One local run: the operator, an in-memory cluster and nodes of processes in one event loop, until the job has ended.

It is the same operator as in a cluster, on another API server and other nodes. Invariant: when `run` has returned, or
this process has died, no process of the job is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from everstep.contract import labels
from everstep.contract.messages import Phase, Report
from everstep.jobs.history import ActionTaken, EventSeen, History, PodSeen, StatusSeen, StepSeen
from everstep.jobs.view import EVENTS as EVENTS_SHOWN
from everstep.jobs.view import EventRow, View, condition
from everstep.jobs.view import ended as has_ended
from everstep_local.apiserver.cluster import MemoryCluster
from everstep_local.nodes.pool import LocalNodes
from everstep_local.run.job_file import Prepared
from everstep_local.run.view import Peak, view
from everstep_operator.controller import observe
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.clients import Clients
from everstep_operator.kube.errors import KubeError
from everstep_operator.kube.resources import EVENTS, PODS, Resource
from everstep_operator.kube.wire import Event, Pod, Unstructured, micro_time
from everstep_operator.main import JOBS, Operator
from everstep_operator.runtime.cache import Deleted, Delta
from everstep_operator.runtime.clock import SystemClock, cancel
from everstep_operator.runtime.informer import Informer
from everstep_operator.runtime.leaderless import Leaderless
from everstep_operator.settings import OperatorSettings
from everstep_operator.telemetry.metrics import Metrics

OPERATOR_NAMESPACE = "everstep-system"
SECRETS = Resource("", "v1", "secrets", "Secret", Unstructured)
LEASE_SECONDS = 3
CLAIMS = "claims"  # in the output folder, with a folder for each volume claim
LOG_SECONDS = 5.0  # for the last lines of the workers' logs, after the job has ended


class Outcome(IntEnum):
    """Exit codes of `everstep run`."""

    COMPLETE = 0
    FAILED = 1
    INTERRUPTED = 130


class Refused(Exception):
    """The cluster refused the job. Each line names a field."""


@dataclass(slots=True)
class Options:
    out: Path  # history, timeline, logs of workers and operator, what volume claims hold
    nodes: int = 1
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class LocalRun:
    """`run()` it once. `changed` is called whenever `view()` may show something new; history grows meanwhile."""

    def __init__(self, job: Prepared, options: Options, changed: Callable[[], None]) -> None:
        self.job, self.options = job, options
        self.history = History()
        self._changed = changed
        self._clock = SystemClock()
        self._began = time.monotonic()
        namespaces = dict.fromkeys((job.namespace, OPERATOR_NAMESPACE))
        # The seed also makes the key that signs tokens, so it has to be secret.
        self.cluster = MemoryCluster(self._clock, seed=secrets.randbits(128), namespaces=namespaces)
        self.client: KubeClient = self.cluster.client()
        self.nodes = LocalNodes(
            self.cluster.client(),
            self.cluster.issue_token,
            clock=self._clock,
            names=[f"node-{i + 1}" for i in range(options.nodes)],
            workdir=job.workdir,
            claims=options.out.resolve() / CLAIMS,
        )
        self._port = _free_port()
        self._operator: asyncio.Task[None]  # `run` starts it
        self._leaderless: Leaderless | None = None
        self._steps: dict[str, StepSeen] = {}
        self._memory: dict[str, Peak] = {}  # by pod
        self._events: dict[str, EventRow] = {}  # the newest ones by the names of their objects, oldest first
        self._ended = asyncio.Event()
        self.deleted = False  # somebody has deleted the job
        self._last = Unstructured()  # the job as last seen: it may be deleted as soon as it has ended
        self._restarting = asyncio.Lock()
        self._logs: dict[str, asyncio.Task[None]] = {}
        rng = random.SystemRandom().random
        namespace = job.namespace
        self._jobs: Informer[Unstructured] = Informer(
            self.client, JOBS, clock=self._clock, rng=rng, namespace=namespace
        )
        self._pods: Informer[Pod] = Informer(self.client, PODS, clock=self._clock, rng=rng, namespace=namespace)
        self._news: Informer[Event] = Informer(self.client, EVENTS, clock=self._clock, rng=rng, namespace=namespace)
        self._jobs.add_handler(self._job_changed)
        self._pods.add_handler(self._pod_changed)
        self._news.add_handler(self._event_changed)

    @property
    def ended(self) -> bool:
        """Whether the job is over: what is left to do is to end its processes and to write the report."""
        return self._ended.is_set()

    @property
    def uid(self) -> str:
        """The job's; empty before it was seen."""
        return self._last.metadata.uid

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began

    async def run(self) -> Outcome:
        """Run until the job has ended. Raises `Refused` if the cluster refuses it. Cancel this to stop everything."""
        (self.options.out / "logs").mkdir(parents=True, exist_ok=True)
        await self._submit()
        machinery = [asyncio.create_task(self.nodes.run(), name="nodes")]
        machinery += [asyncio.create_task(i.run()) for i in (self._jobs, self._pods, self._news)]
        self.start_operator()
        ended = asyncio.create_task(self._ended.wait())
        try:
            while not ended.done():
                watched = {ended, *machinery, self._operator}
                done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {ended}:
                    if not task.cancelled():
                        task.result()  # a part that ended by itself has failed
            await self._finish()
        finally:
            await cancel(ended, self._operator, *machinery, *self._logs.values())
        if not has_ended(self._last.status):
            return Outcome.INTERRUPTED
        complete = condition(self._last.status, "Complete").get("status") == "True"
        return Outcome.COMPLETE if complete else Outcome.FAILED

    async def _submit(self) -> None:
        try:
            for name, values in self.options.secrets.items():
                body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": dict(values)}
                await self.client.create(SECRETS, self.job.namespace, body)
            await self.client.create(JOBS, self.job.namespace, self.job.manifest)
        except KubeError as e:
            fields = [f"{c.field}: {c.message}" if c.field else c.message for c in e.causes]
            raise Refused("\n".join(fields) or e.message) from e

    def start_operator(self) -> None:
        """Start the operator."""
        settings = OperatorSettings(
            namespace=OPERATOR_NAMESPACE,
            pod_name="operator",
            pod_ip="127.0.0.1",
            host="127.0.0.1",
            port=self._port,
            probe_port=0,
            report_url=f"http://127.0.0.1:{self._port}",
            checkpoint_url_prefixes=(),
            job_network_policies=False,
            volume_claims=True,  # each is a folder here
            lease_seconds=LEASE_SECONDS,
            workers=2,
            log_level="INFO",
        )
        operator = Operator(
            Clients.sharing(self.cluster.client()),
            settings,
            Metrics(process=False),
            self._clock,
            on_report=self._reported,
            synced=lambda: None,  # the operator is not alone in this process
            alone=True,  # and no other one can reach this API server
        )
        self._leaderless = operator.leaderless
        self._operator = asyncio.create_task(operator.run(), name="operator")

    async def restart_operator(self) -> None:
        """Kill the operator and start another. The job's processes run on."""
        async with self._restarting:
            await cancel(self._operator)
            self.start_operator()

    async def delete_job(self) -> None:
        """Delete the job, with which the run ends. Raises `KubeError`."""
        await self.client.delete(JOBS, self.job.namespace, self.job.name)
        await self._ended.wait()

    def notice(self) -> str:
        """Why nothing happens to the job at the moment; empty if an operator leads."""
        return (self._leaderless.notice() or "") if self._leaderless is not None else ""

    def close(self) -> None:
        """Remove the files of a run that never began."""
        self.nodes.close()

    async def _finish(self) -> None:
        """Keep the last lines of the workers' logs, after the job has ended."""
        if self._logs:
            await asyncio.wait(self._logs.values(), timeout=LOG_SECONDS)
        self._changed()

    def did(self, what: str, worker: int | None = None) -> None:
        """Note an action of a person, or of this run's list of faults."""
        self.history.add(ActionTaken(self.seconds, what, worker))
        self._changed()

    def view(self) -> View | None:
        """The present view; None until the job is seen."""
        job = self._last
        if not job.metadata.uid:
            return None
        pods = [p for p in self._pods.list() if p.metadata.labels.get(labels.JOB) == self.job.name]
        pids = {p.metadata.name: pid for p in pods if (pid := self._pid(p))}
        return view(
            job, pods, self._steps, pids, self._events.values(), self._memory, self.notice(), deleted=self.deleted
        )

    def pod_names(self) -> list[str]:
        return sorted(p.metadata.name for p in self._pods.list())

    def worker_of(self, pod: str) -> int | None:
        cached = self._pods.get(self.job.namespace, pod)
        worker = observe.worker_pod(cached) if cached is not None else None
        return worker.index if worker is not None else None

    def _pid(self, pod: Pod) -> int | None:
        with contextlib.suppress(KeyError):
            return self.nodes.pids(pod.metadata.namespace, pod.metadata.name).get(labels.WORKER_CONTAINER)
        return None

    # What is seen.

    def _reported(self, identity: PodIdentity, report: Report) -> None:
        worker = self.worker_of(identity.pod_name)
        if report.peak_memory is not None:
            host, device = self._memory.get(identity.pod_name, (0, None))
            device_peak = report.peak_device_memory
            peak = max(host, report.peak_memory), device_peak if device is None else max(device, device_peak or 0)
            self._memory[identity.pod_name] = peak
        if worker is None or report.step is None or report.phase in (Phase.START, Phase.RESTORE):
            return  # a restored step is not one that this process has taken
        loss = report.metrics.get("loss")
        loss = loss if loss is not None and math.isfinite(loss) else None
        seen = StepSeen(
            self.seconds, identity.pod_name, worker, report.rank, report.world_size, report.step, loss,
            report.round,
        )  # fmt: skip
        before = self._steps.get(identity.pod_name)
        # Of several processes in a pod the lowest rank counts; in another round they may have other ranks.
        if before is None or report.round > before.round or report.rank <= before.rank:
            self._steps[identity.pod_name] = seen
            self.history.add(seen)
            self._changed()

    def _job_changed(self, delta: Delta[Unstructured]) -> None:
        job = delta.object
        if job.metadata.name != self.job.name:
            return
        if isinstance(delta, Deleted):
            # One that has ended is deleted with the rest of its cluster's objects; that is what it stays.
            self.deleted = not has_ended(self._last.status)
            self._ended.set()
            self._changed()
            return
        self._last = job
        ready, world = condition(job.status, "Ready"), job.status.get("world") or {}
        if not ready:
            return  # the operator has not seen it yet
        self.history.add(
            StatusSeen(
                self.seconds,
                str(ready.get("reason", "Pending")),
                str(ready.get("message", "")),
                int(world.get("round", 0)),
                int(world.get("size", 0)),
                (job.status.get("checkpoint") or {}).get("lastCommittedStep"),
            )
        )
        if has_ended(job.status):
            self._ended.set()
        self._changed()

    def _pod_changed(self, delta: Delta[Pod]) -> None:
        pod = delta.object
        worker = observe.worker_pod(pod)
        if worker is None:
            return
        phase = "Deleted" if isinstance(delta, Deleted) else str(worker.state)
        self.history.add(
            PodSeen(self.seconds, worker.name, worker.index, worker.round or 0, worker.node or "", phase)
        )  # fmt: skip
        if phase == "Running" and worker.name not in self._logs:
            self._logs[worker.name] = asyncio.create_task(self._keep_log(pod.metadata.namespace, worker.name))
        self._changed()

    def _event_changed(self, delta: Delta[Event]) -> None:
        event = delta.object
        if isinstance(delta, Deleted) or event.regarding.name != self.job.name:
            return
        observed_at = event.series.last_observed_time if event.series is not None else None
        time_ = micro_time(observed_at or event.event_time or self._clock.now())
        if event.series is None:  # one that is counted again has the text of its first time
            self.history.add(EventSeen(self.seconds, event.type, event.reason, event.note, time_))
        # An event that repeats is one object: it is shown once, where it was seen last.
        self._events.pop(event.metadata.name, None)
        self._events[event.metadata.name] = EventRow(time_, event.type, event.reason, event.note)
        if len(self._events) > EVENTS_SHOWN:
            del self._events[next(iter(self._events))]
        self._changed()

    async def _keep_log(self, namespace: str, pod: str) -> None:
        """Copy the pod's log to the output folder while it is written, because the pod's own is removed with the
        pod."""
        with (
            contextlib.suppress(KeyError),
            (self.options.out / "logs" / f"{pod}.log").open("w", encoding="utf-8") as file,
        ):
            async for line in self.nodes.logs(namespace, pod, container=labels.WORKER_CONTAINER, follow_=True):
                file.write(f"{line.time} {line.text}\n")
                file.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
