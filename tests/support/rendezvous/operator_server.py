"""Replicas of the real operator's round store over one in-memory cluster, in a thread: agents reach them over HTTP.

What plans is left out: the tests are the planner, and make the pods. Also a program, for benchmarks: serves a job of
`PODS` pods and prints one line of JSON, its port and the pods' tokens; ends with its standard input. With `tls` it is
reached by TLS, under an authority of its own.

    operator_server.py PODS [tls]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from everstep.contract import labels
from everstep.contract.addresses import host_and_port
from everstep.membership.backends.operator_calls import Limits, OperatorCalls
from everstep.membership.backends.operator_store import HttpStore
from everstep_local.apiserver.cluster import MemoryCluster
from everstep_local.apiserver.faults import Faults
from everstep_operator.kube.clients import Clients
from everstep_operator.kube.errors import KubeError
from everstep_operator.kube.resources import CONFIGMAPS, LEASES, NODES, PODS
from everstep_operator.kube.wire import Unstructured
from everstep_operator.main import JOBS, Operator
from everstep_operator.runtime.clock import SystemClock
from everstep_operator.settings import OperatorSettings
from everstep_operator.telemetry.metrics import Metrics
from support.network.ports import Ports
from support.operator.authorities import Authority, put
from support.rendezvous.operator_parts import TEMPLATE, lenient_crd, pod_body
from support.rendezvous.operator_parts import start as start_operator

T = TypeVar("T")
NAMESPACE = "default"


@dataclass
class Pod:
    """A worker's pod, and what its agent needs to speak to the operator."""

    name: str
    uid: str
    index: int
    incarnation: int
    token: str
    token_file: Path


@dataclass
class Replica:
    operator: Operator
    faults: Faults
    host: str
    apart: Apart | None = None
    task: asyncio.Task[None] = field(init=False)

    @property
    def port(self) -> int:
        return self.operator.server.port

    @property
    def url(self) -> str:
        return f"http://{host_and_port(self.host, self.port)}"

    @property
    def tls_url(self) -> str:
        """Of whoever is `localhost`."""
        assert self.operator.tls_server is not None
        return f"https://localhost:{self.operator.tls_server.port}"


class Apart:
    """A loop in a thread of its own. While it is frozen nothing of it runs, and its kernel accepts and acknowledges."""

    def __init__(self, inside: Callable[[], AbstractContextManager[object]]) -> None:
        self.loop = asyncio.new_event_loop()
        self._going = threading.Event()
        self._going.set()

        def run() -> None:
            with inside():
                self.loop.run_forever()

        self._thread = threading.Thread(target=run, name="operator-apart", daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, T], limit: float = 30.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(limit)

    def freeze(self) -> None:
        self._going.clear()
        self.loop.call_soon_threadsafe(self._going.wait)

    def thaw(self) -> None:
        self._going.set()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class FromApart:
    """A client of the API server that lives in another loop, `home`."""

    def __init__(self, client: Any, home: asyncio.AbstractEventLoop) -> None:
        self._client, self._home = client, home

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._there(method(*args, **kwargs))

        return self._watch if name == "watch" else call

    async def _watch(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        events = self._client.watch(*args, **kwargs)
        try:
            while True:
                try:
                    event = await self._there(anext(events))
                except StopAsyncIteration:
                    return
                yield event
        finally:
            await self._there(events.aclose())

    async def _there(self, work: Any) -> Any:
        async def waited() -> Any:
            return await work

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(waited(), self._home))


