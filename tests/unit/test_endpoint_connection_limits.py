"""Connections to the operator: strangers are few, and whoever is refused all the time is heard seldom. Over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.contract.messages import REPORT_PATH, Phase, Report
from everstep_operator.endpoint.auth import LeaderAt, LeaderHere, RequestAuth
from everstep_operator.endpoint.connection_limits import (
    MAX_ADDRESSES,
    MAX_DELAY,
    MAX_UNAUTHENTICATED,
    REFUSED_BURST,
    REFUSED_RATE,
    ConnectionLimits,
)
from everstep_operator.telemetry.metrics import Metrics
from support.operator.report_server import report_server
from support.operator.tokens import POD, Authority, Reviewer

CLUSTER = Authority()
BODY = Report(Phase.TRAIN, rank=0, world_size=2, at=100.0, step=5).encode()
STRANGER, WORKER = "127.0.0.2", "127.0.0.3"
Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[int, str]]:
    """A port, and a token that is good."""
    reviewer = Reviewer(CLUSTER)
    cache = reviewer.cache(monotonic=asyncio.get_running_loop().time)
    server = report_server(
        RequestAuth(cache, LeaderHere),
    )
    async with server:
        yield server.port, reviewer.issue(POD)


async def connect(port: int, address: str) -> Pipe:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def post(pipe: Pipe, token: str) -> int:
    """The status; 0: the connection was closed instead."""
    reader, writer = pipe
    head = f"POST {REPORT_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(BODY)}"
    try:
        writer.write(head.encode() + b"\r\n\r\n" + BODY)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        await reader.readexactly(length)
    except (ConnectionError, asyncio.IncompleteReadError):
        return 0
    return int(answer[9:12])


@pytest.mark.parametrize("token", ["nobody.in.particular", Authority().token(POD), CLUSTER.token(POD, exp=1.0)])
async def test_address_that_is_refused_all_the_time_is_heard_seldom_and_a_worker_at_once(token: str) -> None:
    async with serving() as (port, good), asyncio.timeout(60):
        worker = await connect(port, WORKER)
        assert await post(worker, good) == 204
        loop = asyncio.get_running_loop()
        began, refused = loop.time(), 0

        async def flood() -> None:
            nonlocal refused
            while True:
                try:
                    pipe = await connect(port, STRANGER)
                except ConnectionError:
                    continue
                while await post(pipe, token) == 401:
                    refused += 1

        floods = [asyncio.create_task(flood()) for _ in range(50)]
        while refused < REFUSED_BURST + 20:
            await asyncio.sleep(0.01)  # a worker's calls are seldom
            assert await post(worker, good) in (204, 503)  # 503: it is this test that calls too often
        heard, took = refused, loop.time() - began
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
        assert heard <= REFUSED_BURST + REFUSED_RATE * took + 2
        newcomer = await connect(port, WORKER)
        assert await post(newcomer, good) in (204, 503)


async def test_followers_refuse_nobody_whom_they_send_on() -> None:
    server = report_server(
        RequestAuth(Reviewer(CLUSTER).cache(), lambda: LeaderAt("http://leader:8080")),
    )
    async with server, asyncio.timeout(60):
        for _ in range(int(REFUSED_BURST) * 2):
            pipe = await connect(server.port, STRANGER)
            assert await post(pipe, "anything") == 307
            pipe[1].close()


async def test_requests_in_one_piece_are_not_cheaper() -> None:
    async with serving() as (port, good), asyncio.timeout(60):
        answers = 0
        for _ in range(20):
            try:
                reader, writer = await connect(port, STRANGER)
            except ConnectionError:
                continue
            writer.write((f"POST {REPORT_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" * 200).encode())
            try:
                answers += (await reader.read()).count(b"HTTP/1.1 401")
            except ConnectionError:
                continue
        assert answers <= 40
        assert await post(await connect(port, WORKER), good) == 204


async def test_idle_connections_of_one_address_leave_room_for_others() -> None:
    async with serving() as (port, good), asyncio.timeout(60):
        held: list[Pipe] = []
        closed = 0
        reset = 0
        for _ in range(MAX_UNAUTHENTICATED // 5 + 60):
            try:
                held.append(await connect(port, STRANGER))
            except ConnectionError:
                reset += 1
        while closed < 60:
            closed = reset + sum(reader.at_eof() or reader.exception() is not None for reader, _ in held)
            await asyncio.sleep(0.01)
        worker = await connect(port, WORKER)
        assert await post(worker, good) == 204
        for _, writer in held:
            writer.close()


async def test_metrics_that_anybody_may_ask_for_are_rendered_a_few_times_a_second() -> None:
    rendered = 0

    class Counting(Metrics):
        def render(self) -> bytes:
            nonlocal rendered
            rendered += 1
            return super().render()

    server = report_server(
        RequestAuth(Reviewer(CLUSTER).cache(), LeaderHere),
        metrics=Counting(process=False),
    )
    async with server, asyncio.timeout(60):
        loop = asyncio.get_running_loop()
        began = loop.time()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(100):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
        assert rendered <= 1 + (loop.time() - began) / 0.25
        writer.close()


@given(st.lists(st.tuples(st.floats(0, 0.5), st.booleans()), max_size=300))
def test_turns_of_an_address_in_debt_come_one_after_the_other(calls: list[tuple[float, bool]]) -> None:
    limits, now = ConnectionLimits(asyncio.Protocol), 0.0
    turns: list[float] = []
    for pause, refused in calls:
        now += pause
        wait = limits.charge("10.0.0.1", now)
        assert wait is None or 0 <= wait <= MAX_DELAY
        if wait is None:
            assert not limits.is_served("10.0.0.1", now)
        elif not refused:
            limits.refund("10.0.0.1", now)
        elif wait:
            turns.append(now + wait)
        assert limits.is_served("10.0.0.2", now)
    assert all(later - earlier >= 1 / REFUSED_RATE - 1e-6 for earlier, later in pairwise(turns))


def test_memory_of_balances_is_bounded() -> None:
    limits = ConnectionLimits(asyncio.Protocol)
    for number in range(MAX_ADDRESSES + 1000):
        limits.charge(f"10.0.{number >> 8}.{number & 255}", 0.0)
    assert len(limits._balances) == MAX_ADDRESSES
