"""One job and its rounds, over the in-memory API server: the operators that keep them can die at any request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from everstep.contract.document import Document, Member, Sizes, decode
from everstep_local.apiserver.cluster import MemoryCluster
from everstep_operator.kube.errors import ConnectionFailed
from everstep_operator.kube.resources import CONFIGMAPS
from everstep_operator.kube.wire import Unstructured
from everstep_operator.main import JOBS
from everstep_operator.rounds.agent_lookup import Agent
from everstep_operator.rounds.documents import JobRef, RoundDocuments
from everstep_operator.rounds.presence import Worker
from everstep_operator.rounds.registry import RoundRegistry
from everstep_operator.runtime.errors import NotLeading
from support.clocks.manual import ManualClock

SIZES = Sizes(1, 2)
A, B = Member(0, "a"), Member(1, "b")
NS = "default"
TEMPLATE = {"spec": {"containers": [{"name": "worker", "image": "train:1", "command": ["torchrun"]}]}}


class Mortal:
    """A client that reaches the API server until request number `at`; `after`: that one still takes effect."""

    def __init__(self, inner: Any, at: int | None = None, after: bool = False) -> None:
        self._inner, self._at, self._after = inner, at, after
        self.requests: list[str] = []
        self.dead = False
        self.gate: Callable[[str], Any] | None = None  # awaited before each request

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        async def call(resource: Any, *args: Any, **kwargs: Any) -> Any:
            if self.dead:
                raise ConnectionFailed("dead, by a test")
            what = f"{name} {resource.plural}"
            if self.gate is not None:
                await self.gate(what)
            self.requests.append(what)
            self.dead = self._at is not None and len(self.requests) > self._at
            if self.dead and not self._after:
                raise ConnectionFailed("dead, by a test")
            answer = await method(resource, *args, **kwargs)
            if self.dead:
                raise ConnectionFailed("dead, by a test")
            return answer

        return call


class Term:
    """Of a replica's leadership."""

    def __init__(self) -> None:
        self.leads, self.epoch = True, 1

    def __call__(self) -> int:
        if not self.leads:
            raise NotLeading("by a test")
        return self.epoch


class Stage:
    """One job, and everything that was ever kept of it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cluster = MemoryCluster(self.clock)
        self.client: Any = self.cluster.client()
        self.epochs = 0
        self.rounds: dict[int, tuple[Member, ...]] = {}

    async def start(self) -> None:
        body = {"metadata": {"name": "digits"}, "spec": {"replicas": 2, "template": TEMPLATE}}
        job = await self.client.create(JOBS, NS, body)
        self.job = JobRef(NS, "digits", job.metadata.uid)
        self.agents = [Agent(self.job, Worker(f"uid-{i}", i, 0)) for i in range(2)]

    def operator(
        self, client: Any | None = None, term: Callable[[], int] | None = None, **kwargs: Any
    ) -> RoundRegistry:
        """One that leads, in a term of its own if it is not told in which."""
        if term is None:
            self.epochs += 1
            term = functools.partial(int, self.epochs)
        documents = RoundDocuments(client or self.client, JOBS, require_leading=term)
        return RoundRegistry(documents, clock=self.clock, epoch=term, **kwargs)

    async def stored(self) -> Document | None:
        found = (await self.client.list(CONFIGMAPS, NS)).items
        return decode(found[0].data["document"].encode()) if found else None

    async def published(self) -> int:
        job: Unstructured = await self.client.get(JOBS, NS, "digits")
        return int(job.status.get("world", {}).get("round", 0))

    async def judge(self) -> None:
        """One membership a number, and none that is not published."""
        document = await self.stored()
        if document is not None and document.round:
            assert self.rounds.setdefault(document.round, document.members) == document.members
            assert document.round <= await self.published()
            assert document.round == max(self.rounds)