class OperatorServer:
    """`folder` is for token files. Methods may be called from any thread; those of the loop are coroutines."""

    def __init__(self, folder: Path, *, lease_seconds: int = 3) -> None:
        self.folder, self._lease_seconds = folder, lease_seconds
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="operators", daemon=True)
        self._thread.start()
        self.replicas: list[Replica] = []
        self._stores: list[HttpStore] = []
        self._pods = 0
        self._ports = Ports()
        self.do(self._set_up())

    async def _set_up(self) -> None:
        self.cluster = MemoryCluster(SystemClock())
        self.cluster.install(lenient_crd())
        self.client: Any = self.cluster.client()

    def do(self, work: Coroutine[Any, Any, T], limit: float = 30.0) -> T:
        """Run it in the loop, and give what it gives."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(limit)

    def stop(self) -> None:
        for store in self._stores:
            store.close()
        for replica in self.replicas:
            if not replica.task.done():
                self.end(replica)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
        self._ports.close()

    # --- replicas

    def start(
        self,
        port: int = 0,
        *,
        cut: bool = False,
        host: str = "127.0.0.1",
        inside: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        tls: Mapping[str, str] | None = None,
        apart: bool = False,
    ) -> Replica:
        """One more replica, at a port of one that was killed or at its own; returns when it serves, whether it leads or
        not. `cut`: it does not reach its API server, and returns when it listens. It listens at `host`, in the network
        of `inside`. `tls`: the settings of TLS; it is `localhost` then. `apart`: in a thread of its own, which can be
        frozen."""
        loop = Apart(inside) if apart else None
        start = self._start(port or self._ports.take(), cut, host, inside, tls or {}, loop)
        return self.do(start) if loop is None else loop.do(start)

    async def _start(
        self,
        port: int,
        cut: bool,
        host: str,
        inside: Callable[[], AbstractContextManager[object]],
        tls: Mapping[str, str],
        apart: Apart | None,
    ) -> Replica:
        number = len(self.replicas)
        settings = OperatorSettings.from_env(
            {
                "EVERSTEP_PORT": str(port), "EVERSTEP_PROBE_PORT": "0", "EVERSTEP_HOST": host,
                "EVERSTEP_POD_NAME": f"replica-{number}",
                "EVERSTEP_LEASE_SECONDS": str(self._lease_seconds),
                **({"EVERSTEP_REPORT_URL": "https://localhost", **tls} if tls else {}),
            }
        )  # fmt: skip
        faults = Faults()
        if cut:
            faults.cut()
        client: Any = self.cluster.client(faults=faults)
        if apart is not None:
            client = FromApart(client, self.loop)
        operator = Operator(
            Clients.sharing(client), settings, Metrics(process=False), SystemClock(), synced=lambda: None
        )
        replica = Replica(operator, faults, host, apart)
        listening, serving = asyncio.Event(), asyncio.Event()
        replica.task = asyncio.create_task(self._run(replica, listening, serving, inside))
        self.replicas.append(replica)
        waiting = asyncio.ensure_future((listening if cut else serving).wait())
        await asyncio.wait((waiting, replica.task), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if replica.task.done():
            replica.task.result()
        return replica

    @staticmethod
    async def _run(
        replica: Replica,
        listening: asyncio.Event,
        serving: asyncio.Event,
        inside: Callable[[], AbstractContextManager[object]],
    ) -> None:
        operator = replica.operator
        async with contextlib.AsyncExitStack() as stack:
            with inside():
                await stack.enter_async_context(operator.server)
                await stack.enter_async_context(operator.probes)
                if operator.tls_server is not None:
                    await stack.enter_async_context(operator.tls_server)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            listening.set()
            # The Lease names the port, which is known only now.
            here = host_and_port(replica.host, replica.port)
            operator.elector._identity = f"{operator.elector._identity.partition('_')[0]}_{here}"
            await start_operator(operator, group)
            serving.set()

    def leads(self, replica: Replica) -> bool:
        return replica.operator.elector.is_leader()

    def end(self, replica: Replica) -> None:
        """As SIGTERM: it gives its Lease back."""
        if replica.apart is None:
            self.do(self._end(replica))
        else:
            replica.apart.thaw()
            replica.apart.do(self._end(replica))
            replica.apart.stop()

    async def _end(self, replica: Replica) -> None:
        replica.task.cancel()
        await asyncio.gather(replica.task, return_exceptions=True)

    def kill(self, replica: Replica) -> None:
        """As SIGKILL: connections break, memory is lost. Its Lease is taken away at once, which saves seconds."""
        self.end(replica)

        async def free() -> None:
            with contextlib.suppress(KubeError):
                await self.client.delete(LEASES, NAMESPACE, "everstep-operator")

        self.do(free())

    # --- the cluster

    def create_job(self, name: str = "digits", backend: str = "everstep") -> Unstructured:
        body = {
            "metadata": {"name": name},
            "spec": {"replicas": 3, "template": TEMPLATE, "rendezvous": {"backend": backend}},
        }
        job: Unstructured = self.do(self.client.create(JOBS, NAMESPACE, body))
        return job

    def job(self, name: str = "digits") -> Unstructured:
        job: Unstructured = self.do(self.client.get(JOBS, NAMESPACE, name))
        return job

    def published(self, name: str = "digits") -> int:
        """The job's `status.world.round`."""
        return int(self.job(name).status.get("world", {}).get("round", 0))

    def document(self, name: str = "digits") -> Any:
        return self.do(self.client.get(CONFIGMAPS, NAMESPACE, f"{name}-rounds"))

    def create_pod(self, job: Unstructured, index: int, incarnation: int = 0, node: str = "node-1") -> Pod:
        name = f"{job.metadata.name}-w{index}-{incarnation}"
        body = pod_body(job, name, index, incarnation, node, 1)
        made = self.do(self.client.create(PODS, NAMESPACE, body))
        uid = made.metadata.uid
        token = self.cluster.issue_token(NAMESPACE, "default", name, uid, labels.TOKEN_AUDIENCE, 3600)
        self._pods += 1
        file = self.folder / f"token-{self._pods}"
        file.write_text(token + "\n")
        return Pod(name, uid, index, incarnation, token, file)

    def set_pod(self, pod: Pod, status: dict[str, Any]) -> None:
        self.do(self.client.patch_status(PODS, NAMESPACE, pod.name, status))

    def delete_pod(self, pod: Pod) -> None:
        self.do(self.client.delete(PODS, NAMESPACE, pod.name, grace_seconds=0))

    def set_node(self, name: str, ready: bool) -> None:
        conditions = [{"type": "Ready", "status": "True" if ready else "Unknown"}]

        async def write() -> None:
            with contextlib.suppress(KubeError):
                await self.client.create(NODES, None, {"metadata": {"name": name}})
            await self.client.patch_status(NODES, None, name, {"conditions": conditions})

        self.do(write())

    # --- agents

    def calls(self, pod: Pod, url: str = "", limits: Limits | None = None, ca: str = "") -> OperatorCalls:
        return OperatorCalls(url or self.replicas[0].url, str(pod.token_file), limits=limits, ca=ca)

    def store(self, pod: Pod, url: str = "", limits: Limits | None = None, ca: str = "") -> HttpStore:
        self._stores.append(HttpStore(self.calls(pod, url, limits, ca)))
        return self._stores[-1]


def main() -> None:
    logging.basicConfig(level=logging.ERROR)
    import tempfile  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        server = OperatorServer(Path(folder), lease_seconds=6)
        tls, ca = {}, b""
        if "tls" in sys.argv[2:]:
            authority = Authority()
            secret = put(Path(folder, "secret"), ca_crt=authority.pem, ca_key=authority.key_pem)
            tls, ca = {"EVERSTEP_TLS_DIR": str(secret), "EVERSTEP_TLS_PORT": "0"}, authority.pem
        replica = server.start(tls=tls)
        job = server.create_job()
        pods = [server.create_pod(job, i) for i in range(int(sys.argv[1]))]
        probes = f"http://{replica.host}:{replica.operator.probes.port}"
        url = replica.tls_url if tls else replica.url
        told = {"url": url, "ca": ca.decode(), "probes": probes, "tokens": [pod.token for pod in pods]}
        print(json.dumps(told), flush=True)
        sys.stdin.read()
        server.stop()


if __name__ == "__main__":
    main()
