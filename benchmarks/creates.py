"""How fast the operator creates the pods of many jobs, beside a client that does nothing else.

    python benchmarks/creates.py [--quick] [--json PATH] [--rounds N]

A real kube-apiserver, and by turns:
- `operator`: the real operator's process, with jobs of ten workers.
- `same`: a bare Python client that makes the same objects of the same sizes: for each job each status patch, Service,
  ConfigMap, policy, pod and event that the operator made for a job of the first turn (`creates_parts/job_requests.py`).
  It has no logic, waits for nothing that it wrote, and sends 16 requests at a time.
- `pods`: the same client, the same number of pods, and nothing else.

Each is a process of its own, and all are timed here, by watches, from the first write of a status or pod. All objects
of one turn are gone before the next one begins, and so is the work that they make for the API server and the controller
manager.

`creates.ratio` has the goal: the operator's rate divided by that of `same`, each until all pods exist and each job's
status counts its ten workers, which is the last that is written. `creates.pods_ratio` has none: it is to the last pod,
of `operator` and `pods`, and in its time the operator makes more than pods. `requests_per_pod`: how many requests of
any kind were sent, the operator's with its lists, watches and Leases.

`creates.wait.…`: where the passes of the operator wait, from its metrics in all turns: a job with news for its pass
(`queue`), a write for its turn (`create`, `change`, `event`), a request for the server's answer (`server.create`,
`server.patch`). `creates.wait.pass`: a whole pass. They are quantiles of histograms, between whose bounds a straight
line is assumed, and have no goals.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "benchmarks/creates_parts"
sys.path[:0] = [str(ROOT / "benchmarks")]
from creates_parts.job_requests import BEFORE_PODS, JobRequests, Request, kubectl_name, pods_alone
from figures import Better, Figure, finish, parser, quantile

from everstep.contract import labels
from everstep_operator.kube.client import Changed, EventType
from everstep_operator.kube.credentials import KubeConfig
from everstep_operator.kube.errors import KubeError, NotFound
from everstep_operator.kube.resources import CONFIGMAPS, EVENTS, PODS, Resource
from everstep_operator.kube.transport import HttpKubeClient
from everstep_operator.kube.wire import Unstructured
from everstep_operator.main import JOBS
from testcluster.controlplane import ControlPlane
from testcluster.daemon import free_ports

LIMIT = 300.0  # seconds that any wait may take
WORKERS = 10  # of a job
MADE = (*BEFORE_PODS, EVENTS)  # for a job, beside its pods
# The operator's histogram of each wait, and the label of the series.
WAITS = {
    "queue": ("everstep_queue_wait_seconds", ""),
    "create": ("everstep_write_wait_seconds", 'lane="create"'),
    "change": ("everstep_write_wait_seconds", 'lane="change"'),
    "event": ("everstep_write_wait_seconds", 'lane="event"'),
    "server.create": ("everstep_api_request_seconds", 'verb="create"'),
    "server.patch": ("everstep_api_request_seconds", 'verb="patch"'),
    "pass": ("everstep_reconcile_seconds", ""),
}
NAMESPACE, LEASES = "creates", "creates-lease"
NAMESPACES: Resource[Unstructured] = Resource("", "v1", "namespaces", "Namespace", Unstructured, namespaced=False)
ACCOUNTS: Resource[Unstructured] = Resource("", "v1", "serviceaccounts", "ServiceAccount", Unstructured)
TEMPLATE = {"spec": {"containers": [{"name": "worker", "image": "train:1", "command": ["everstep-run", "train.py"]}]}}


class Rates(NamedTuple):
    """Pods a second, from the first write: `pods` to the last pod, `whole` to the last status."""

    pods: float
    whole: float


class Arrivals:
    """When each pod of the namespace was first seen, and each status that a job had, by watches."""

    def __init__(self, client: HttpKubeClient) -> None:
        self._client = client
        self.seen: dict[str, float] = {}
        self.begun: float | None = None  # when the first status was seen
        self.statuses: dict[str, list[dict[str, Any]]] = {}  # by job
        self.counted: dict[str, float] = {}  # when a job's status first counted all its workers

    async def run(self) -> None:
        await asyncio.gather(self._watch(PODS, self._pod), self._watch(JOBS, self._job))

    async def _watch(self, resource: Resource[Any], take: Callable[[EventType, Any], None]) -> None:
        position = (await self._client.list(resource, NAMESPACE)).resource_version
        while True:
            async for event in self._client.watch(resource, NAMESPACE, resource_version=position):
                if isinstance(event, Changed):
                    position = event.object.metadata.resource_version
                    take(event.type, event.object)
                else:
                    position = event.resource_version

    def _pod(self, type_: EventType, pod: Any) -> None:
        if type_ is EventType.ADDED:
            self.seen.setdefault(pod.metadata.name, time.monotonic())

    def _job(self, type_: EventType, job: Unstructured) -> None:
        if type_ is EventType.MODIFIED and job.metadata.deletion_timestamp is None:
            self.begun = self.begun or time.monotonic()
            if job.status.get("replicas") == WORKERS:
                self.counted.setdefault(job.metadata.name, time.monotonic())
            known = self.statuses.setdefault(job.metadata.name, [])
            if not known or known[-1] != job.status:
                known.append(dict(job.status))

    async def rates(self, pods: int, jobs: int = 0) -> Rates:
        """Until so many pods and so many jobs with a status exist."""
        await until(lambda: len(self.seen) >= pods and len(self.counted) >= jobs, f"{pods} pods of {jobs} jobs exist")
        first, last = min(self.seen.values()), max(self.seen.values())
        begun = min(first, self.begun or first)
        return Rates((pods - 1) / (last - begun), (pods - 1) / (max((last, *self.counted.values())) - begun))


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
        self.waits: dict[str, Counter[float]] = {name: Counter() for name in WAITS}
        self.requests_bare = 0  # of the client that makes the same
        self._job: JobRequests | None = None  # what the operator makes for a job

    async def same(self) -> Rates:
        assert self._job is not None
        requests = [one for name, uid in (await self._jobs()).items() for one in self._job.of(name, uid)]
        self.requests_bare = len(requests)
        return await self._bare(requests, self.jobs)

    async def pods_alone(self) -> Rates:
        assert self._job is not None
        requests = [one for number in range(self.jobs) for one in self._job.of(_name(number), self._job.uid)]
        return await self._bare(pods_alone(requests))

    async def _bare(self, requests: list[Request], jobs: int = 0) -> Rates:
        file = self.folder / "requests.json"
        file.write_text(json.dumps(requests))
        command = [sys.executable, str(PARTS / "bare.py"), self.plane.url, self.plane.token, str(self.plane.ca_file)]
        async with self._watching() as arrivals:
            process = _start([*command, str(file)], self.folder / "bare.log")
            try:
                found: Rates = await arrivals.rates(self.pods, jobs)
                await until(lambda: process.poll() is not None, "the bare client ends")
                if process.returncode:
                    raise SystemExit((self.folder / "bare.log").read_text())
                return found
            finally:
                process.kill()
                process.wait()

    def made_for_a_job(self) -> str:
        assert self._job is not None
        kinds = Counter(body.get("kind", "status patch") for _, body in self._job.requests)
        return ", ".join(f"{count} {kind}" for kind, count in kinds.items())

    @property
    def jobs(self) -> int:
        return self.pods // WORKERS

    async def _jobs(self) -> dict[str, str]:
        """Make the jobs of a turn; their UIDs by their names."""
        made: dict[str, str] = {}
        for name in map(_name, range(self.jobs)):
            body = {"metadata": {"name": name}, "spec": {"replicas": WORKERS, "template": TEMPLATE}}
            made[name] = (await self.client.create(JOBS, NAMESPACE, body)).metadata.uid
        return made

    async def operator(self) -> Rates:
        made = await self._jobs()
        (port,) = free_ports(1)
        command = [str(Path(sys.executable).with_name("everstep-operator")), "--kubeconfig", str(self.plane.kubeconfig)]
        flags = ["--namespace", LEASES, "--port", "0", "--probe-port", str(port), "--host", "127.0.0.1"]
        async with self._watching() as arrivals:
            process = _start([*command, *flags], self.folder / "operator.log")
            try:
                found: Rates = await arrivals.rates(self.pods, self.jobs)
                await asyncio.to_thread(self._measure, port)
                if self._job is None:
                    self._job = await self._sample(arrivals, made)
                return found
            finally:
                process.terminate()
                process.wait(30)

    async def _sample(self, arrivals: Arrivals, made: dict[str, str]) -> JobRequests:
        """What was made for the first job, once its status counts its workers and a moment has passed."""
        name = _name(0)
        await until(lambda: arrivals.statuses[name][-1].get("replicas") == WORKERS, "the status counts the workers")
        await asyncio.sleep(2.0)  # for its events
        return await asyncio.to_thread(
            JobRequests.seen, self.plane, NAMESPACE, name, made[name], list(arrivals.statuses[name])
        )

    def _measure(self, port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        totals = [line.rsplit(" ", 1) for line in lines if line.startswith("everstep_api_requests_total{")]
        self.requests = sum(float(value) for _, value in totals)
        self.processor = next(float(line.split()[1]) for line in lines if line.startswith("process_cpu_seconds_total"))
        for name, (metric, label) in WAITS.items():
            self.waits[name].update(buckets(lines, metric, label))

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

    async def _clear(self) -> None:
        """Delete everything of this turn."""
        for what in ("trainingjobs", "pods", *map(kubectl_name, MADE)):
            flags = ("-n", NAMESPACE, "--grace-period=0", "--force", "--wait=false")
            which = ("-l", labels.JOB) if what == CONFIGMAPS.plural else ("--all",)
            done = await asyncio.to_thread(self.plane.kubectl, "delete", what, *which, *flags)
            assert done.returncode == 0, done.stderr

        async def empty() -> bool:
            kinds: tuple[Resource[Any], ...] = (PODS, JOBS, *MADE)
            found = [one for kind in kinds for one in (await self.client.list(kind, NAMESPACE)).items]
            return all(one.metadata.name == "kube-root-ca.crt" for one in found)

        await until(empty, "the objects of the last turn are gone")


def buckets(lines: Iterable[str], metric: str, label: str) -> dict[float, float]:
    """How many samples of a histogram are at most as long as each of its bounds, in seconds."""
    found = {}
    for line in lines:
        if line.startswith(f"{metric}_bucket{{") and label in line:
            series, count = line.rsplit(" ", 1)
            found[float(series.split('le="')[1].split('"')[0])] = float(count)
    return found


def between(counts: Mapping[float, float], q: float) -> float:
    """The q-quantile of a histogram, in seconds, on a straight line between two bounds; at most the last finite one."""
    wanted, below, lower = q * max(counts.values()), 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if count >= wanted and count > below:
            return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / (count - below)
        below, lower = count, bound
    return lower


def waits(counted: Mapping[str, Mapping[float, float]]) -> list[Figure]:
    return [
        Figure(
            f"creates.wait.{name}.p{round(100 * q)}", between(counts, q), "s", Better.LOWER, int(max(counts.values()))
        )
        for name, counts in counted.items()
        if counts and max(counts.values()) > 0
        for q in (0.5, 0.99)
    ]


def _name(job: int) -> str:
    return f"job{job:04}"


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
            await turns.operator()  # a turn that warms the API server up, and shows what a job's objects are
            print(f"made for a job: {turns.made_for_a_job()}", file=sys.stderr)
            alone, same, operator = [], [], []
            for number in range(rounds):
                alone.append(await turns.pods_alone())
                same.append(await turns.same())
                operator.append(await turns.operator())
                load = " ".join(f"{one:.1f}" for one in os.getloadavg())
                rates = f"pods {alone[-1].pods:.0f}/s, same {same[-1].whole:.0f}/s, operator {operator[-1].whole:.0f}/s"
                print(
                    f"turn {number}: {rates} ({operator[-1].pods:.0f}/s to its last pod), load {load}", file=sys.stderr
                )
    finally:
        plane.stop()
    higher, lower = Better.HIGHER, Better.LOWER
    ratios = [mine.whole / theirs.whole for mine, theirs in zip(operator, same, strict=True)]
    pods_ratios = [mine.pods / theirs.pods for mine, theirs in zip(operator, alone, strict=True)]
    return [
        Figure("creates.ratio", quantile(ratios, 0.5), "1", higher, rounds, goal=0.9),
        Figure("creates.pods_ratio", quantile(pods_ratios, 0.5), "1", higher, rounds),
        Figure("creates.same", quantile([one.whole for one in same], 0.5), "pods/s", higher, rounds),
        Figure("creates.pods", quantile([one.pods for one in alone], 0.5), "pods/s", higher, rounds),
        Figure("creates.operator", quantile([one.whole for one in operator], 0.5), "pods/s", higher, rounds),
        Figure("creates.requests_per_pod", turns.requests / pods, "1", lower, 1),
        Figure("creates.requests_per_pod.same", turns.requests_bare / pods, "1", lower, 1),
        Figure("creates.processor_per_pod", turns.processor / pods, "s", lower, 1),
        *waits(turns.waits),
    ]


if __name__ == "__main__":
    cli = parser(__doc__)
    cli.add_argument("--pods", type=int, metavar="N", help="pods of a turn (2000)")
    cli.add_argument("--rounds", type=int, metavar="N", help="turns of each (3)")
    args = cli.parse_args()
    pods, rounds = args.pods or (200 if args.quick else 2000), args.rounds or (1 if args.quick else 3)
    with tempfile.TemporaryDirectory() as place:
        sys.exit(finish(asyncio.run(measure(pods, rounds, Path(place))), args))
