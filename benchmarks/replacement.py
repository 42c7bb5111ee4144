"""How soon the operator replaces a lost worker while it watches ten thousand pods.

    python benchmarks/replacement.py [--quick] [--json PATH]

The real operator on the in-memory cluster, with the machine's clock: jobs that run, then one worker at a time ends with
a signal. A sample is the time from the pod's last status to the creation of its replacement. Losses come at a steady
pace for longer than a watch and a Lease's term live, so that what happens only now and then (a watch that is resumed, a
list, a garbage collection, a measurement of all jobs) meets some of them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from figures import Better, Figure, finish, parser, quantile

from everstep_local.apiserver.cluster import MemoryCluster
from everstep_operator.kube.client import Changed, EventType
from everstep_operator.kube.clients import Clients
from everstep_operator.kube.resources import PODS
from everstep_operator.main import JOBS, Operator
from everstep_operator.runtime.clock import SystemClock
from everstep_operator.settings import OperatorSettings
from everstep_operator.telemetry.metrics import Metrics

LIMIT = 300.0  # seconds that any wait may take
TEMPLATE = {"spec": {"containers": [{"name": "worker", "image": "train:1", "command": ["everstep-run", "train.py"]}]}}
READY = [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}]
ENDED = {"exitCode": 137, "reason": "Error", "message": ""}
LOST = {
    "phase": "Failed",
    "conditions": [{"type": "Ready", "status": "False"}],
    "containerStatuses": [{"name": "worker", "state": {"terminated": ENDED}}],
}


class Kubelets:
    """Make every new pod ready at once, and note when it came."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.created: dict[str, float] = {}
        self.ready: set[str] = set()
        self.came = asyncio.Event()

    async def run(self) -> None:
        while True:
            listed = await self.client.list(PODS, None)
            for pod in listed.items:
                await self._take(pod.metadata.namespace, pod.metadata.name, pod.status.phase)
            async for event in self.client.watch(PODS, None, resource_version=listed.resource_version):
                if isinstance(event, Changed) and event.type is EventType.ADDED:
                    await self._take(event.object.metadata.namespace, event.object.metadata.name, "Pending")

    async def _take(self, namespace: str, name: str, phase: str) -> None:
        self.created.setdefault(name, time.monotonic())
        self.came.set()
        if phase == "Pending":
            await self.client.patch_status(PODS, namespace, name, {"phase": "Running", "conditions": READY})
            await asyncio.sleep(0)
        self.ready.add(name)


async def until(holds: Any, what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {LIMIT:g} s: {what}")
        await asyncio.sleep(0.005)


async def measure(jobs: int, workers: int, losses: int, seconds: float) -> tuple[list[float], list[float], float]:
    """Seconds to each replacement; how late the event loop was each time; seconds until all pods were there."""
    clock = SystemClock()
    cluster = MemoryCluster(clock, history=100_000)
    client = cluster.client()
    settings = OperatorSettings.from_env(
        {"EVERSTEP_PORT": "0", "EVERSTEP_PROBE_PORT": "0", "EVERSTEP_HOST": "127.0.0.1"}
    )
    operator = Operator(Clients.sharing(cluster.client()), settings, Metrics(), clock, synced=lambda: None)
    kubelets = Kubelets(client)
    began = time.monotonic()
    tasks = [asyncio.create_task(kubelets.run()), asyncio.create_task(operator.run())]
    for number in range(jobs):
        spec = {"replicas": workers, "template": TEMPLATE, "elastic": {"minReplicas": 1, "maxReplicas": workers}}
        await client.create(JOBS, "default", {"metadata": {"name": f"job{number}"}, "spec": spec})
    await until(lambda: len(kubelets.ready) >= jobs * workers, "all pods run")
    started = time.monotonic() - began
    # The API server's objects are in this process, as dictionaries: a collector that walks them would be measured.
    gc.collect()
    gc.freeze()
    await asyncio.sleep(2)  # what their readiness has put on the queue is worked off
    stalls: list[float] = []

    async def beat() -> None:
        while True:
            due = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            stalls.append(time.monotonic() - due)

    tasks.append(asyncio.create_task(beat()))
    random, lives, took = Random(0), dict[tuple[int, int], int](), list[float]()
    for _ in range(losses):
        job, index = random.randrange(jobs), random.randrange(workers)
        life = lives.get((job, index), 0)
        lives[job, index] = life + 1
        lost, replaced = f"job{job}-w{index}-{life}", f"job{job}-w{index}-{life + 1}"
        at = time.monotonic()
        await client.patch_status(PODS, "default", lost, LOST)
        await until(lambda replaced=replaced: replaced in kubelets.created, f"{replaced} is created")
        took.append(kubelets.created[replaced] - at)
        await asyncio.sleep(max(0.0, seconds / losses - (time.monotonic() - at)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return took, stalls, started


if __name__ == "__main__":
    cli = parser(__doc__)
    cli.add_argument("--jobs", type=int, metavar="N", help="jobs that run (100)")
    cli.add_argument("--workers", type=int, metavar="N", help="workers of each (100)")
    args = cli.parse_args()
    jobs, workers = args.jobs or (4 if args.quick else 100), args.workers or (10 if args.quick else 100)
    losses, seconds = (10, 2.0) if args.quick else (100, 100.0)
    logging.basicConfig(level=logging.WARNING)
    took, stalls, started = asyncio.run(measure(jobs, workers, losses, seconds))
    lower = Better.LOWER
    figures = [
        Figure("replacement.p50", quantile(took, 0.5), "s", lower, losses, goal=0.2),
        Figure("replacement.p99", quantile(took, 0.99), "s", lower, losses, goal=1.0),
        Figure("replacement.max", max(took), "s", lower, losses, goal=2.0),
        Figure("replacement.loop_late.max", max(stalls), "s", lower, len(stalls), goal=1.0),
        Figure("replacement.start", started, "s", lower, 1),
    ]
    sys.exit(finish(figures, args))
