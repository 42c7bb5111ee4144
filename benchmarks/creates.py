"""How fast the operator creates the pods of many jobs, beside a client that does nothing else.

    python benchmarks/creates.py [--quick] [--json PATH] [--rounds N]

A real kube-apiserver, and by turns: `bare`, a Python client that creates the same pods, 16 at a time, and `operator`,
the real operator's process with the same number of pods in jobs of ten. Each is a process of its own, and both are
timed here, by a watch: from the first pod to the last. The pods of one turn are gone before the next one begins, so
that other work on the machine falls on both.

`creates.ratio` has the goal: the operator's rate divided by the bare client's. It also makes a Service, a status and
events for each job, which the bare client does not. `requests_per_pod`: how many requests of any kind it sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "benchmarks/creates_parts"
sys.path[:0] = [str(ROOT / "benchmarks")]
from figures import Better, Figure, finish, parser, quantile

from everstep_operator.kube.client import Changed, EventType
from everstep_operator.kube.credentials import KubeConfig
from everstep_operator.kube.errors import KubeError, NotFound
from everstep_operator.kube.resources import PODS, Resource
from everstep_operator.kube.transport import HttpKubeClient
from everstep_operator.kube.wire import Unstructured
from everstep_operator.main import JOBS
from testcluster.controlplane import ControlPlane
from testcluster.daemon import free_ports

LIMIT = 300.0  # seconds that any wait may take
WORKERS = 10  # of a job
NAMESPACE, LEASES = "creates", "creates-lease"
NAMESPACES: Resource[Unstructured] = Resource("", "v1", "namespaces", "Namespace", Unstructured, namespaced=False)
ACCOUNTS: Resource[Unstructured] = Resource("", "v1", "serviceaccounts", "ServiceAccount", Unstructured)
TEMPLATE = {"spec": {"containers": [{"name": "worker", "image": "train:1", "command": ["everstep-run", "train.py"]}]}}


class Arrivals:
    """When each pod of the namespace was first seen, by a watch."""

    def __init__(self, client: HttpKubeClient) -> None:
        self._client = client
        self.seen: dict[str, float] = {}

    async def run(self) -> None:
        position = (await self._client.list(PODS, NAMESPACE)).resource_version
        while True:
            async for event in self._client.watch(PODS, NAMESPACE, resource_version=position):
                if isinstance(event, Changed):
                    position = event.object.metadata.resource_version
                    if event.type is EventType.ADDED:
                        self.seen.setdefault(event.object.metadata.name, time.monotonic())
                else:
                    position = event.resource_version

    async def rate(self, pods: int) -> float:
        """Pods a second, from the first to the last of so many."""
        await until(lambda: len(self.seen) >= pods, f"{pods} pods exist")
        return (pods - 1) / (max(self.seen.values()) - min(self.seen.values()))


async def until(holds: Any, what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while True:
        answer = holds()
        if await answer if asyncio.iscoroutine(answer) else answer:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {LIMIT:g} s: {what}")
        await asyncio.sleep(0.05)


class Turns:
    """Takes turns against one API server."""

    def __init__(self, plane: ControlPlane, client: HttpKubeClient, folder: Path, pods: int) -> None:
        self.plane, self.client, self.folder, self.pods = plane, client, folder, pods
        self.requests = 0.0  # of the operator in its last turn
        self.processor = 0.0  # seconds of it
        self._body: dict[str, Any] | None = None  # of a pod as the operator makes it

    async def bare(self) -> float:
        assert self._body is not None
        sample = self.folder / "pod.json"
        sample.write_text(json.dumps(self._body))
        command = [sys.executable, str(PARTS / "bare.py"), self.plane.url, self.plane.token, str(self.plane.ca_file)]
        async with self._watching() as arrivals:
            process = _start([*command, NAMESPACE, str(sample), str(self.pods)], self.folder / "bare.log")
            try:
                return await arrivals.rate(self.pods)
            finally:
                process.kill()
                process.wait()

    async def operator(self) -> float:
        for number in range(self.pods // WORKERS):
            spec = {"replicas": WORKERS, "template": TEMPLATE}
            await self.client.create(JOBS, NAMESPACE, {"metadata": {"name": f"job{number}"}, "spec": spec})
        (port,) = free_ports(1)
        command = [str(Path(sys.executable).with_name("everstep-operator")), "--kubeconfig", str(self.plane.kubeconfig)]
        flags = ["--namespace", LEASES, "--port", "0", "--probe-port", str(port), "--host", "127.0.0.1"]
        async with self._watching() as arrivals:
            process = _start([*command, *flags], self.folder / "operator.log")
            try:
                found = await arrivals.rate(self.pods)
                await asyncio.to_thread(self._measure, port)
                if self._body is None:
                    self._body = await self._sample()
                return found
            finally:
                process.terminate()
                process.wait(30)

    def _measure(self, port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        totals = [line.rsplit(" ", 1) for line in lines if line.startswith("everstep_api_requests_total{")]
        self.requests = sum(float(value) for _, value in totals)
        self.processor = next(float(line.split()[1]) for line in lines if line.startswith("process_cpu_seconds_total"))

    @contextlib.asynccontextmanager
    async def _watching(self) -> Any:
        arrivals = Arrivals(self.client)
        task = asyncio.create_task(arrivals.run())
        try:
            await asyncio.sleep(0.5)
            yield arrivals
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._clear()

    async def _sample(self) -> dict[str, Any]:
        """A pod as the operator wrote it: what the API server and its admission added is taken away."""
        done = self.plane.kubectl("get", "pods", "-n", NAMESPACE, "-o", "json")
        found = json.loads(done.stdout)["items"][0]
        spec = {key: value for key, value in found["spec"].items() if key not in ("nodeName", "tolerations")}
        spec["volumes"] = [one for one in spec.get("volumes", []) if not one["name"].startswith("kube-api-access")]
        for container in spec["containers"]:
            container["volumeMounts"] = [
                one for one in container.get("volumeMounts", []) if not one["name"].startswith("kube-api-access")
            ]
        meta = {key: found["metadata"][key] for key in ("labels", "annotations") if key in found["metadata"]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}

    async def _clear(self) -> None:
        """Delete everything of this turn."""
        for what in ("trainingjobs", "pods"):
            flags = ("-n", NAMESPACE, "--grace-period=0", "--force", "--wait=false")
            done = await asyncio.to_thread(self.plane.kubectl, "delete", what, "--all", *flags)
            assert done.returncode == 0, done.stderr

        async def empty() -> bool:
            return (
                not (await self.client.list(PODS, NAMESPACE)).items
                and not (await self.client.list(JOBS, NAMESPACE)).items
            )

        await until(empty, "the pods of the last turn are gone")


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


async def prepared(client: HttpKubeClient) -> None:
    for name in (NAMESPACE, LEASES):
        await client.create(NAMESPACES, None, {"metadata": {"name": name}})

    async def has_account() -> bool:
        try:
            await client.get(ACCOUNTS, NAMESPACE, "default")
        except NotFound:
            return False
        return True

    async def serves_jobs() -> bool:
        try:
            await client.list(JOBS, NAMESPACE)
        except KubeError:
            return False
        return True

    await until(has_account, "the namespace has its service account")
    await until(serves_jobs, "TrainingJobs are served")


async def measure(pods: int, rounds: int, folder: Path) -> list[Figure]:
    plane = ControlPlane(folder / "plane")
    plane.start()
    try:
        done = plane.kubectl("apply", "--server-side", "-f", str(ROOT / "manifests/crd.yaml"))
        assert done.returncode == 0, done.stderr
        async with HttpKubeClient(KubeConfig(str(plane.kubeconfig))) as client:
            await prepared(client)
            turns = Turns(plane, client, folder, pods)
            await turns.operator()  # a turn that warms the API server up, and shows what a pod is
            bare, operator, ratios = [], [], []
            for number in range(rounds):
                bare.append(await turns.bare())
                operator.append(await turns.operator())
                ratios.append(operator[-1] / bare[-1])
                print(f"turn {number}: bare {bare[-1]:.0f}/s, operator {operator[-1]:.0f}/s", file=sys.stderr)
    finally:
        plane.stop()
    higher, lower = Better.HIGHER, Better.LOWER
    return [
        Figure("creates.ratio", quantile(ratios, 0.5), "1", higher, rounds, goal=0.9),
        Figure("creates.bare", quantile(bare, 0.5), "pods/s", higher, rounds),
        Figure("creates.operator", quantile(operator, 0.5), "pods/s", higher, rounds),
        Figure("creates.requests_per_pod", turns.requests / pods, "1", lower, 1),
        Figure("creates.processor_per_pod", turns.processor / pods, "s", lower, 1),
    ]


if __name__ == "__main__":
    cli = parser(__doc__)
    cli.add_argument("--pods", type=int, metavar="N", help="pods of a turn (2000)")
    cli.add_argument("--rounds", type=int, metavar="N", help="turns of each (3)")
    args = cli.parse_args()
    pods, rounds = args.pods or (200 if args.quick else 2000), args.rounds or (1 if args.quick else 3)
    with tempfile.TemporaryDirectory() as place:
        sys.exit(finish(asyncio.run(measure(pods, rounds, Path(place))), args))
