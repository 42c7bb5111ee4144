"""The report server over real sockets: who may report, what is refused and with which reason."""

import asyncio
import base64
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from everstep.contract.messages import MAX_REPORT_BYTES, REPORT_PATH, Phase, Report
from everstep_operator.endpoint.auth import (
    LeaderAt,
    LeaderHere,
    LeaderLocation,
    LeaderUnknown,
    RequestAuth,
    RequestLimits,
)
from everstep_operator.endpoint.report_endpoint import ReportRefused
from everstep_operator.endpoint.server import PROBE_BOUNDS, HttpServer, Probes, ServerOptions, preferred_format
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.kube.errors import ConnectionFailed
from everstep_operator.telemetry.metrics import Format, Metrics
from support.operator.report_server import report_server
from support.operator.tokens import POD, Authority, Reviewer, pod

CLUSTER = Authority()
TOKEN = CLUSTER.token(POD)
REPORT = Report(Phase.TRAIN, rank=0, world_size=2, at=100.0, step=5, metrics={"loss": 0.5})
BODY = REPORT.encode()
GOOD = {"Authorization": f"Bearer {TOKEN}"}


@dataclass
class World:
    """What the server is told, and what it hands on."""

    leadership: LeaderLocation = field(default_factory=LeaderHere)
    tokens: dict[str, PodIdentity] = field(default_factory=lambda: {TOKEN: POD})
    checks: list[str] = field(default_factory=list)
    checking: asyncio.Event = field(default_factory=asyncio.Event)
    accepted: list[tuple[PodIdentity, Report]] = field(default_factory=list)
    refusal: Exception | None = None
    broken: Exception | None = None
    gate: asyncio.Event | None = None
    metrics: Metrics = field(default_factory=lambda: Metrics(process=False))
    url: str = ""

    async def authenticate(self, token: str) -> PodIdentity | None:
        self.checks.append(token)
        self.checking.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.broken is not None:
            raise self.broken
        return self.tokens.get(token)

    def accept(self, identity: PodIdentity, report: Report) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.accepted.append((identity, report))

    def counted(self, result: str) -> float | None:
        return self.metrics.registry.get_sample_value("everstep_reports_total", {"result": result})


@asynccontextmanager
async def serving(
    world: World, body_seconds: float = 5.0, check_seconds: float = 5.0, max_in_flight: int = 512, **bounds: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    reviewer = Reviewer(CLUSTER)
    reviewer.review = world.authenticate  # type: ignore[method-assign]
    identities = reviewer.cache(monotonic=asyncio.get_running_loop().time)
    limits = RequestLimits(body_seconds=body_seconds, check_seconds=check_seconds, **bounds)
    gate = RequestAuth(identities, lambda: world.leadership, limits=limits)
    server = report_server(
        gate,
        accept=world.accept,
        metrics=world.metrics,
        max_in_flight=max_in_flight,
    )
    timeout = aiohttp.ClientTimeout(total=10)
    async with server, aiohttp.ClientSession(f"http://127.0.0.1:{server.port}", timeout=timeout) as session:
        world.url = f"http://127.0.0.1:{server.port}"
        yield session


async def post(
    session: aiohttp.ClientSession, body: bytes | AsyncIterator[bytes] = BODY, headers: dict[str, str] = GOOD
) -> tuple[int, str]:
    async with session.post(REPORT_PATH, data=body, headers=headers, allow_redirects=False) as r:
        return r.status, (await r.json())["reason"] if r.status != 204 else ""


async def test_report_of_a_known_pod_is_handed_on() -> None:
    async with serving(world := World()) as session:
        assert await post(session) == (204, "")
    assert world.accepted == [(POD, REPORT)]
    assert world.counted("accepted") == 1


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer  ", "Basic Z29vZA==", "good", "Bearer bad"])
async def test_sender_without_a_valid_token_gets_401(header: str | None) -> None:
    async with serving(world := World()) as session:
        status, reason = await post(session, headers={"Authorization": header} if header else {})
    assert (status, world.accepted) == (401, [])
    assert "token" in reason
    assert "bad" not in reason


async def test_identity_claimed_in_the_body_is_ignored() -> None:
    async with serving(world := World()) as session:
        body = b'{"phase":"start","rank":0,"world_size":1,"at":1,"pod":"other","namespace":"kube-system"}'
        assert (await post(session, body))[0] == 204
    assert world.accepted[0][0] == POD


async def test_pod_that_may_not_report_gets_403_with_the_reason() -> None:
    async with serving(world := World(refusal=ReportRefused("round 3 is over"))) as session:
        assert await post(session) == (403, "round 3 is over")
    assert world.counted("forbidden") == 1


@pytest.mark.long_but("-not JSON")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 9000, "not JSON"),
        (b'{"phase":"nap","rank":0}', "phase"),
        (b'{"phase":"train","rank":-1}', "rank"),
        (b'{"phase":"train","metrics":{"a":"b"}}', "metrics.a"),
        (b'{"phase":"train","rank":0,"world_size":1,"at":1' + b"0" * 400 + b"}", "at: "),
        (b'{"phase":"train","rank":0,"world_size":1,"at":1e999}', "at: "),
        (b'{"phase":"train","metrics":{"a":1' + b"0" * 400 + b"}}", "metrics.a"),
    ],
)
async def test_malformed_body_gets_400_naming_the_field(body: bytes, reason: str) -> None:
    async with serving(world := World()) as session:
        status, text = await post(session, body)
        assert (status, world.accepted) == (400, [])
        assert reason in text
        assert (await post(session))[0] == 204  # the server goes on


