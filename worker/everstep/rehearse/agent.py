"""The agent of one run of a rehearsal: `agent.py FOLDER ARGUMENTS`, as `everstep-run ARGUMENTS` in that folder. It is
forked from a process that has imported torch (`agents`), and its own fork server is forked from it, so that no run
imports torch anew.

Where the size of the run changes while its processes live, a second agent in this process has the rank that joins or
leaves. Both keep their rounds in a store of this process and fork from one fork server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from everstep.agent.arguments import OUR_BACKENDS, Arguments
from everstep.agent.loop import Agent
from everstep.agent.main import main
from everstep.agent.processes import forkserver
from everstep.agent.processes.client import ForkServer
from everstep.agent.processes.output import Files
from everstep.contract import env
from everstep.contract.addresses import loopback
from everstep.contract.document import Member, Sizes
from everstep.membership.backends.memory import MemoryStore
from everstep.membership.driver import Driver
from everstep.membership.identity import agent_id
from everstep.membership.joining import JoinSettings
from everstep.membership.proposals import Patience
from everstep.membership.world_state import Round
from everstep.rehearse.plan import SETTINGS
from everstep.rehearse.process_end import end
from everstep.rehearse.record import CHANGE_WANTED

LOOK_SECONDS = 0.05
LEASE_SECONDS = 60.0  # both agents end together, so nothing has to be found by the end of a lease
JOIN_SECONDS = 120.0  # that a round may take; so long agents that begin together wait for each other


class _Forked:
    """What of `asyncio.subprocess.Process` a `ForkServer` uses."""

    def __init__(self, pid: int) -> None:
        self._pid, self._code = pid, asyncio.ensure_future(asyncio.to_thread(os.waitpid, pid, 0))

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    async def wait(self) -> int:
        return os.waitstatus_to_exitcode((await asyncio.shield(self._code))[1])


class _ForkedServer(ForkServer):
    """One that this process has forked before it began to wait for anything. If that dies, another is started as
    everywhere."""

    forked: tuple[int, socket.socket] | None = None  # its pid, and our end of its commands

    @classmethod
    def fork_it(cls) -> None:
        """In the fork server's children, and in it, this does not return."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            ours.close()
            forkserver.main(["", str(theirs.detach()), str(parent), ""])
            end()
        theirs.close()
        cls.forked = pid, ours

    async def _begin(self) -> tuple[Any, socket.socket]:
        if self.forked is None:
            return await super()._begin()
        (pid, ours), _ForkedServer.forked = self.forked, None
        return _Forked(pid), ours


class _SharedForkServer(ForkServer):
    """That of another agent, for one that must not end it. `exited`: see `ForkServer`."""

    def __init__(self, shared: ForkServer, exited: Callable[[int, int], None]) -> None:
        self._shared, self._forked, self._exited = shared, set[int](), exited
        self._closed = False

    async def start(self) -> None:
        """It is started by the other agent."""

    async def fork(self, command: Mapping[str, Any]) -> int:
        pid = await self._shared.fork(command)
        self._forked.add(pid)
        return pid

    def signal(self, pid: int, number: int, *, group: bool = True) -> None:
        self._shared.signal(pid, number, group=group)

    def ended(self, pid: int, code: int) -> None:
        """A process of either agent has."""
        if not self._closed:
            self._exited(pid, code)

    async def close(self) -> None:
        self._closed = True
        for pid in self._forked:
            self.signal(pid, signal.SIGKILL)


