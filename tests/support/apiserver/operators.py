"""The operator against a real API server, with a test in place of the kubelets.

`Place` is one namespace with a job in it. `Operators` runs replicas of the real operator inside this process, each with
a client that sees only that namespace, counts its writes, and can be cut off for good after any of them: for the API
server that is a SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from everstep_operator.api.types import GangScheduler
from everstep_operator.kube.clients import Clients
from everstep_operator.kube.errors import ConnectionFailed, KubeError, NotFound
from everstep_operator.kube.resources import EVENTS, LEASES, PODS, SERVICES, Resource
from everstep_operator.kube.transport import HttpKubeClient
from everstep_operator.kube.wire import Pod, Unstructured
from everstep_operator.main import JOBS, Operator
from everstep_operator.rounds.registry import RoundRegistry
from everstep_operator.runtime.clock import SystemClock
from everstep_operator.settings import OperatorSettings
from everstep_operator.telemetry.metrics import Metrics
from support.apiserver.waiting import LIMIT, eventually
from support.conformity.bodies import CONFIGMAPS

WRITES = ("create", "merge_patch", "patch_status", "replace", "delete")
TEMPLATE = {"spec": {"containers": [{"name": "worker", "image": "train:1", "command": ["torchrun", "train.py"]}]}}
numbers = count()


@dataclass
class Place:
    """A namespace, what is in it, and the hands of its kubelets."""

    client: HttpKubeClient
    namespace: str

    async def create_job(self, name: str = "digits", labels: Mapping[str, str] = {}, **spec: Any) -> Unstructured:
        body = {
            "apiVersion": JOBS.api_version,
            "kind": JOBS.kind,
            "metadata": {"name": name, "labels": dict(labels)},
            # Worlds that no agent has to form: the pods have no processes here.
            "spec": {
                "replicas": 2,
                "rendezvous": {"backend": "c10d"},
                "template": copy.deepcopy(TEMPLATE),
                **spec,
            },
        }
        return await self.client.create(JOBS, self.namespace, body)

    async def edit_job(self, name: str = "digits", **spec: Any) -> None:
        await self.client.merge_patch(JOBS, self.namespace, name, {"spec": spec})

    async def job(self, name: str = "digits") -> Unstructured:
        return await self.client.get(JOBS, self.namespace, name)

    async def status(self, name: str = "digits") -> dict[str, Any]:
        return (await self.job(name)).status

    async def reason(self, name: str = "digits") -> str | None:
        """What the STATUS column shows."""
        conditions = (await self.status(name)).get("conditions", ())
        return next((c["reason"] for c in conditions if c["type"] == "Ready"), None)

    async def pods(self) -> dict[str, Pod]:
        return {p.metadata.name: p for p in (await self.client.list(PODS, self.namespace)).items}

    async def names(self) -> list[str]:
        return sorted(await self.pods())

    async def services(self) -> list[str]:
        """Without the one that every API server has in the namespace `default`."""
        listed = (await self.client.list(SERVICES, self.namespace)).items
        return sorted(s.metadata.name for s in listed if s.metadata.name != "kubernetes")

    async def events(self) -> list[str]:
        return [e.reason for e in (await self.client.list(EVENTS, self.namespace)).items]

    async def start(self, name: str, ahead: float = 0.0) -> None:
        """As a kubelet would: the pod runs and is Ready, by a node's clock that is so many seconds `ahead`."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + ahead))
        types = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ready = [{"type": t, "status": "True", "lastTransitionTime": at} for t in types]
        await self.set_pod(name, {"phase": "Running", "conditions": ready})

    async def end(self, name: str, code: int, reason: str = "", message: str = "") -> None:
        """The worker container ended with `code`."""
        ended = {"exitCode": code, "reason": reason or ("Completed" if code == 0 else "Error"), "message": message}
        container = {
            "name": "worker", "image": "train:1", "imageID": "", "ready": False, "restartCount": 0,
            "state": {"terminated": {**ended, "finishedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}},
        }  # fmt: skip
        conditions = [{"type": "Ready", "status": "False"}]
        phase = "Succeeded" if code == 0 else "Failed"
        await self.set_pod(name, {"phase": phase, "conditions": conditions, "containerStatuses": [container]})

    async def set_pod(self, name: str, status: dict[str, Any]) -> None:
        await self.client.patch_status(PODS, self.namespace, name, status)

    async def start_all(self, ahead: float = 0.0) -> None:
        """Run every pod that waits for a kubelet."""
        for name, pod in (await self.pods()).items():
            if pod.status.phase == "Pending" and pod.metadata.deletion_timestamp is None:
                with contextlib.suppress(NotFound):
                    await self.start(name, ahead)

    async def running(self, *expected: str) -> None:
        """Wait until exactly these pods exist and the job says that it runs, starting them as they come."""

        async def holds() -> bool:
            await self.start_all()
            return await self.names() == sorted(expected) and await self.reason() == "Running"

        await eventually(f"{expected} run in {self.namespace}", holds)


@dataclass
class CountingClient:
    """The operator's client, limited to one namespace, until it dies after `dies_after` writes.

    `loses` is the write whose answer is lost on the way back: it was carried out, and the operator lives on.
    """

    inner: HttpKubeClient
    namespace: str
    dies_after: int | None = None
    loses: int | None = None
    writes: list[str] = field(default_factory=list)
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    rounds: RoundRegistry = field(init=False)  # of the operator that has this client: agents would call it

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name == "watch":
            return self._watch
        if name == "list":
            return self._list
        return self._write(name, method) if name in WRITES else self._living(method)

    def _living(self, method: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self._require_alive()
            return await method(*args, **kwargs)

        return call

    def _require_alive(self) -> None:
        if self.dead.is_set():
            raise ConnectionFailed("killed")

    async def _list(self, resource: Resource[Any], namespace: str | None = None, **kwargs: Any) -> Any:
        self._require_alive()
        return await self.inner.list(resource, self.namespace if resource.namespaced else namespace, **kwargs)

    async def _watch(self, resource: Resource[Any], namespace: str | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        self._require_alive()
        stream = self.inner.watch(resource, self.namespace if resource.namespaced else namespace, **kwargs)
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                self._require_alive()
                yield event

    def _write(self, name: str, method: Any) -> Any:
        async def call(resource: Resource[Any], *args: Any, **kwargs: Any) -> Any:
            self._require_alive()
            if resource is LEASES:
                return await method(resource, *args, **kwargs)
            if self.dies_after is not None and len(self.writes) >= self.dies_after:
                self.dead.set()
                raise ConnectionFailed("killed before a write")
            number = len(self.writes)
            self.writes.append(f"{name} {resource.plural}")
            answer = await method(resource, *args, **kwargs)
            if self.dies_after is not None and len(self.writes) >= self.dies_after:
                self.dead.set()
                raise ConnectionFailed("killed after a write")
            if number == self.loses:
                raise ConnectionFailed("the answer was lost")
            return answer

        return call


NewPlace = Callable[[], Awaitable[Place]]


class Operators:
    """Replicas of the operator in this process, for the jobs of one place."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @contextlib.asynccontextmanager
    async def run(
        self,
        *,
        lease: str = "",
        dies_after: int | None = None,
        loses: int | None = None,
        network_policies: bool = False,
        pod_groups: tuple[GangScheduler, ...] = (),
        volume_claims: bool = False,
        page_port: int | None = None,
        kueue: bool = False,
    ) -> AsyncGenerator[CountingClient, None]:
        """One replica. Each has a Lease of its own, so that any number of them lead at once, unless told `lease`."""
        client = CountingClient(self.place.client, self.place.namespace, dies_after, loses)
        number = next(numbers)
        settings = OperatorSettings(
            namespace=lease or self.place.namespace, pod_name=f"replica-{number}", pod_ip="127.0.0.1", host="127.0.0.1",
            port=0,
            probe_port=0,
            report_url="", checkpoint_url_prefixes=(), lease_seconds=6, workers=4, log_level="INFO",
            job_network_policies=network_policies, pod_groups=pod_groups, volume_claims=volume_claims,
            page_port=page_port, kueue=kueue,
        )  # fmt: skip
        operator = Operator(Clients.sharing(client), settings, Metrics(), SystemClock(), synced=lambda: None)
        client.rounds = operator.rounds
        task = asyncio.create_task(operator.run())
        try:
            yield client
        finally:
            client.dead.set()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            # What expires in seconds is taken away at once: the Lease of a replica that was killed.
            with contextlib.suppress(KubeError):
                await self.place.client.delete(LEASES, settings.namespace, "everstep-operator")


async def wait_until_collected(place: Place) -> None:
    """Wait until garbage collection knows TrainingJobs: it looks for new kinds twice a minute."""
    for number in range(int(LIMIT)):
        owner = await place.create_job(f"canary-{number}")
        reference = {"apiVersion": JOBS.api_version, "kind": JOBS.kind, "name": owner.metadata.name,
                     "uid": owner.metadata.uid}  # fmt: skip
        name = owner.metadata.name
        await place.client.create(
            CONFIGMAPS, place.namespace, {"metadata": {"name": name, "ownerReferences": [reference]}}
        )
        await place.client.delete(JOBS, place.namespace, name, propagation="Background")
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            if name not in {o.metadata.name for o in (await place.client.list(CONFIGMAPS, place.namespace)).items}:
                return
            await asyncio.sleep(0.03)
    raise AssertionError("garbage collection does not see TrainingJobs")
