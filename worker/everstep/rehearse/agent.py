"""The agent of one run of a rehearsal: `agent.py PID ARGUMENTS`, as `everstep-run ARGUMENTS`. It ends with process PID,
which has started it, and the processes of its workers end with it.

Where the size of the run changes while its processes live, a second agent in this process has the rank that joins or
leaves. Both keep their rounds in a store of this process and fork from one fork server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from everstep.agent.arguments import OUR_BACKENDS, Arguments
from everstep.agent.loop import Agent
from everstep.agent.main import main
from everstep.agent.processes.client import ForkServer
from everstep.agent.processes.forkserver import die_with
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
from everstep.rehearse.record import CHANGE_WANTED

LOOK_SECONDS = 0.05
LEASE_SECONDS = 60.0  # both agents end together, so nothing has to be found by the end of a lease
JOIN_SECONDS = 120.0  # that a round may take; so long agents that begin together wait for each other


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
        return await Agent(arguments, os.environ).run()
    ranks, size, wanted = int(arguments.processes), settings["change"]["size"], Path(settings["folder"], CHANGE_WANTED)
    joins, rounds = size > ranks, MemoryStore()
    alone = min(ranks, size)
    arguments = replace(arguments, nodes=(1, 2), local=False, backend=OUR_BACKENDS[0])
    first = _Part(replace(arguments, processes=str(alone)), rounds, 0, 0, ranks)
    second = _Part(replace(arguments, processes="1"), rounds, 1, alone, ranks)
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


def _look(path: Path, running: asyncio.Task[int]) -> None:
    """Until the file is there, or the agent has ended."""
    while not (path.exists() or running.done()):
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pid", type=int)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    die_with(given.pid)
    main(given.arguments, _run)