class _Part(Agent):
    """One of both agents. `index`: 0, or 1 of the one that joins or leaves. `first`: the local rank of its first
    process, as if both were one. `begins`: the number of ranks that the run begins with, which counts as the most that
    the job may have: all processes of a job have one number for that."""

    def __init__(self, arguments: Arguments, rounds: MemoryStore, index: int, first: int, begins: int) -> None:
        super().__init__(arguments, os.environ)
        self._rounds, self._index, self._first, self._begins = rounds, index, first, begins
        self.second: _Part | None = None  # beside this one
        self.shared: _SharedForkServer | None = None  # of the second one
        self.began = False
        self.wait_seconds = 0.0  # for the other one, before the first round

    def begin_beside(self, first: _Part) -> asyncio.Task[int]:
        """Run as the second one, over the fork server of the first."""
        self._fork_server = first.shared = _SharedForkServer(first._fork_server, self._exited)
        first.second = self
        return asyncio.create_task(self.run())

    def stop(self, number: int) -> None:
        """As if it got this signal."""
        self._signalled(number)

    def _listen(self) -> None:
        """Only the first one hears signals, and passes them on."""
        self.began = True
        if self._index == 0:
            super()._listen()

    def _signalled(self, number: int) -> None:
        super()._signalled(number)
        if self.second is not None and self.second.began:
            self.second.stop(number)

    def _exited(self, pid: int, code: int) -> None:
        super()._exited(pid, code)
        if self.shared is not None:
            self.shared.ended(pid, code)

    def _open_driver(self, processes: int) -> tuple[Driver, float]:
        member = Member(self._index, agent_id(), 0, processes, loopback())
        settings = JoinSettings(Patience(0.0, 0.0, first_call=self.wait_seconds), ttl=LEASE_SECONDS, spread=0.0)
        return Driver(self._rounds, member, Sizes(1, 2), settings), JOIN_SECONDS

    def _environment(self, slot: int, round_: Round | None, files: Files) -> dict[str, str]:
        most, local = str(self._begins), max(self._begins, self._first + 1)
        return super()._environment(slot, round_, files) | {
            "LOCAL_RANK": str(self._first + slot), "LOCAL_WORLD_SIZE": str(local),
            env.LEAST_PROCESSES: most, env.MOST_PROCESSES: most,
        }  # fmt: skip


async def _run(arguments: Arguments) -> int:
    """The exit code of a run in which one rank joins or leaves when its processes want that."""
    settings = json.loads(os.environ[SETTINGS])
    if settings["change"] is None:
        agent = Agent(arguments, os.environ)
        _use_forked(agent, arguments)
        return await agent.run()
    ranks, size, wanted = int(arguments.processes), settings["change"]["size"], Path(settings["folder"], CHANGE_WANTED)
    joins, rounds = size > ranks, MemoryStore()
    alone = min(ranks, size)
    arguments = replace(arguments, nodes=(1, 2), local=False, backend=OUR_BACKENDS[0])
    first = _Part(replace(arguments, processes=str(alone)), rounds, 0, 0, ranks)
    second = _Part(replace(arguments, processes="1"), rounds, 1, alone, ranks)
    _use_forked(first, arguments)
    running = asyncio.create_task(first.run())
    beside: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    if not joins:
        first.wait_seconds = second.wait_seconds = JOIN_SECONDS
        beside = second.begin_beside(first)
    await asyncio.to_thread(_look, wanted, running)
    if joins and not running.done():
        beside = second.begin_beside(first)
    elif not running.done():
        second.stop(signal.SIGTERM)
    try:
        return await running
    finally:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)


def _use_forked(agent: Agent, arguments: Arguments) -> None:
    agent._fork_server = _ForkedServer(arguments.preload, agent._fork_server_environ(), agent._exited)


def _look(path: Path, running: asyncio.Task[int]) -> None:
    """Until the file is there, or the agent has ended."""
    while not (path.exists() or running.done()):
        time.sleep(LOOK_SECONDS)


def _begin(folder: str, arguments: list[str]) -> NoReturn:
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    _move(folder)
    _ForkedServer.fork_it()
    try:
        main(arguments, _run)
    except SystemExit as e:
        end(e.code if isinstance(e.code, int) else int(e.code is not None))
    end()


def _move(folder: str) -> None:
    """Be in the folder, as if this process had begun there: folders of PYTHONPATH may be named from it."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    moved = {os.path.abspath(one): os.path.join(folder, one) for one in named if not os.path.isabs(one)}
    sys.path[:] = [os.path.normpath(moved.get(one, one)) if one else one for one in sys.path]
    os.chdir(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    _begin(given.folder, given.arguments)
