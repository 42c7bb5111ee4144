"""The clients of one replica: which requests share connections, and which never do.

A client has a bounded number of connections, and a request waits until one is free. So requests of different urgency
have different clients (ADR 0039): a Lease that waits behind sixty creates is lost, and an agent whose token waits there
forms no round. Invariant: no client carries more requests at a time than it has connections, except that of rounds,
which has a bound in time instead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.credentials import Source
from everstep_operator.kube.transport import ClientLimits, HttpKubeClient, OnAnswer

LEASE, WATCHES, CALLERS, ROUNDS, PAGE = 2, 16, 48, 32, 4  # connections
WATCHES_OF_NAMESPACE = 6  # jobs, pods, services, budgets, network policies, workloads


@dataclass(frozen=True, slots=True)
class Clients:
    """`lease`: the Lease, and nothing else. `watches`: the lists and watches of the caches. `callers`: what an agent's
    call waits for (reviews of tokens, keys, look-ups of pods). `rounds`: the agents' documents. `jobs`: statuses, pods,
    events; `runtime.write_limit` decides which of these is next. `page`: what readers of the page wait for."""

    lease: KubeClient
    watches: KubeClient
    callers: KubeClient
    rounds: KubeClient
    jobs: KubeClient
    page: KubeClient

    @classmethod
    def sharing(cls, client: KubeClient) -> Clients:
        """One client for everything: for an API server in memory, which has no connections to wait for."""
        return cls(client, client, client, client, client, client)

    def guard(self, may_write: Callable[[], object]) -> None:
        """What writes for a leader asks `may_write` before each try. An API server in memory is never tried again."""
        for client in (self.rounds, self.jobs):
            if isinstance(client, HttpKubeClient):
                client.guard(may_write)


@asynccontextmanager
async def connected(
    source: Source, writes: int, on_answer: OnAnswer | None = None, *, namespaces: int = 1
) -> AsyncIterator[Clients]:
    """Clients over HTTP. `writes`: how many writes of jobs are under way at a time, at most. `namespaces`: how many are
    watched, each by watches of its own."""
    async with AsyncExitStack() as stack:

        async def client(connections: int) -> HttpKubeClient:
            limits = ClientLimits(connections=connections)
            return await stack.enter_async_context(HttpKubeClient(source, limits=limits, on_answer=on_answer))

        yield Clients(
            lease=await client(LEASE),
            watches=await client(WATCHES + (namespaces - 1) * WATCHES_OF_NAMESPACE),
            callers=await client(CALLERS),
            rounds=await client(ROUNDS),
            jobs=await client(writes),
            page=await client(PAGE),
        )
