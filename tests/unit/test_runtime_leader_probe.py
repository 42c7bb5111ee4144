"""Whether the leader's process is gone: real connections on the loopback, and an address that was never reached."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from everstep_operator.runtime.leader_probe import UNANSWERED, Health, LeaderProbe

LIMIT = 20.0


class Leader:
    """Answers questions, or is stopped and says nothing, or ends each connection."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers, self.ends, self.delay = True, False, 0.0
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self, port: int = 0) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self.server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(EOFError, OSError):
            while not self.ends:
                await reader.readuntil(b"\r\n\r\n")
                self.asked += 1
                await asyncio.sleep(self.delay)
                if self.answers:
                    writer.write(b"HTTP/1.1 503 X\r\nContent-Length: 2\r\n\r\nno")
        writer.close()

    def stop(self) -> None:
        self.server.close()
        self.stop_connections()

    def stop_connections(self) -> None:
        for writer in self._writers:
            writer.close()


async def until(found: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT):
        while not found():  # noqa: ASYNC110 - it is a thread's, or a kernel's, to change
            await asyncio.sleep(0.01)


@asynccontextmanager
async def watching(leader: Leader) -> AsyncIterator[LeaderProbe]:
    leader_probe = LeaderProbe(lambda: leader.address)
    task = asyncio.create_task(leader_probe.run())
    try:
        yield leader_probe
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        leader.stop()


async def test_leader_whose_port_closes_is_gone_until_it_is_back() -> None:
    leader = Leader()
    await leader.start()
    async with watching(leader) as leader_probe:
        await until(lambda: leader.asked >= 2)
        assert leader_probe.health(leader.address) is not Health.GONE
        leader.stop()
        await until(lambda: leader_probe.health(leader.address) is Health.GONE)
        assert leader_probe.health("127.0.0.1:1") is not Health.GONE
        await leader.start(leader.port)
        await until(lambda: leader_probe.health(leader.address) is not Health.GONE)


@pytest.mark.long
async def test_leader_that_says_nothing_stands_still_until_it_answers_and_is_never_gone() -> None:
    leader = Leader()
    await leader.start()
    async with watching(leader) as leader_probe:
        await until(lambda: leader.asked >= 2)  # it has answered
        leader.answers = False
        asked = leader.asked
        await until(lambda: leader.asked > asked)
        silent = time.monotonic()
        await until(lambda: leader_probe.health(leader.address) is Health.STILL)
        assert time.monotonic() - silent > UNANSWERED - 0.5
        leader.answers = True
        leader.stop_connections()  # the next one is answered
        await until(lambda: leader_probe.health(leader.address) is Health.ANSWERS)


@pytest.mark.long
async def test_leader_that_needs_two_seconds_for_each_answer_does_not_stand_still() -> None:
    leader = Leader()
    leader.delay = 2.0
    await leader.start()
    seen = set()
    async with watching(leader) as leader_probe, asyncio.timeout(LIMIT):
        while leader.asked < 4:
            seen.add(leader_probe.health(leader.address))
            await asyncio.sleep(0.05)
    assert seen == {Health.ANSWERS}


@pytest.mark.long
async def test_pause_of_the_follower_itself_accuses_nobody() -> None:
    """Two replicas on one busy machine wait together."""
    leader = Leader()
    await leader.start()
    async with watching(leader) as leader_probe:
        await until(lambda: leader.asked >= 2)
        leader.delay = 0.3  # an answer is under way when the pause begins
        asked = leader.asked
        await until(lambda: leader.asked > asked)
        time.sleep(UNANSWERED + 0.5)  # noqa: ASYNC251 - nothing of this process runs
        assert leader_probe.health(leader.address) is Health.ANSWERS
        await asyncio.sleep(1.0)
        assert leader_probe.health(leader.address) is Health.ANSWERS


async def test_leader_that_ends_each_connection_is_there() -> None:
    leader = Leader()
    await leader.start()
    async with watching(leader) as leader_probe:
        await until(lambda: leader.asked >= 1)
        leader.ends = True
        leader.stop_connections()
        await asyncio.sleep(1.0)
        assert leader_probe.health(leader.address) is Health.ANSWERS


async def test_address_that_was_never_reached_is_not_called_gone() -> None:
    leader = Leader()
    await leader.start()
    leader.stop()
    async with watching(leader) as leader_probe:
        await asyncio.sleep(1.5)
        assert leader_probe.health(leader.address) is not Health.GONE


async def test_address_that_is_none_stops_nothing() -> None:
    leader = Leader()
    await leader.start()
    real, leader.address = leader.address, "nobody"
    async with watching(leader) as leader_probe:
        await asyncio.sleep(0.1)
        leader.address = "127.0.0.1:99999"
        await asyncio.sleep(1.0)
        leader.address = real
        await until(lambda: leader.asked >= 1)
        assert leader_probe.health(real) is not Health.GONE
