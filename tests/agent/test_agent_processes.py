"""The fork server and the processes that it forks, and the one that hosts stores, without the agent."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from everstep.agent.processes import stores
from everstep.agent.processes.client import ForkServer
from everstep.agent.processes.control_socket import ControlSocket
from everstep.contract import env
from support.processes.children import stat

pytestmark = pytest.mark.timeout(120)


def program(folder: Path) -> dict[str, Any]:
    """A process that goes on for ever."""
    script = folder / "sleep.py"
    script.write_text("import time\ntime.sleep(10_000)\n")
    return {
        "kind": "program", "target": str(script), "arguments": [], "module": False, "executable": False,
        "environment": dict(os.environ), "stdout": None, "stderr": None, "stacks": str(folder / "stacks"),
    }  # fmt: skip


# The end of a process that ended just before its parent began to wait was told with the next one: 2 of 8,000.
FORKS = int(os.environ.get("EVERSTEP_FORKS", "300"))


async def test_a_signal_that_follows_the_fork_at_once_reaches_the_process_and_its_end_is_told(tmp_path: Path) -> None:
    seed = int(os.environ.get("EVERSTEP_SEED", random.randrange(10**6)))
    print(f"EVERSTEP_SEED={seed}")
    chance, asked = random.Random(seed), program(tmp_path)
    ended: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    fork_server = ForkServer([], os.environ, lambda pid, code: ended.put_nowait((pid, code)))
    await fork_server.start()
    try:
        for _ in range(FORKS):
            pid = await fork_server.fork(asked)
            until = time.perf_counter() + chance.random() * 3e-4
            while time.perf_counter() < until:
                pass  # no sleep is as short
            fork_server.signal(pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                assert await ended.get() == (pid, -signal.SIGKILL)
    finally:
        await fork_server.close()


@pytest.mark.long
@pytest.mark.parametrize("late", [False, True], ids=["while it dies", "before that is known"])
async def test_a_store_that_is_asked_for_when_its_host_dies_is_hosted_by_the_next(tmp_path: Path, late: bool) -> None:
    """Its port is announced by then."""
    ended: asyncio.Queue[int] = asyncio.Queue()
    control_socket = ControlSocket(str(tmp_path / "agent"), lambda *_: None)
    fork_server = ForkServer([], os.environ, lambda pid, _: ended.put_nowait(pid))
    environ = {**os.environ, env.AGENT_SOCKET: control_socket.path}
    command = {"kind": "stores", "environment": environ, "stdout": None, "stderr": None}

    def ask(port: int) -> bytes:
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        store.set("a", "b")
        found: bytes = store.get("a")
        return found

    await control_socket.start()
    await fork_server.start()
    try:
        pid = await fork_server.fork(command)
        async with asyncio.timeout(60):
            await control_socket._there.wait()
        fork_server.signal(pid, signal.SIGKILL if late else signal.SIGSTOP)
        while late and stat(pid)[0] not in "ZX":
            pass  # the loop is late
        port = control_socket.open_store()
        fork_server.signal(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            assert await ended.get() == pid
        await fork_server.fork(command)
        assert await asyncio.to_thread(ask, port) == b"b"
    finally:
        await control_socket.close()
        await fork_server.close()


@pytest.mark.long
async def test_a_signal_to_all_of_a_jobs_processes_does_not_end_the_one_that_hosts_stores(tmp_path: Path) -> None:
    """Slurm sends SIGTERM to all processes of a step, and the ranks still need their store to save."""
    ended: asyncio.Queue[int] = asyncio.Queue()
    control_socket = ControlSocket(str(tmp_path / "agent"), lambda *_: None)
    fork_server = ForkServer([], os.environ, lambda pid, _: ended.put_nowait(pid))
    environ = {**os.environ, env.AGENT_SOCKET: control_socket.path}
    await control_socket.start()
    await fork_server.start()
    try:
        pid = await fork_server.fork({"kind": "stores", "environment": environ, "stdout": None, "stderr": None})
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            fork_server.signal(pid, number)
        async with asyncio.timeout(60):
            assert "cpus" in await control_socket.ask_stores(kind="devices")
        assert ended.empty()
    finally:
        await control_socket.close()
        await fork_server.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110  the socket has no event for it
            await asyncio.sleep(0.01)


async def test_stores_that_are_opened_round_after_round_leave_no_descriptor_behind(tmp_path: Path) -> None:
    """With a process that hosts them, with none, and with one that is about to go."""
    control_socket = ControlSocket(str(tmp_path / "agent"), lambda *_: None)
    await control_socket.start()
    try:
        for _ in range(3):
            reader, host = await asyncio.open_unix_connection(control_socket.path)
            host.write(b'{"kind":"stores","pid":1}\n')
            await until(control_socket._there.is_set)
            for _ in range(20):
                control_socket.open_store()
            before = descriptors()
            for _ in range(200):
                control_socket.open_store()
            assert descriptors() == before
            host.close()
            await host.wait_closed()
            for _ in range(200):
                control_socket.open_store()
            await until(lambda: not control_socket._there.is_set())
            assert descriptors() <= before
            del reader
    finally:
        await control_socket.close()


def test_whoever_reaches_a_rounds_store_finds_and_changes_keys_below_a_secret_prefix() -> None:
    """Why a job's NetworkPolicy is the border, and no secret of the round: ADR 0073. If torch's store ever refuses
    this, look at that decision again."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    members = PrefixStore("8f1c-a-secret-of-the-round", stores._host(listener.detach()))
    members.set("link/0", "10.0.0.1 4000")
    stranger = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    (key,) = stranger.list_keys()
    assert key.endswith("/link/0")
    stranger.set(key, "10.6.6.6 4000")
    assert members.get("link/0") == b"10.6.6.6 4000"


def test_descriptor_that_is_no_socket_is_refused_and_not_copied() -> None:
    reads, writes = os.pipe()
    before = descriptors()
    try:
        for _ in range(10):
            with pytest.raises(OSError, match="Socket operation on non-socket"):
                stores._host(reads)
        assert descriptors() == before
    finally:
        os.close(reads)
        os.close(writes)
