"""Who is handled next when many come at once, and what a connection leaves behind. Over sockets, in one event loop.

Senders are plain sockets that have sent everything before the server's loop turns, so that no other load on the machine
decides who comes first.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.contract.messages import REPORT_PATH, Phase, Report
from everstep_operator.endpoint.auth import LeaderHere, RequestAuth
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.runtime.fair_queueing import MAX_OF_ALL, MAX_OF_GROUP, FairQueue, Flow
from support.operator.report_server import report_server
from support.operator.tokens import Authority, Reviewer, pod

CLUSTER = Authority()
BODY = Report(Phase.TRAIN, rank=0, world_size=2, at=100.0, step=5).encode()
VICTIM = pod(0, "victim")


@dataclass
class Server:
    port: int = 0
    order: list[PodIdentity] = field(default_factory=list)
    tokens: dict[PodIdentity, str] = field(default_factory=dict)

    def request(self, who: PodIdentity) -> bytes:
        head = f"POST {REPORT_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.tokens[who]}\r\n"
        return f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY

    def connect(self, address: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), source_address=(address, 0))

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not what():  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(*who: PodIdentity) -> AsyncIterator[Server]:
    """All of `who` are known already: each has reported once."""
    reviewer, server = Reviewer(CLUSTER), Server()
    server.tokens = {one: reviewer.issue(one) for one in who}
    endpoint = report_server(
        RequestAuth(reviewer.cache(monotonic=asyncio.get_running_loop().time), LeaderHere),
        accept=lambda one, _report: server.order.append(one),
    )
    async with endpoint:
        server.port = endpoint.port
        for one in who:
            with server.connect() as guest:
                guest.sendall(server.request(one))
                await server.until(lambda one=one: one in server.order)  # type: ignore[misc]
        server.order.clear()
        yield server


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("namespace", ["victim", "hostile"])
async def test_report_that_comes_after_many_of_others_does_not_wait_for_all_of_them(
    namespace: str, pieces: int
) -> None:
    """Also not for those of other pods of its own namespace."""
    others = [pod(number, namespace) for number in range(10, 18)]
    async with serving(VICTIM, *others) as server:
        guests = [(server.connect(), one) for one in [*others * 10, VICTIM]]
        for guest, one in guests:
            guest.sendall(server.request(one))
        await server.until(lambda: len(server.order) == len(guests))
        server.order.clear()
        for guest, one in guests:
            guest.sendall(server.request(one) * pieces)
        await server.until(lambda: len(server.order) == len(guests) * pieces)
        assert server.order.index(VICTIM) < 4 * len(others)
        for guest, _ in guests:
            guest.close()


async def test_server_without_free_file_descriptors_accepts_again_when_it_has_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(VICTIM) as server:
        guest = socket.socket()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            guest.connect(("127.0.0.1", server.port))
            guest.sendall(server.request(VICTIM))
            await server.until(lambda: "out of system resource" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await server.until(lambda: server.order == [VICTIM])
        guest.close()


# --- the rule itself

ASKS = st.lists(st.one_of(st.none(), st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz"))), max_size=200)


@given(ASKS)
def test_each_request_is_begun_once_in_order_and_few_in_a_turn(asks: list[tuple[str, str] | None]) -> None:
    """None: the event loop turns."""
    soon: deque[Callable[[], None]] = deque()
    turns = FairQueue(soon.append)
    begun: list[tuple[tuple[str, str], int]] = []
    asked: list[tuple[tuple[str, str], int]] = []
    turn: list[tuple[str, str]] = []

    def begin(who: tuple[str, str], number: int) -> None:
        begun.append((who, number))
        turn.append(who)
        assert len(turn) <= MAX_OF_ALL
        assert max(Counter(group for group, _ in turn).values()) <= MAX_OF_GROUP

    def tick() -> None:
        turn.clear()
        for _ in range(len(soon)):
            soon.popleft()()

    for number, who in enumerate(asks):
        if who is None:
            tick()
            continue
        asked.append((who, number))
        if turns.try_start(Flow(*who), lambda who=who, number=number: begin(who, number)):  # type: ignore[misc]
            begin(who, number)
    while len(turns):
        before = len(begun)
        tick()
        assert len(begun) > before, "nobody had a turn"
    tick()
    tick()
    assert not soon, "an idle rule calls nothing"
    assert sorted(begun) == sorted(asked)
    for who in {who for who, _ in asked}:
        assert [n for one, n in begun if one == who] == [n for one, n in asked if one == who]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz")), max_size=200))
def test_newcomer_waits_for_no_more_than_one_request_of_each_other(waiting: list[tuple[str, str]]) -> None:
    soon: deque[Callable[[], None]] = deque()
    turns = FairQueue(soon.append)
    begun: list[str] = []
    for group, one in waiting:
        turns.try_start(Flow(group, one), lambda group=group: begun.append(group))  # type: ignore[misc]
    if turns.try_start(Flow("new", "p"), lambda: begun.append("new")):
        return
    while "new" not in begun:
        soon.popleft()()
    assert max(Counter(begun[: begun.index("new")]).values(), default=0) <= 1
