"""Which requests the operator sends for a job: each has a fact that needs it, and none comes twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest

from everstep_local.apiserver.cluster import MemoryCluster
from everstep_operator.kube.clients import Clients
from everstep_operator.kube.resources import CONFIGMAPS, LEASES
from everstep_operator.main import JOBS, Operator
from everstep_operator.settings import OperatorSettings
from everstep_operator.telemetry.metrics import Metrics
from support.clocks.manual import ManualClock

WORKERS = 10
SETTINGS = OperatorSettings(
    namespace="default", pod_name="operator", pod_ip="127.0.0.1", host="127.0.0.1", port=0, probe_port=0,
    report_url="", checkpoint_url_prefixes=(), lease_seconds=6, workers=4, log_level="INFO",
    job_network_policies=False,
)  # fmt: skip
TEMPLATE = {"spec": {"containers": [{"name": "worker", "image": "train:1", "command": ["everstep-run", "train.py"]}]}}


class Counting:
    """A client that counts what is sent for jobs: no lists and watches, and not the Lease."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name in ("list", "watch"):
            return method

        async def call(resource: Any, *args: Any, **kwargs: Any) -> Any:
            if resource is not LEASES:
                self.requests[f"{name} {resource.plural}"] += 1
            return await method(resource, *args, **kwargs)

        return call


@pytest.mark.parametrize(
    ("backend", "more"), [("everstep", {"create configmaps": 1}), ("c10d", {})], ids=["everstep", "c10d"]
)
async def test_start_of_a_job_is_a_create_of_each_object_and_two_statuses(backend: str, more: dict[str, int]) -> None:
    """That workers are wanted, which is written before anything is done, and that they exist."""
    clock = ManualClock()
    cluster = MemoryCluster(clock)
    client, counted = cluster.client(), Counting(cluster.client())
    operator = Operator(Clients.sharing(counted), SETTINGS, Metrics(), clock, synced=lambda: None)  # type: ignore[arg-type]
    task = asyncio.create_task(operator.run())
    try:
        spec = {"replicas": WORKERS, "rendezvous": {"backend": backend}, "template": TEMPLATE}
        await client.create(JOBS, "default", {"metadata": {"name": "digits"}, "spec": spec})
        status: dict[str, Any] = {}
        async with asyncio.timeout(30):  # of real time, which the operator's sockets take
            while status.get("replicas") != WORKERS:
                await clock.advance(0.1)
                await asyncio.sleep(0.001)
                status = (await client.get(JOBS, "default", "digits")).status
        for _ in range(40):  # nothing more is sent
            await clock.advance(0.1)
        documents = (await client.list(CONFIGMAPS, "default")).items
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            while not task.done():
                await clock.advance(0.2)
            await task
    assert status["replicas"] == WORKERS
    assert len(documents) == len(more)
    expected = {"create pods": WORKERS, "create services": 1, "patch_status trainingjobs": 2, **more}
    assert counted.requests == expected
