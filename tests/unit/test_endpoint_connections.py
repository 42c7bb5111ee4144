"""What connections may hold of the operator: slow ones, idle ones, endless ones, and those that are refused. Over
sockets; addresses of loopback stand for machines, and there is no NetworkPolicy."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from aiohttp import web

from everstep.contract.messages import REPORT_PATH, Phase, Report
from everstep_operator.endpoint.auth import LeaderAt, LeaderHere, LeaderLocation, RequestAuth, RequestLimits
from everstep_operator.endpoint.connections import MAX_HEAD, Connection, ConnectionBounds
from everstep_operator.endpoint.server import SCRAPE_SECONDS, HttpServer, Probes, ServerOptions
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.runtime.fair_queueing import MAX_OF_GROUP
from everstep_operator.telemetry.metrics import Format, Metrics
from support.operator.report_server import report_server
from support.operator.tokens import POD, Authority, Reviewer, pod

CLUSTER = Authority()
BODY = Report(Phase.TRAIN, rank=0, world_size=2, at=100.0, step=5).encode()
STRANGER, WORKER = "127.0.0.2", "127.0.0.3"
Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Served:
    server: HttpServer
    reviewer: Reviewer

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def open(self) -> int:
        assert self.server._connections is not None
        return len(self.server._connections)

    def token(self, who: PodIdentity = POD) -> str:
        return self.reviewer.issue(who)


@asynccontextmanager
async def serving(
    bounds: ConnectionBounds, leadership: Callable[[], LeaderLocation] = LeaderHere
) -> AsyncIterator[Served]:
    reviewer = Reviewer(CLUSTER)
    cache = reviewer.cache(monotonic=asyncio.get_running_loop().time)
    limits = RequestLimits(calls_rate=1000, calls_burst=1000)
    server = report_server(RequestAuth(cache, leadership, limits=limits), bounds=bounds)
    async with server, asyncio.timeout(20):
        yield Served(server, reviewer)


async def connect(port: int, address: str = WORKER) -> Pipe:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


def head(token: str, length: int = len(BODY)) -> bytes:
    text = f"POST {REPORT_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {length}"
    return text.encode() + b"\r\n\r\n"


async def answer(reader: asyncio.StreamReader) -> int:
    """The status; 0: the connection was closed instead."""
    try:
        found = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(found.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0))
    except (ConnectionError, asyncio.IncompleteReadError):
        return 0
    return int(found[9:12])


async def post(pipe: Pipe, token: str) -> int:
    with contextlib.suppress(ConnectionError):
        pipe[1].write(head(token) + BODY)
    return await answer(pipe[0])


async def get(port: int, path: str) -> int:
    pipe = await connect(port)
    pipe[1].write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    status = await answer(pipe[0])
    pipe[1].close()
    return status


async def until(what: Callable[[], bool]) -> None:
    while not what():  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0.01)


def is_over(pipe: Pipe) -> bool:
    return pipe[0].at_eof() or pipe[0].exception() is not None


def close(*pipes: Pipe) -> None:
    for _, writer in pipes:
        writer.close()


async def test_sixty_addresses_with_a_byte_on_each_slow_connection_lock_nobody_out() -> None:
    """They come again as soon as they are closed, at both ports. Every valid call and every probe is answered."""
    bounds = ConnectionBounds(head_seconds=1.0, strangers=150)
    probes = HttpServer([Probes(Metrics(process=False)).add_to], ServerOptions(host="127.0.0.1", port=0, bounds=bounds))
    async with serving(bounds) as served, probes:
        renewed = 0

        async def hold(address: str, port: int) -> None:
            nonlocal renewed
            while True:
                try:
                    reader, writer = await connect(port, address)
                    writer.write(b"P")
                    await reader.read()
                except ConnectionError:
                    pass
                renewed += 1
                await asyncio.sleep(0.1)  # the attackers and the operator share one core here

        slow = [
            asyncio.create_task(hold(f"127.0.1.{number}", port))
            for number in range(1, 61)
            for port in (*(served.port,) * 3, probes.port)
        ]
        await until(lambda: renewed > 0)
        token, statuses = served.token(), []
        for _ in range(40):
            pipe = await connect(served.port)
            statuses += [
                await post(pipe, token),
                await get(probes.port, "/healthz"),
                await get(probes.port, "/metrics"),
            ]
            close(pipe)
            await asyncio.sleep(0.02)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert statuses == [204, 200, 200] * 40
        assert renewed > 180


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nX: "])
async def test_head_that_does_not_end_is_cut_off_however_many_bytes_come(sent: bytes) -> None:
    async with serving(ConnectionBounds(head_seconds=0.3)) as served:
        reader, writer = await connect(served.port, STRANGER)
        writer.write(sent)
        began = asyncio.get_running_loop().time()
        while not reader.at_eof() and reader.exception() is None:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(0.05):
                    await reader.read()
            if sent:
                writer.write(b"x")
        assert asyncio.get_running_loop().time() - began >= 0.25
        await until(lambda: served.open == 0)


async def test_admitted_sender_has_longer_and_not_for_ever() -> None:
    async with serving(ConnectionBounds(head_seconds=0.2, answer_seconds=0.1, idle_seconds=1.0)) as served:
        token = served.token()
        pipe = await connect(served.port)
        assert await post(pipe, token) == 204
        await asyncio.sleep(0.6)
        assert await post(pipe, token) == 204
        pipe[1].write(b"P")  # the next head does not end
        assert await pipe[0].read() == b""
        await until(lambda: served.open == 0)


async def test_endless_head_is_cut_off() -> None:
    async with serving(ConnectionBounds()) as served:
        reader, writer = await connect(served.port, STRANGER)
        writer.write(b"GET / HTTP/1.1\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and sent < 100 * MAX_HEAD:
                writer.write(b"X: " + b"x" * 4000 + b"\r\n")
                await writer.drain()
                sent += 4005
                await asyncio.sleep(0)
        await until(lambda: served.open == 0)
        assert sent < 100 * MAX_HEAD


async def test_newest_stranger_takes_the_place_of_the_oldest_and_no_worker_loses_its_own() -> None:
    async with serving(ConnectionBounds(strangers=10)) as served:
        worker, token = await connect(served.port), served.token()
        assert await post(worker, token) == 204
        held = [await connect(served.port, STRANGER) for _ in range(40)]
        await until(lambda: sum(map(is_over, held)) == 30)
        assert [is_over(pipe) for pipe in held] == [True] * 30 + [False] * 10
        assert await post(worker, token) == 204
        newcomer = await connect(served.port)
        assert await post(newcomer, token) == 204
        close(worker, newcomer, *held)


async def test_server_that_is_full_ends_what_waits_first() -> None:
    async with serving(ConnectionBounds(total=8)) as served:
        token = served.token()
        strangers = [await connect(served.port, STRANGER) for _ in range(5)]
        workers = []
        for _ in range(8):
            workers.append(await connect(served.port))
            assert await post(workers[-1], token) == 204
        await until(lambda: all(map(is_over, strangers)))
        last = await connect(served.port)
        assert await post(last, token) == 204
        await until(lambda: is_over(workers[0]))
        assert [is_over(worker) for worker in workers] == [True] + [False] * 7
        close(last, *strangers, *workers)


async def test_pod_keeps_few_idle_connections_and_takes_none_of_another() -> None:
    async with serving(ConnectionBounds(idle_of_pod=4)) as served:
        other = await connect(served.port)
        assert await post(other, served.token(pod(1, "victim"))) == 204
        held = []
        for number in range(8):
            token = served.token(pod(number, "hostile"))
            for _ in range(20):
                held.append(await connect(served.port, STRANGER))
                assert await post(held[-1], token) == 204
        await until(lambda: served.open == 8 * 4 + 1)
        assert await post(other, served.token(pod(1, "victim"))) == 204
        close(other, *held)


async def test_namespace_with_most_idle_connections_gives_one_up() -> None:
    async with serving(ConnectionBounds(idle=20)) as served:
        others = [await connect(served.port) for _ in range(3)]
        for pipe in others:
            assert await post(pipe, served.token(pod(1, "victim"))) == 204
        held = [await connect(served.port, STRANGER) for _ in range(60)]
        for number, pipe in enumerate(held):
            assert await post(pipe, served.token(pod(number, "hostile"))) == 204
        await until(lambda: served.open == 20)
        assert not any(map(is_over, others))
        close(*others, *held)


async def test_answer_that_nobody_takes_is_given_up() -> None:
    async def large(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * 2**25)

    def add_large(router: web.UrlDispatcher) -> None:
        router.add_get("/", large)

    bounds = ConnectionBounds(answer_seconds=0.3)
    server = HttpServer([add_large], ServerOptions("127.0.0.1", 0, bounds=bounds))
    async with server, asyncio.timeout(30):
        _, writer = await connect(server.port)
        assert isinstance(writer.transport, asyncio.Transport)
        writer.transport.pause_reading()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert server._connections is not None
        connections = server._connections
        await until(lambda: len(connections) == 1)
        await until(lambda: len(connections) == 0)


@pytest.mark.parametrize("token", ["nobody.in.particular", Authority().token(POD), CLUSTER.token(POD, exp=1.0)])
async def test_connection_that_is_refused_is_not_read_for_a_moment(token: str) -> None:
    async with serving(ConnectionBounds(refused_seconds=0.3)) as served:
        pipe = await connect(served.port, STRANGER)
        loop = asyncio.get_running_loop()
        assert await post(pipe, token) == 401
        began = loop.time()
        assert await post(pipe, token) == 401
        assert loop.time() - began >= 0.25
        assert await post(pipe, served.token()) == 204


async def test_requests_in_one_piece_are_not_cheaper() -> None:
    async with serving(ConnectionBounds()) as served:
        answers = 0
        for _ in range(20):
            reader, writer = await connect(served.port, STRANGER)
            writer.write(head("none", 0) * 200)
            with contextlib.suppress(ConnectionError):
                answers += (await reader.read()).count(b"HTTP/1.1 401")
            writer.close()
        assert answers <= 20
        assert await post(await connect(served.port), served.token()) == 204


async def test_follower_delays_nobody_whom_it_sends_on() -> None:
    async with serving(ConnectionBounds(refused_seconds=30), lambda: LeaderAt("http://leader:8080")) as served:
        pipe = await connect(served.port, STRANGER)
        for _ in range(100):
            assert await post(pipe, "anything") == 307


async def test_chunks_are_neither_read_nor_waited_for() -> None:
    """One connection whose chunks have extensions took another tenant's calls from 20 to 85 ms."""
    async with serving(ConnectionBounds()) as served:
        reader, writer = await connect(served.port, STRANGER)
        writer.write(head(served.token(), 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
        piece, sent = b"1" + b";e=v" * 20 + b"\r\nx\r\n", 0

        async def flood() -> None:
            nonlocal sent
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(piece * 100)
                    await writer.drain()
                    sent += 1
                    await asyncio.sleep(0)

        flooding = asyncio.create_task(flood())
        assert await answer(reader) == 411
        await until(lambda: served.open == 0)  # though the body goes on
        flooding.cancel()
        writer.close()


async def test_what_is_only_dropped_of_large_bodies_takes_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four refused bodies of a megabyte, read as they came, took another tenant's p99 from 4 to 26 ms."""

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    def add_refusal(router: web.UrlDispatcher) -> None:
        router.add_put("/", refuse)

    pieces, updated = 0, Connection.buffer_updated

    def counted(connection: Connection, nbytes: int) -> None:
        nonlocal pieces
        pieces += 1
        updated(connection, nbytes)

    senders, turns = 32, 60
    async with HttpServer([add_refusal], ServerOptions("127.0.0.1", 0)) as server, asyncio.timeout(20):
        pipes = [await connect(server.port, STRANGER) for _ in range(senders)]
        for reader, writer in pipes:
            writer.write(f"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: {2**23}\r\n\r\n".encode())
            assert await answer(reader) == 503
        monkeypatch.setattr(Connection, "buffer_updated", counted)
        for _, writer in pipes:
            writer.write(b"x" * 2**22)
        for _ in range(turns):
            await asyncio.sleep(0)
        assert 0 < pieces <= senders + turns * MAX_OF_GROUP
        close(*pipes)


async def test_metrics_that_anybody_may_ask_for_are_rendered_once_a_second() -> None:
    rendered = 0

    class Counting(Metrics):
        def render(self, format_: Format = Format.PLAIN) -> bytes:
            nonlocal rendered
            rendered += 1
            return super().render(format_)

    server = HttpServer([Probes(Counting(process=False)).add_to], ServerOptions(host="127.0.0.1", port=0))
    async with server, asyncio.timeout(60):
        loop = asyncio.get_running_loop()
        began = loop.time()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(100):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await answer(reader) == 200
        assert rendered <= 1 + (loop.time() - began) / SCRAPE_SECONDS
        writer.close()


async def transport_of(served: Served, pipe: Pipe) -> asyncio.Transport:
    """The server's side of a connection."""
    ours = pipe[1].get_extra_info("sockname")
    while True:
        for connection in served.server._connections._all if served.server._connections is not None else ():
            transport = connection._transport
            if transport is not None and transport.get_extra_info("peername")[1] == ours[1]:
                return transport
        await asyncio.sleep(0.01)


async def test_connection_that_ended_needs_no_garbage_collection() -> None:
    """A collection visits all that serve others, so a flood of connections would stop the event loop time and again."""

    kept: list[weakref.ref[asyncio.Transport]] = []
    bounds = ConnectionBounds(head_seconds=0.5, refused_seconds=0.1)
    async with serving(bounds) as served:
        gc.collect()
        gc.disable()
        try:
            for number in range(10):
                pipe = await connect(served.port)
                kept += [weakref.ref(await transport_of(served, pipe))]
                match number % 5:
                    case 0:
                        assert await post(pipe, served.token()) == 204
                    case 1:
                        assert await post(pipe, "forged") == 401
                    case 2:
                        pipe[1].write(b"no HTTP\r\n\r\n")
                        assert await answer(pipe[0]) == 400
                    case 3:
                        pipe[1].write(b"P")
                        assert await answer(pipe[0]) == 0, "its time is over"
                    case _:
                        pipe[1].write(head(served.token()))
                        await pipe[1].drain()
                pipe[1].transport.abort()
            with contextlib.suppress(TimeoutError):  # requests that were broken off take their time
                async with asyncio.timeout(5):
                    while served.open or any(one() is not None for one in kept):  # noqa: ASYNC110 - no event
                        await asyncio.sleep(0.01)
            assert [number % 5 for number, one in enumerate(kept) if one() is not None] == []
        finally:
            gc.enable()
