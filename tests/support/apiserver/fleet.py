"""A few jobs at a real operator process, each in another trouble, for those who watch them by their metrics.

They live in a thread of their own: what is to train goes on training while a test looks.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from everstep.contract.labels import TOKEN_AUDIENCE
from everstep.contract.messages import REPORT_PATH, Phase, Report
from everstep_operator.kube.credentials import KubeConfig
from everstep_operator.kube.resources import NODES
from everstep_operator.kube.transport import HttpKubeClient
from support.apiserver.operators import Place
from support.apiserver.replica import Replica
from support.apiserver.waiting import eventually, make_namespace
from support.conformity.bodies import BINDINGS
from support.telemetry.collector import Collector
from testcluster.controlplane import ControlPlane

PREPARED = 120.0  # seconds until each job is in its trouble
STOPPED = 30.0
STEP = 0.5  # seconds
WORKERS = 2
RESTORED = 0.1  # seconds that the reports name
FAILURES = 3
STUCK_AT = 10
CHECKPOINT = {"url": "s3://checkpoints/fleet", "secretRef": {"name": "s3"}}


@dataclass
class _Training:
    """A job whose workers report a step each half second."""

    name: str
    step: int
    commits: bool = False  # each step
    round: int = 1
    tokens: list[str] = field(default_factory=list)


class Fleet:
    """A context manager. Its jobs are named by what they do:

    - `trains`: steps and commits
    - `stuck`: takes no step after its tenth, and runs
    - `unsaved`: steps, and has not committed since its first step
    - `waits`: its pods never run
    - `fails`: has lost its second worker `FAILURES` times on the node `bad`, and steps again
    - `suspended`: wants no workers
    - `ends`: trains, and is complete; `overdue`: may run for a second, and has failed
    """

    def __init__(self, plane: ControlPlane, folder: Path, seen: Callable[[str], bool]) -> None:
        """`seen`: whether this query gives something by now. What comes between two scrapes would be no increase."""
        self._plane, self._seen = plane, seen
        self.namespace = f"fleet-{uuid.uuid4().hex[:12]}"
        self.good, self.bad = f"{self.namespace}-good", f"{self.namespace}-bad"
        self.collector = Collector()
        self.collector.start()
        traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": self.collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        self.replica = Replica(plane, self.namespace, "fleet", folder, environ=traced)
        self.unsaved_since = 0.0  # seconds since 1970
        self.failure_took = 0.0  # seconds from the last failure until a step of all workers
        self.last_recovery: dict[str, Any] = {}  # of `fails`, as its status has it
        self._training: dict[str, _Training] = {}
        self._ready, self._stop = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._live, daemon=True)

    def __enter__(self) -> Fleet:
        self._thread.start()
        ready = self._ready.wait(PREPARED)
        if self._error is not None or not ready:
            self.__exit__(None, None, None)
            raise AssertionError(f"the jobs are not ready within {PREPARED:.0f} s") from self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Delete the jobs, then end the operator."""
        self._stop.set()
        self._thread.join(STOPPED)
        self.replica.end()
        self.collector.stop()

    def check(self) -> None:
        """Fail if a job could not go on."""
        if self._error is not None:
            raise AssertionError("a job could not go on") from self._error

    def _live(self) -> None:
        try:
            asyncio.run(self._play())
        except BaseException as e:
            self._error = e
        finally:
            self._ready.set()

    async def _play(self) -> None:
        async with (
            HttpKubeClient(KubeConfig(str(self._plane.kubeconfig))) as client,
            aiohttp.ClientSession() as self._http,
        ):
            self._place = Place(client, self.namespace)
            await make_namespace(client, self.namespace)
            for node in (self.good, self.bad):
                await client.create(NODES, None, {"metadata": {"name": node}})
            try:
                async with asyncio.TaskGroup() as group:
                    training, beating = group.create_task(self._train()), group.create_task(self._beat())
                    await self._get_into_trouble()
                    self._ready.set()
                    await training
                    beating.cancel()
            finally:
                await self._remove()

    async def _remove(self) -> None:
        """No kubelet confirms the end of pods that have a node, so they are deleted by force."""
        jobs = ("trains", "stuck", "unsaved", "waits", "fails", "suspended", "ends", "overdue")
        flags = ("-n", self.namespace, "--ignore-not-found", "--wait=false")
        await asyncio.to_thread(self._plane.kubectl, "delete", "tjob", *jobs, *flags)
        await asyncio.to_thread(self._plane.kubectl, "delete", "pods", "--all", "--force", "--grace-period=0", *flags)
        await asyncio.to_thread(
            self._plane.kubectl, "delete", f"namespace/{self.namespace}", f"node/{self.good}", f"node/{self.bad}",
            "--ignore-not-found", "--wait=false",
        )  # fmt: skip

    async def _train(self) -> None:
        while not self._stop.is_set():
            for job in list(self._training.values()):
                job.step += 1
                await self._step(job, committed=job.commits)
            await asyncio.sleep(STEP)

    async def _beat(self) -> None:
        """The nodes' kubelets live."""
        while True:
            for node in (self.good, self.bad):
                at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "",
                         "lastTransitionTime": at, "lastHeartbeatTime": at}  # fmt: skip
                await self._place.client.patch_status(NODES, None, node, {"conditions": [ready]})
            await asyncio.sleep(5)

    async def _get_into_trouble(self) -> None:
        place = self._place
        await place.create_job("waits", checkpoint=CHECKPOINT)
        await place.create_job("suspended", suspend=True)
        for name in ("trains", "stuck", "unsaved", "fails"):
            kept = {"backoffSeconds": {"initial": 0, "max": 0}}
            await place.create_job(name, checkpoint=CHECKPOINT, recovery=kept)
        await eventually("the operator is ready", self.replica.is_ready)
        nodes = {"trains": self.good, "fails": self.bad}
        jobs = {name: await self._begin(name, 0, nodes.get(name)) for name in ("stuck", "trains", "unsaved", "fails")}
        stuck = jobs.pop("stuck")
        stuck.step = STUCK_AT
        await self._step(stuck, committed=True)
        await self._step(jobs["unsaved"], committed=True)
        self.unsaved_since = time.time()
        jobs["trains"].commits = True
        fails = jobs.pop("fails")
        self._training |= jobs
        await self._until_seen("everstep_jobs_ended_total")
        await self._end_jobs()
        await self._until_seen(f'everstep_node_losses_total{{node="{self.bad}"}}')
        for incarnation in range(1, FAILURES + 1):
            fails = await self._fail(fails, incarnation)
            losses = f'everstep_job_recoveries_total{{namespace="{self.namespace}",name="fails"}}'
            await self._until_seen(f"{losses} == {incarnation}")
        self._training[fails.name] = fails

    async def _end_jobs(self) -> None:
        await self._place.create_job("overdue", activeDeadlineSeconds=1)
        await self._place.create_job("ends")
        await self._begin("ends", 0, None)
        for index in range(WORKERS):
            await self._place.end(f"ends-w{index}-0", 0)

    async def _until_seen(self, query: str) -> None:
        async def seen() -> bool:
            return await asyncio.to_thread(self._seen, query)

        await eventually(f"it is seen: {query}", seen)

    async def _begin(self, name: str, incarnation: int, node: str | None, step: int = 0) -> _Training:
        """All workers of this incarnation run, have read their state, and have taken a step after `step`."""
        place, pods = self._place, [f"{name}-w{index}-{incarnation}" for index in range(WORKERS)]

        async def exist() -> bool:
            return set(pods) <= set(await place.names())

        async def trains() -> bool:
            return await place.reason(name) == "Running"

        await eventually(f"{pods} exist", exist)
        if node is not None:
            bound = {"metadata": {"name": pods[-1]}, "target": {"kind": "Node", "name": node}}
            await place.client.create(BINDINGS, self.namespace, bound)
        for pod in pods:
            await place.start(pod)
        tokens = [await self._token(pod) for pod in pods]
        job = _Training(name, step + 1, tokens=tokens, round=incarnation + 1)
        for rank in range(WORKERS):
            await self._report(job, Phase.RESTORE, rank, restored_step=step, restore_seconds=RESTORED)
        for rank in range(WORKERS):
            await self._report(job, Phase.TRAIN, rank, step=job.step, step_seconds=STEP)
        await eventually(f"{name} runs", trains)
        return job

    async def _step(self, job: _Training, *, committed: bool) -> None:
        commit = {"committed_step": job.step, "committed_at": time.time()} if committed else {}
        await self._report(job, Phase.TRAIN, 0, step=job.step, step_seconds=STEP, **commit)

    async def _fail(self, job: _Training, incarnation: int) -> _Training:
        began = time.monotonic()
        await self._place.end(f"{job.name}-w1-{incarnation - 1}", 137)
        after = await self._begin(job.name, incarnation, self.bad, job.step)
        self.failure_took = time.monotonic() - began

        async def recorded() -> bool:
            self.last_recovery = (await self._place.status(job.name))["recoveries"][0]
            return "firstStepMs" in self.last_recovery

        await eventually("the recovery is in the status", recorded)
        return after

    async def _token(self, pod: str) -> str:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": [TOKEN_AUDIENCE],
                "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": pod},
            },
        }
        url = f"{self._plane.url}/api/v1/namespaces/{self.namespace}/serviceaccounts/default/token"
        tls = ssl.create_default_context(cafile=str(self._plane.ca_file))
        headers = {"Authorization": f"Bearer {self._plane.token}"}
        async with self._http.post(url, json=body, headers=headers, ssl=tls) as reply:
            assert reply.status == 201, await reply.text()
            return str((await reply.json())["status"]["token"])

    async def _report(self, job: _Training, phase: Phase, rank: int, **fields: Any) -> None:
        body = Report(phase, rank, WORKERS, at=time.time(), round=job.round, **fields).encode()
        url = f"http://127.0.0.1:{self.replica.port}{REPORT_PATH}"
        headers = {"Authorization": f"Bearer {job.tokens[rank]}"}
        async with self._http.post(url, data=body, headers=headers) as reply:
            assert reply.status == 204, f"{job.name}: {reply.status} {await reply.text()}"