def _token(header: bytes, payload: bytes, signature: bytes = b"c2ln") -> bytes:
    return b".".join((base64.urlsafe_b64encode(header).rstrip(b"="), base64.urlsafe_b64encode(payload), signature))


@pytest.mark.parametrize(
    "token",
    [
        _token(b'{"alg":"ES256","kid":"k1"}', b"[" * 5000),
        _token(b'{"alg":"ES256","kid":"k1"}', b'{"x":' + b"[" * 5000),
        _token(b'{"alg":"ES256","kid":"k1"}', b'{"exp":' + b"9" * 5000 + b"}"),
        TOKEN.encode()[:-4] + "ü".encode(),
        TOKEN.encode()[:-4] + b"\xff\xfe",
        TOKEN.encode().replace(b".", b"\xff.", 1),
    ],
    ids=["deep", "deep field", "long number", "not ASCII", "not UTF-8", "not UTF-8 in the head"],
)
async def test_token_that_nobody_can_read_is_401_and_no_error_of_ours(
    token: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(world := World()):
        host, port = world.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % (REPORT_PATH.encode(), token))
        writer.write(b"Content-Length: 0\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.readline()).split()[1] in (b"400", b"401")
        writer.close()
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("length", ["9" * 19, "9" * 20, "9" * 5000, "-1", "1e3", "+1", "1_0", "0x10", "1, 2", "٣"])
async def test_length_that_nobody_sends_is_refused(length: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(world := World()):
        host, port = world.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {REPORT_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {length}"
        writer.write(head.encode() + b"\r\n\r\n{}")
        async with asyncio.timeout(10):
            assert (await reader.readline()).split()[1] in (b"400", b"413")
        writer.close()
    assert world.accepted == []
    assert [record.getMessage() for record in caplog.records] == []


async def test_oversized_body_gets_413() -> None:
    async with serving(world := World()) as session:
        assert (await post(session, b"x" * (MAX_REPORT_BYTES + 1)))[0] == 413
    assert world.accepted == []


async def test_body_in_chunks_gets_411_whoever_sends_it() -> None:
    async def stream() -> AsyncIterator[bytes]:
        yield BODY

    async with serving(world := World()) as session:
        for headers in (GOOD, {}):
            status, reason = await post(session, stream(), headers)
            assert (status, "Content-Length" in reason) == (411, True)
        assert await post(session) == (204, "")
    assert (len(world.accepted), world.checks) == (1, [TOKEN])


async def test_body_that_does_not_arrive_gets_408() -> None:
    async with serving(world := World(), body_seconds=0.2):
        host, port = world.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {REPORT_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n"
        writer.write(head.encode() + b"{")
        async with asyncio.timeout(5):
            assert b" 408 " in await reader.readline()
        writer.close()


async def test_follower_sends_the_worker_to_the_leader() -> None:
    leader = World()
    async with (
        serving(leader),
        serving(follower := World(leadership=LeaderAt(leader.url + "/"))) as session,
        session.post(REPORT_PATH, data=BODY, headers=GOOD, allow_redirects=False) as r,
    ):
        assert (r.status, r.headers["Location"]) == (307, leader.url + REPORT_PATH)
    assert follower.checks == []


async def test_no_leader_gets_503_with_retry_after() -> None:
    async with (
        serving(World(leadership=LeaderUnknown())) as session,
        session.post(REPORT_PATH, data=BODY, headers=GOOD) as r,
    ):
        assert (r.status, r.headers["Retry-After"]) == (503, "1")


async def test_token_check_that_fails_gets_503_and_is_repeated() -> None:
    async with serving(world := World(broken=ConnectionFailed("apiserver away"))) as session:
        assert (await post(session))[0] == 503
        world.broken = None
        assert (await post(session))[0] == 204


async def test_mistake_of_ours_in_a_token_check_is_500_and_logged_with_its_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(world := World(broken=KeyError("bug"))) as session:
        assert (await post(session))[0] == 500
        assert (await post(session))[0] == 500
        assert [r.exc_info is not None for r in caplog.records if r.name == "everstep.auth"] == [True]  # once
        world.broken = None
        assert (await post(session))[0] == 204


async def test_token_check_that_hangs_gets_503() -> None:
    async with serving(World(gate=asyncio.Event()), check_seconds=0.1) as session:
        assert (await post(session))[0] == 503


async def test_error_in_the_operator_gets_500_and_the_server_goes_on() -> None:
    async with serving(world := World(refusal=KeyError("bug"))) as session:
        assert (await post(session))[0] == 500
        world.refusal = None
        assert (await post(session))[0] == 204


async def half_sent(url: str, token: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A report of 16 KiB of which one byte comes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {REPORT_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 16000\r\n\r\n"
    writer.write(head.encode() + b"{")
    return reader, writer


async def answered(connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> int:
    """How many were answered by now, though their bodies have not come."""
    return sum(len(reader._buffer) > 0 for reader, _ in connections)  # type: ignore[attr-defined]


async def test_half_sent_reports_of_one_tenant_leave_room_for_another() -> None:
    other = CLUSTER.token(pod(1))
    world = World(tokens={TOKEN: POD, other: pod(1)})
    async with serving(world, body_seconds=60, max_in_flight=64, calls_burst=1000) as session:
        held = [await half_sent(world.url, other) for _ in range(100)]
        async with asyncio.timeout(10):
            while await answered(held) < 87:  # noqa: ASYNC110  # 13 wait for their bodies: a pod's share
                await asyncio.sleep(0.01)
        assert await post(session) == (204, "")
        assert world.counted("busy") == 87
        for _, writer in held:
            writer.close()


async def test_bodies_that_do_not_arrive_leave_memory_for_others() -> None:
    other = CLUSTER.token(pod(1))
    world = World(tokens={TOKEN: POD, other: pod(1)})
    async with serving(world, body_seconds=60, body_bytes=64_000, calls_burst=1000) as session:
        held = [await half_sent(world.url, other) for _ in range(10)]
        async with asyncio.timeout(10):
            while await answered(held) < 9:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await post(session) == (204, "")
        for _, writer in held:
            writer.close()


async def test_pod_that_calls_too_often_is_slowed_down_and_then_refused_and_others_are_not() -> None:
    other = CLUSTER.token(pod(1))
    world = World(tokens={TOKEN: POD, other: pod(1)})
    async with serving(world, calls_rate=20, calls_burst=10, patience=0.5) as session:
        flood = await asyncio.gather(*(post(session, headers={"Authorization": f"Bearer {other}"}) for _ in range(60)))
        assert await post(session) == (204, "")
    statuses = [status for status, _ in flood]
    # The burst, and what fits into the patience.
    assert 20 <= statuses.count(204) <= 40
    assert {reason for status, reason in flood if status == 503} == {"more than 20 calls a second of this pod"}


async def test_pod_that_sends_too_many_bytes_is_refused_before_they_are_read() -> None:
    other = CLUSTER.token(pod(1))
    world = World(tokens={TOKEN: POD, other: pod(1)})
    async with serving(world, bytes_rate=10, bytes_burst=20_000) as session:
        headers = {"Authorization": f"Bearer {other}"}
        answers = [(await post(session, b"{" + b" " * 15_000, headers))[0] for _ in range(5)]
        assert answers == [400, 400, 503, 503, 503]
        assert await post(session) == (204, "")


async def test_compressed_body_is_not_unpacked() -> None:
    small = zlib.compress(b" " * 2**24)
    async with serving(World()) as session:
        headers = {**GOOD, "Content-Encoding": "deflate"}
        assert (await post(session, small[:MAX_REPORT_BYTES], headers))[0] == 400
        assert await post(session) == (204, "")


# What Prometheus 3 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "format_"),
    [
        ([], Format.PLAIN),
        (["*/*"], Format.PLAIN),
        (["text/html", "text/plain"], Format.PLAIN),
        ([PROMETHEUS], Format.OPENMETRICS),
        (["text/plain;version=0.0.4;q=0.6, application/openmetrics-text;q=0.5"], Format.PLAIN),
        (["application/openmetrics-text;q=0"], Format.PLAIN),
        (["text/plain;q=0.2", "Application/OpenMetrics-Text; version=1.0.0 ; q = 0.3"], Format.OPENMETRICS),
        (["application/openmetrics-text;q=1e9999;;,,;="], Format.OPENMETRICS),
    ],
)
def test_format_of_the_metrics_is_the_one_that_the_scraper_prefers(accept: list[str], format_: Format) -> None:
    assert preferred_format(accept) is format_


async def test_probes_and_metrics_answer_on_a_port_of_their_own() -> None:
    """A follower is Ready too, else the Service would lose half its endpoints: nothing here asks who leads."""
    reasons: list[str] = ["pods were not listed yet"]
    probes = Probes(Metrics(process=False), {"informers": lambda: reasons[0] if reasons else None})
    server = HttpServer([probes.add_to], ServerOptions(host="127.0.0.1", port=0, bounds=PROBE_BOUNDS))
    async with server, aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        async with session.get("/healthz") as r:
            assert r.status == 200
        async with session.get("/readyz") as r:
            assert r.status == 503
            assert "[-] informers: pods were not listed yet" in await r.text()
        reasons.clear()
        async with session.get("/readyz") as r:
            assert r.status == 200
        async with session.get("/metrics") as r:
            assert r.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "everstep_leader 0.0" in await r.text()
        async with session.get("/metrics", headers={"Accept": PROMETHEUS}) as r:
            assert r.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
            assert (await r.text()).endswith("# EOF\n")
        async with session.post(REPORT_PATH, data=BODY, headers=GOOD) as r:
            assert r.status == 404


@pytest.mark.parametrize("path", ["/metrics", "/readyz"])
async def test_workers_port_has_neither_metrics_nor_readiness(path: str) -> None:
    async with serving(World()) as session, session.get(path) as r:
        assert r.status == 404


async def test_stop_finishes_what_is_under_way() -> None:
    world = World(gate=asyncio.Event())
    async with aiohttp.ClientSession() as session:
        async with serving(world):
            pending = asyncio.create_task(session.post(world.url + REPORT_PATH, data=BODY, headers=GOOD))
            async with asyncio.timeout(5):
                await world.checking.wait()
            assert world.gate is not None
            asyncio.get_running_loop().call_later(0.1, world.gate.set)
        async with await pending as r:
            assert r.status == 204
        assert world.accepted == [(POD, REPORT)]
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(world.url + "/healthz")


async def test_sender_that_goes_away_in_the_middle_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(world := World(gate=asyncio.Event())):
        host, port = world.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {REPORT_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n"
        writer.write(head.encode())
        async with asyncio.timeout(5):
            await world.checking.wait()
            writer.close()
            await writer.wait_closed()
            assert world.gate is not None
            world.gate.set()
            while not world.counted("timed-out"):  # noqa: ASYNC110  # a counter has no event
                await asyncio.sleep(0.01)
    assert (world.accepted, caplog.records) == ([], [])


async def test_port_in_use_is_an_error_at_start() -> None:
    world = World()
    async with serving(world):
        port = int(world.url.rsplit(":", 1)[1])
        gate = RequestAuth(Reviewer(CLUSTER).cache(), LeaderHere)
        other = report_server(gate, world.accept, world.metrics, port=port)
        with pytest.raises(OSError):
            await other.start()
