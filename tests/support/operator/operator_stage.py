"""The real operator on the in-memory cluster, on a virtual clock, with a kubelet of a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from everstep.contract import labels
from everstep.contract.document import Document, Member, Sizes, decode, encode
from everstep.contract.messages import REPORT_PATH, Report
from everstep.membership.commands import Withdraw
from everstep.membership.machine import apply
from everstep_local.apiserver.cluster import MemoryCluster
from everstep_local.apiserver.faults import Faults
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.clients import Clients
from everstep_operator.kube.errors import NotFound
from everstep_operator.kube.resources import PODS
from everstep_operator.kube.wire import Pod, Unstructured, rfc3339
from everstep_operator.main import JOBS, Operator
from everstep_operator.rounds.documents import JobRef
from everstep_operator.settings import OperatorSettings
from everstep_operator.telemetry.metrics import Metrics
from everstep_operator.telemetry.recovery_trace import RecoveryTrace
from support.clocks.manual import ManualClock

LIMIT = 30.0  # seconds of the test's own time that any wait may take

JOB = {
    "metadata": {"name": "digits"},
    "spec": {
        "replicas": 3,
        "rendezvous": {"backend": "c10d"},
        "template": {"spec": {"containers": [{"name": "worker", "image": "train:1", "command": ["torchrun"]}]}},
    },
}

ELASTIC: dict[str, Any] = {
    "metadata": {"name": "digits"},
    "spec": {
        **JOB["spec"],  # type: ignore[dict-item]
        "replicas": 4,
        "elastic": {"minReplicas": 2, "maxReplicas": 8},
        "rendezvous": {"backend": "etcd", "etcd": {"endpoints": ["http://etcd:2379"]}},
    },
}

SETTINGS = OperatorSettings.from_env(
    {"EVERSTEP_PORT": "0", "EVERSTEP_PROBE_PORT": "0", "EVERSTEP_POD_NAME": "replica-0"}
)


class Stage:
    """A cluster, an operator in it, and the hands of a kubelet."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.clock = ManualClock()
        self.cluster = MemoryCluster(self.clock)
        self.client: KubeClient = self.cluster.client()
        self._operators: KubeClient = self.cluster.client(faults=faults)
        self.synced: list[bool] = []  # whether the newest operator's caches were full when it said so
        self.operator: Operator | None = None
        self.on_recovery: Callable[[RecoveryTrace], None] = lambda _: None

    def _synced(self) -> None:
        assert self.operator is not None
        self.synced.append(self.operator.caches.waiting() is None)

    @asynccontextmanager
    async def operating(self, settings: OperatorSettings = SETTINGS) -> AsyncGenerator[Operator, None]:
        operator = self.operator = Operator(
            Clients.sharing(self._operators), settings, Metrics(), self.clock, on_recovery=self.on_recovery,
            synced=self._synced,
        )  # fmt: skip
        task = asyncio.create_task(operator.run())
        try:
            yield operator
        finally:
            task.cancel()
            stopping = asyncio.gather(task, return_exceptions=True)
            await self.until("the operator stopped", stopping.done)

    async def until(self, what: str, holds: Callable[[], Any]) -> None:
        """Let virtual time pass until it holds."""
        deadline = time.monotonic() + LIMIT
        while True:
            answer = holds()
            if await answer if asyncio.iscoroutine(answer) else answer:
                return
            assert time.monotonic() < deadline, f"not within {LIMIT:.0f} s: {what}"
            await self.clock.advance(0.2)

    async def pods(self) -> dict[str, Pod]:
        return {one.metadata.name: one for one in (await self.client.list(PODS, "default")).items}

    async def reason(self) -> str | None:
        try:
            conditions = (await self.client.get(JOBS, "default", "digits")).status.get("conditions", ())
        except NotFound:
            return None
        return next((one["reason"] for one in conditions if one["type"] == "Ready"), None)

    async def complete(self) -> bool:
        conditions = (await self.client.get(JOBS, "default", "digits")).status.get("conditions", ())
        return any(one["type"] == "Complete" and one["status"] == "True" for one in conditions)

    async def run_pods(self) -> bool:
        """Start every pod that waits; whether the job says that it runs."""
        ready = [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}]
        for name, pod in (await self.pods()).items():
            if pod.status.phase == "Pending":
                await self.client.patch_status(PODS, "default", name, {"phase": "Running", "conditions": ready})
        return await self.reason() == "Running"

    async def end(self, name: str, code: int, seconds_ago: float | None = None) -> None:
        """The worker's container has ended. None: its node does not say when."""
        ended: dict[str, Any] = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", "message": ""}
        if seconds_ago is not None:
            ended["finishedAt"] = rfc3339(self.clock.now() - timedelta(seconds=seconds_ago))
        status = {
            "phase": "Succeeded" if code == 0 else "Failed",
            "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [{"name": "worker", "state": {"terminated": ended}}],
        }
        with contextlib.suppress(NotFound):
            await self.client.patch_status(PODS, "default", name, status)


async def form(stage: Stage, operator: Operator, job: Unstructured, members: dict[int, int]) -> None:
    """What an agent does when it writes the round that the agents of these workers (index: incarnation) form."""
    chosen = tuple(Member(i, f"agent-{i}-{n}", n) for i, n in members.items())
    await _write(stage, operator, job, lambda before: replace(before, round=before.round + 1, members=chosen, gone=()))


async def withdraw(stage: Stage, operator: Operator, job: Unstructured, worker: tuple[int, int], why: str) -> None:
    """What the agent of this worker (index, incarnation) does when its process has ended."""
    index, incarnation = worker

    def changed(before: Document) -> Document:
        after = apply(before, Withdraw(f"agent-{index}-{incarnation}", before.round, why))
        assert isinstance(after, Document), after
        return after

    await _write(stage, operator, job, changed)


async def _write(stage: Stage, operator: Operator, job: Unstructured, change: Callable[[Document], Document]) -> None:
    ref = JobRef("default", job.metadata.name, job.metadata.uid)

    async def write() -> int | None:
        seen = await operator.rounds.of(ref).read(0)
        before = decode(seen.document.encode()) if seen.document is not None else Document(Sizes(2, 8))
        return await operator.rounds.of(ref).swap(seen.version, encode(change(before)))

    writing = asyncio.create_task(write())
    await stage.until("the round is written", writing.done)
    assert await writing is not None


async def call(stage: Stage, operator: Operator, pod: str, method: str, path: str, **options: Any) -> int:
    """What a worker's call is answered, over HTTP and with the pod's own token."""
    uid = (await stage.pods())[pod].metadata.uid
    token = stage.cluster.issue_token("default", "default", pod, uid, labels.TOKEN_AUDIENCE, 600)
    url = f"http://127.0.0.1:{operator.server.port}{path}"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
        calling = asyncio.create_task(session.request(method, url, **options))
        await stage.until(f"{method} {path} is answered", calling.done)
        return (await calling).status


async def send(stage: Stage, operator: Operator, pod: str, report: Report | bytes) -> int:
    body = report if isinstance(report, bytes) else report.encode()
    return await call(stage, operator, pod, "POST", REPORT_PATH, data=body)


async def replaced(stage: Stage, name: str) -> bool:
    await stage.run_pods()
    return name in await stage.pods()


def samples(metrics: Metrics) -> dict[str, float]:
    """The value of every sample by its name and labels."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {" ".join((s.name, *(s.labels[k] for k in sorted(s.labels)))): s.value for f in families for s in f.samples}
