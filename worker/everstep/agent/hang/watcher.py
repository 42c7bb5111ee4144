"""Watches processes that speak with the agent: which hangs, which waits for it, and what all of them were doing.

Each agent finds by itself that its processes do not go on, at about the same time as the others do, and keeps their
stacks then: so those of all ranks are there before the one that hangs is replaced. If no rank hangs and all wait, the
agent of rank 0 compares what they wait in.

Invariant: a process is blamed only after its stacks were kept, and after the others had time to keep theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everstep.agent.decide import events as e
from everstep.agent.decide.stall import ASK_SECONDS, Found, ProcessState, look
from everstep.agent.hang.board import Board
from everstep.agent.hang.mismatch import Seen, Verdict, clash, compare
from everstep.agent.processes import stacks
from everstep.agent.processes.client import ForkServer
from everstep.agent.processes.control_socket import ControlSocket
from everstep.agent.processes.program import STACKS_SIGNAL
from everstep.agent.processes.running import Running
from everstep.agent.tasks import Tasks
from everstep.contract.calls import read_page, read_row, read_rows
from everstep.membership.world_state import Round

log = logging.getLogger(__name__)

GRACE_SECONDS = 3.0  # between what a process was found to do and its end: the others look as often as we do
CLASH_SECONDS = 0.7  # in which others tell what they were in when a process was aborted: before the round breaks
CLASH_POLL = 0.05
# What the interpreter's fault handler writes stacks for.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class Watcher:
    """`running`: the agent's processes by pid, as they are at any time; `round_`: the round that they are in."""

    def __init__(
        self,
        running: Mapping[int, Running],
        round_: Callable[[], Round | None],
        post: Callable[[e.Event], None],
        fork_server: ForkServer,
        control_socket: ControlSocket,
        script: str,
        folder: Path,
    ) -> None:
        self._running, self._round, self._post = running, round_, post
        self._fork_server, self._control_socket = fork_server, control_socket
        self._board = Board(control_socket)
        self._script, self._folder = script, folder
        self._tasks = Tasks(self._failed)
        self._judging: asyncio.Task[None] | None = None
        self._last: dict[int, Seen] = {}

    async def watch(self) -> None:
        """Ask the processes where they are, for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            for pid, process in self._running.items():
                if process.speaks:
                    process.said = None
                    self._control_socket.tell(pid, kind="where")
            await asyncio.sleep(ASK_SECONDS)
            for pid, process in list(self._running.items()):
                if process.speaks:
                    process.watch, found = look(process.watch, process.said, clock())
                    self._found(pid, process, found, clock())
            if self._judging is None or self._judging.done():
                self._judging = self._tasks.start(self._judge())

    async def close(self) -> None:
        await self._tasks.close()

    # --- what processes say

    def heard(self, process: Running, message: Mapping[str, Any]) -> None:
        """`where` and `broken`. Raises KeyError, TypeError, ValueError."""
        recent = read_rows(message.get("recent", []))
        if message["kind"] == "where":
            process.said = ProcessState(
                message["step"], bool(message["waits"]), float(message["slowest"]),
                read_row(message.get("call")), recent,
            )  # fmt: skip
        elif recent and (round_ := self._round()) is not None:
            seen = Seen(recent[-1], recent, str(message.get("at", "")), waits=False)
            self._tasks.start(self._board.post(round_, process.rank, seen))

    async def crashed(self, process: Running, code: int) -> tuple[str, Verdict | None]:
        """What can be said of a process that ended by itself by a signal: where it was, and whether the ranks'
        collectives did not match, which gloo answers by SIGABRT."""
        if -code not in CRASHES:
            return "", None
        text = stacks.tail(process.files.stacks)
        at = stacks.place(text, self._script)
        recent = read_page(process.files.calls)
        if text:
            log.error("rank %d, when it ended:\n%s", process.rank, text)
        round_ = self._round()
        verdict = None
        if -code == signal.SIGABRT and recent and round_ is not None:
            ended = Seen(recent[-1], recent, at, waits=False)
            verdict = await self._clash(round_, process.rank, ended)
        return at + (f"; its newest collective was {recent[-1].what}" if recent else ""), verdict

    async def _clash(self, round_: Round, rank: int, ended: Seen) -> Verdict | None:
        """What `rank` was ended in, beside what the others say, who may have been aborted too."""
        others = [other for other in range(round_.processes) if other != rank]
        found: dict[int, Seen] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLASH_SECONDS):
                await self._board.post(round_, rank, ended)
                while len(found) < len(others):
                    await asyncio.sleep(CLASH_POLL)
                    found = await self._board.read(round_, others, some=True)
        return clash(rank, ended, found)

    # --- what is found

    def _found(self, pid: int, process: Running, found: Found, now: float) -> None:
        before, since = process.stall
        if found is not before:
            process.stall = (found, now)
            if found is not Found.GOES_ON:
                self._tasks.start(self._note(pid, process, found))
            elif before is not Found.GOES_ON and (round_ := self._round()) is not None:
                self._tasks.start(self._board.withdraw(round_, process.rank))
        elif found is Found.HANGS and now - since >= GRACE_SECONDS:
            process.stall = (found, now)
            self._tasks.start(self._blame(pid, process))

    async def _note(self, pid: int, process: Running, found: Found) -> None:
        """Keep what the process is doing, and tell the others that it does not go on."""
        where, stalled = process.watch.where, process.watch.stalled
        assert where is not None
        round_ = self._round()
        taken = await self._stacks(pid, process, round_)
        if round_ is not None and process.stall[0] is found:
            waits = found is Found.WAITS
            await self._board.post(round_, process.rank, Seen(where.call, where.recent, taken.at, waits))
            if process.stall[0] is Found.GOES_ON:  # meanwhile
                await self._board.withdraw(round_, process.rank)
        if found is Found.WAITS:
            what = f"in {where.call.what}" if where.call is not None else "for the others at the end of its step"
            log.warning(
                "rank %d waits %s%s for %.0f s; what it was doing is in %s",
                process.rank, what, taken.at, stalled, taken.path,
            )  # fmt: skip

    async def _blame(self, pid: int, process: Running) -> None:
        where, stalled = process.watch.where, process.watch.stalled
        assert where is not None
        taken = await self._stacks(pid, process, self._round())
        why = f"rank {process.rank}: no progress in step {where.step} for {stalled:.0f} s{taken.at}"
        log.error("%s; the others wait for it\n%s", why, taken.text)
        if taken.path is not None:
            why += f"; stacks in {self._folder}"
        self._post(e.Hung(process.slot, pid, why, where.step or 0))

    async def _stacks(self, pid: int, process: Running, round_: Round | None) -> stacks.Stacks:
        since = stacks.size_of(process.files.stacks)
        self._control_socket.tell(pid, kind="stacks", path=str(process.files.stacks))
        text = await stacks.written(process.files.stacks, since)
        if not text:
            # It does not come to its interpreter any more. What reads the stacks of a thread that runs may crash (seen
            # once in some hundred times), so this is for one that hangs.
            self._fork_server.signal(pid, STACKS_SIGNAL, group=False)
            text = await stacks.written(process.files.stacks, since)
        where = process.watch.where
        step = where.step if where is not None and where.step is not None else "none"
        number = round_.number if round_ is not None else 0
        path = stacks.keep(self._folder, f"round-{number}-step-{step}-rank-{process.rank}.txt", text)
        return stacks.Stacks(text, stacks.place(text, self._script), path)

    async def _judge(self) -> None:
        """Where all ranks wait: why. Done by the agent of rank 0, when it was twice the same."""
        round_ = self._round()
        mine = [p for p in self._running.values() if p.speaks]
        all_wait = bool(mine) and all(p.stall[0] is Found.WAITS for p in mine)
        if round_ is None or round_.rank != 0 or not all_wait:
            self._last = {}
            return
        seen = await self._board.read(round_, range(round_.processes))
        before, self._last = self._last, seen
        if not seen or seen != before or not all(one.waits for one in seen.values()):
            return
        self._last = {}
        verdict = compare(seen)
        why = f"{verdict.why}; stacks in {self._folder} of each agent"
        log.error("%s", why)
        if verdict.odd:
            self._post(e.Mismatched(round_.number, why))
        else:
            where = mine[0].watch.where
            self._post(e.Stuck(round_.number, where.step or 0 if where is not None else 0, why))

    def _failed(self, error: BaseException) -> None:
        log.error("watching the processes failed", exc_info=error)
