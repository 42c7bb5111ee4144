"""A world is a Kubernetes API with a namespace for one case.

In the real one time passes by itself; in memory it is the world that lets it pass, by the same calls.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import count
from typing import Any, TypeVar

from everstep_local.apiserver.cluster import MemoryCluster
from everstep_operator.kube.client import Bookmark, Changed, KubeClient
from everstep_operator.kube.credentials import KubeConfig
from everstep_operator.kube.errors import KubeError, NotFound
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.transport import HttpKubeClient
from everstep_operator.runtime.clock import cancel
from support.apiserver.waiting import compact
from support.clocks.manual import ManualClock
from support.conformity.bodies import ACCOUNTS, CONFIGMAPS, NAMESPACES, configmap

T = TypeVar("T")
LIMIT = 60.0  # seconds that any wait may take, in the time of the world
_numbers = count()


class Watcher:
    """What one watch was told so far; `done` when the server ended it."""

    def __init__(self, client: KubeClient, resource: Resource[Any], namespace: str | None, **options: Any) -> None:
        self.events: list[Changed[Any] | Bookmark] = []
        self._stream = client.watch(resource, namespace, **options)
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async with aclosing(self._stream) as stream:
            async for event in stream:
                self.events.append(event)

    @property
    def done(self) -> bool:
        if self._task.done():
            self._task.result()
        return self._task.done()

    @property
    def changes(self) -> list[Changed[Any]]:
        return [event for event in self.events if isinstance(event, Changed)]

    def seen(self) -> list[tuple[str, str]]:
        """(type, name) of every change. Raises what has ended the watch, if that was an error."""
        if self._task.done():
            self._task.result()
        return [(str(event.type), event.object.metadata.name) for event in self.changes]

    async def close(self) -> None:
        await cancel(self._task)


class World(ABC):
    """`client` is one of its clients, `namespace` the case's own, with its service account."""

    client: KubeClient
    namespace: str

    @abstractmethod
    async def pause(self) -> None:
        """Let a moment pass."""

    @abstractmethod
    def time(self) -> float:
        """Seconds, of this world."""

    @abstractmethod
    def token(self, pod: str, uid: str, audience: str) -> str:
        """A service-account token that is bound to a pod; to none, if it is empty."""

    @abstractmethod
    async def forgotten_version(self) -> str:
        """A resource version that has left the history."""

    async def eventually(self, what: str, holds: Callable[[], bool | Awaitable[bool]]) -> None:
        """Poll until it holds."""
        deadline = self.time() + LIMIT
        while True:
            answer = holds()
            if await answer if isinstance(answer, Awaitable) else answer:
                return
            assert self.time() < deadline, f"not within {LIMIT:.0f} s: {what}"
            await self.pause()

    async def gone(self, resource: Resource[Any], name: str, namespace: str | None = "") -> None:
        """Wait until the object does not exist."""

        async def holds() -> bool:
            try:
                await self.client.get(resource, self.namespace if namespace == "" else namespace, name)
            except NotFound:
                return True
            return False

        await self.eventually(f"{resource.plural}/{name} is gone", holds)

    @asynccontextmanager
    async def watching(
        self, resource: Resource[Any], namespace: str | None = "", **options: Any
    ) -> AsyncGenerator[Watcher, None]:
        """A watch that runs beside the case, from now on unless told otherwise."""
        place = self.namespace if namespace == "" else namespace
        if "resource_version" not in options:
            options["resource_version"] = (await self.client.list(resource, place)).resource_version
        watcher = Watcher(self.client, resource, place, **options)
        try:
            yield watcher
        finally:
            await watcher.close()

    async def told(self, watcher: Watcher, *expected: tuple[str, str]) -> None:
        """Wait until the watcher was told exactly these changes."""
        with suppress(AssertionError):
            await self.eventually("the watcher was told", lambda: len(watcher.seen()) >= len(expected))
        assert watcher.seen() == list(expected)

    async def new_namespace(self) -> str:
        """Another namespace, ready for pods."""
        name = f"case-{next(_numbers)}-{time.time_ns() % 10**9}"
        await self.client.create(NAMESPACES, None, {"metadata": {"name": name}})

        async def has_account() -> bool:
            try:
                await self.client.get(ACCOUNTS, name, "default")
            except NotFound:
                return False
            return True

        await self.eventually("the namespace has its service account", has_account)
        return name


class MemoryWorld(World):
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cluster = MemoryCluster(self.clock)
        self.client = self.cluster.client()

    async def pause(self) -> None:
        await self.clock.advance(0.5)

    def time(self) -> float:
        return self.clock.monotonic()

    def token(self, pod: str, uid: str, audience: str) -> str:
        return self.cluster.issue_token(self.namespace, "default", pod, uid, audience, 600)

    async def forgotten_version(self) -> str:
        self.cluster.compact()
        return "1"


class ServerWorld(World):
    def __init__(self, plane: Any, client: HttpKubeClient) -> None:
        self.plane = plane
        self.client = client

    async def pause(self) -> None:
        await asyncio.sleep(0.05)

    def time(self) -> float:
        return time.monotonic()

    def token(self, pod: str, uid: str, audience: str) -> str:
        done = self.plane.kubectl(
            "create", "token", "default", "-n", self.namespace, "--audience", audience,
            *(("--bound-object-kind", "Pod", "--bound-object-name", pod, "--bound-object-uid", uid) if pod else ()),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return str(done.stdout.strip())

    async def forgotten_version(self) -> str:
        newest = await self.client.create(CONFIGMAPS, self.namespace, configmap("newest"))
        # Compacted in etcd, and no cache that still has it.
        await asyncio.to_thread(self.plane.stop_apiserver)
        await asyncio.to_thread(compact, self.plane, newest.metadata.resource_version)
        await asyncio.to_thread(self.plane.start_apiserver)
        return "1"


@asynccontextmanager
async def memory_world() -> AsyncGenerator[World, None]:
    world = MemoryWorld()
    world.namespace = await world.new_namespace()
    yield world


@asynccontextmanager
async def server_world(plane: Any) -> AsyncGenerator[World, None]:
    async with HttpKubeClient(KubeConfig(str(plane.kubeconfig))) as client:
        world = ServerWorld(plane, client)
        world.namespace = await world.new_namespace()
        yield world
        with suppress(KubeError):
            await client.delete(NAMESPACES, None, world.namespace)
