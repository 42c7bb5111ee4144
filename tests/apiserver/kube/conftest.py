"""The operator's own client against the real API server, directly and through a network that a test can break."""

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from everstep_operator.kube.credentials import KubeConfig
from everstep_operator.kube.errors import ConnectionFailed, NotFound
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.transport import ClientLimits, HttpKubeClient
from everstep_operator.kube.wire import Unstructured

NAMESPACES = Resource("", "v1", "namespaces", "Namespace", Unstructured, namespaced=False)
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount", Unstructured)
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap", Unstructured)
LIMIT = 30.0  # seconds that any wait may take


async def eventually(what: str, holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + LIMIT
    while True:
        answer = holds()
        if await answer if isinstance(answer, Awaitable) else answer:
            return
        assert time.monotonic() < deadline, f"not within {LIMIT:.0f} s: {what}"
        await asyncio.sleep(0.05)


class Network:
    """A TCP proxy before the API server. Cut: connections break, none is accepted. Frozen: open, and silent."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        target = urlsplit(config["clusters"][0]["cluster"]["server"])
        assert target.hostname is not None
        assert target.port is not None
        self._host, self._port = target.hostname, target.port
        self._config = config
        self.kubeconfig = folder / "through-network"
        self._cut = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self._config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
        self.kubeconfig.write_text(json.dumps(self._config))

    async def stop(self) -> None:
        self.cut()
        assert self._server is not None
        self._server.close()

    def cut(self) -> None:
        self._cut = True
        self._flowing.set()
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        self._flowing.clear()

    def heal(self) -> None:
        self._cut = False
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        with suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
            self._writers |= {writer, there_writer}
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
            self._writers -= {writer, there_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.fixture
async def client(control_plane: Any) -> AsyncGenerator[HttpKubeClient, None]:
    async with HttpKubeClient(KubeConfig(str(control_plane.kubeconfig))) as made:
        yield made


@pytest.fixture
async def network(control_plane: Any, tmp_path: Path) -> AsyncGenerator[Network, None]:
    made = Network(control_plane.kubeconfig, tmp_path)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def far_client(network: Network) -> AsyncGenerator[HttpKubeClient, None]:
    """A client whose every byte goes through `network`."""
    async with HttpKubeClient(KubeConfig(str(network.kubeconfig)), limits=ClientLimits(request_seconds=3.0)) as made:
        yield made


@pytest.fixture
async def namespace(client: HttpKubeClient, request: pytest.FixtureRequest) -> AsyncGenerator[str, None]:
    """A fresh namespace in which pods can be made."""
    name = f"kube-{abs(hash(request.node.nodeid)) % 10**8}-{int(time.time() * 1000) % 10**8}"
    await client.create(NAMESPACES, None, {"metadata": {"name": name}})

    async def has_account() -> bool:
        try:
            await client.get(ACCOUNTS, name, "default")
        except NotFound:
            return False
        return True

    await eventually("the namespace has its service account", has_account)
    yield name
    with suppress(NotFound, ConnectionFailed):
        await client.delete(NAMESPACES, None, name)


def pod_body(name: str, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [{"name": "worker", "image": "none"}], "terminationGracePeriodSeconds": 0},
    }


async def compact(control_plane: Any, resource_version: str) -> None:
    """Make etcd forget every older revision."""
    endpoint = next(value for value in control_plane.etcd.argv if value.startswith("http://127.0.0.1:"))
    request = urllib.request.Request(
        f"{endpoint}/v3/kv/compaction", data=json.dumps({"revision": resource_version, "physical": True}).encode()
    )

    def send() -> None:
        with urllib.request.urlopen(request, timeout=10) as reply:
            assert reply.status == 200

    await asyncio.to_thread(send)


@pytest.fixture
def kube() -> Any:
    """The helpers of this file, as a folder without `__init__` cannot be imported from."""

    class Helpers:
        pass

    helpers = Helpers()
    for name in ("NAMESPACES", "ACCOUNTS", "CONFIGMAPS", "eventually", "pod_body", "compact"):
        setattr(helpers, name, globals()[name])
    return helpers
