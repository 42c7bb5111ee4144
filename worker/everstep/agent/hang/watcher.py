"""Watches processes that speak with the agent: finds one that hangs, and keeps the stacks of all that do not go on.

Each agent finds by itself that its processes do not go on, at about the same time as the other agents, and saves their
stacks then. So the stacks of all ranks are saved before the rank that hangs is replaced. If no rank hangs and all wait,
the agent of rank 0 compares the collectives in which they wait.

Invariant: a process is blamed only after its stacks were saved, and after the other agents had time to save theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from everstep.agent.decide import events as e
from everstep.agent.decide.stall import ASK_SECONDS, Finding, look
from everstep.agent.hang.mismatch import Seen, Verdict, clash, compare, decode
from everstep.agent.processes import stacks
from everstep.agent.processes.client import ForkServer
from everstep.agent.processes.control_socket import ControlSocket, StoresUnavailable
from everstep.agent.processes.program import STACKS_SIGNAL
from everstep.agent.processes.running import Running
from everstep.agent.tasks import Tasks
from everstep.contract import process_end
from everstep.contract.calls import StepStatus, read_page, read_rows
from everstep.membership.world_state import Round

# --- board
# Shares between agents in which collective each rank waits, through the process-group store of their round. That store
# exists anyway, every agent reaches it, and it ends with the round. The agent has no torch, so it sends its calls
# through its process that hosts stores. The board is used only when processes have stalled. Invariant: no call here
# raises; a call that fails gives an empty answer.

log = logging.getLogger(__name__)

AT_ONCE = 256  # ranks in one answer, which must fit into one line of the agent's socket


class Asks(Protocol):
    async def ask_stores(self, **message: Any) -> Any: ...


class Board:
    def __init__(self, stores: Asks) -> None:
        self._stores = stores

    async def post(self, round_: Round, rank: int, seen: Seen) -> None:
        await self._ask(round_, "post", key=_key(round_, rank), value=seen.encode().decode())

    async def withdraw(self, round_: Round, rank: int) -> None:
        await self._ask(round_, "withdraw", key=_key(round_, rank))

    async def read(self, round_: Round, ranks: Iterable[int], *, some: bool = False) -> dict[int, Seen]:
        """The posts of these ranks. Empty unless all of them have posted; with `some`, the posts that exist."""
        ranks = list(ranks)
        posts: dict[int, Seen] = {}
        for i in range(0, len(ranks), AT_ONCE):
            part = ranks[i : i + AT_ONCE]
            answer = await self._ask(round_, "read", keys=[_key(round_, rank) for rank in part], some=some)
            for rank, value in zip(part, answer.get("values", ()), strict=False):
                if value is not None:
                    try:
                        posts[rank] = decode(value.encode())
                    except ValueError as e:
                        log.warning("rank %d: %s", rank, e)
            if not some and len(posts) < i + len(part):
                return {}
        return posts

    async def _ask(self, round_: Round, kind: str, **message: Any) -> Any:
        first = round_.members[0]
        try:
            answer = await self._stores.ask_stores(kind=kind, host=first.address, port=first.store_port, **message)
        except StoresUnavailable as e:
            log.warning("%s", e)
            return {}
        if "error" in answer:
            log.info("round %d: its store does not answer: %s", round_.number, answer["error"])
        return answer


def _key(round_: Round, rank: int) -> str:
    return f"everstep/waits/{round_.number}/{rank}"


# --- watcher

GRACE_SECONDS = 3.0  # from finding a process that hangs to ending it; meanwhile other agents find theirs that wait
CLASH_SECONDS = 0.7  # to collect the other ranks' collectives after an abort; short, because the round breaks soon
CLASH_POLL = 0.05
# A process of which the fault handler writes this waited in a collective of the session's group.
IN_COLLECTIVE = "/everstep/recovery/group/in_flight.py"
GLOO_ABORTS = (
    ". gloo aborts a rank whose peer is in a collective of another size: call each collective on all ranks, in the "
    "same order"
)
# The signals for which the interpreter's fault handler writes stacks.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class Watcher:
    """`running`: the agent's live map of processes by pid. `round_`: gives the round that they are in."""

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
                    process.answer = None
                    self._control_socket.tell(pid, kind="where")
            await asyncio.sleep(ASK_SECONDS)
            for pid, process in list(self._running.items()):
                if process.speaks:
                    process.watch, finding = look(process.watch, process.answer, clock())
                    self._record_finding(pid, process, finding, clock())
            if self._judging is None or self._judging.done():
                self._judging = self._tasks.start(self._judge())

    async def close(self) -> None:
        await self._tasks.close()

    # --- what processes say

    def receive(self, process: Running, message: Mapping[str, Any]) -> None:
        """Handle the messages `where` and `broken`. Raises KeyError, TypeError, ValueError."""
        if message["kind"] == "where":
            process.answer = StepStatus.read(message)
        elif (recent := read_rows(message.get("recent", []))) and (round_ := self._round()) is not None:
            seen = Seen(recent[-1], recent, str(message.get("at", "")), waits=False)
            self._tasks.start(self._board.post(round_, process.rank, seen))

    async def crashed(self, process: Running, code: int) -> tuple[str, Verdict | None]:
        """Describe a process that crashed with a signal: its place in the script, and a mismatch of collectives if
        there was one, because gloo answers a mismatch with SIGABRT."""
        if -code not in CRASHES:
            return "", None
        text = stacks.tail(process.files.stacks)
        at = stacks.script_line(text, self._script)
        recent = read_page(process.files.calls)
        if text:
            log.error("rank %d, when it ended:\n%s", process.rank, text)
        round_ = self._round()
        verdict = None
        if -code == signal.SIGABRT and recent and round_ is not None:
            ended = Seen(recent[-1], recent, at, waits=False)
            verdict = await self._clash(round_, process.rank, ended)
        newest = f"; its newest collective was {recent[-1].what}" if recent else ""
        return at + newest + (GLOO_ABORTS if recent and IN_COLLECTIVE in text else ""), verdict

    async def _clash(self, round_: Round, rank: int, ended: Seen) -> Verdict | None:
        """Compare the collective in which `rank` was aborted with those of the others, which may be aborted too."""
        others = [other for other in range(round_.processes) if other != rank]
        posts: dict[int, Seen] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLASH_SECONDS):
                await self._board.post(round_, rank, ended)
                while len(posts) < len(others):
                    await asyncio.sleep(CLASH_POLL)
                    posts = await self._board.read(round_, others, some=True)
        posts |= await self._silent(round_, posts)
        return clash(rank, ended, posts)

    async def _silent(self, round_: Round, posts: Mapping[int, Seen]) -> dict[int, Seen]:
        """What this agent's own processes have begun that have posted nothing: one whose neighbours in a ring still
        live waits on, and knows of no failure."""
        seen: dict[int, Seen] = {}
        for pid, process in list(self._running.items()):
            recent = read_page(process.files.calls)
            if process.speaks and recent and process.rank not in posts:
                taken = await self._stacks(pid, process, round_)
                seen[process.rank] = Seen(recent[-1], recent, taken.at)
        return seen

    # --- what is found

    def _record_finding(self, pid: int, process: Running, finding: Finding, now: float) -> None:
        before, since = process.stall
        if finding is not before:
            process.stall = (finding, now)
            if finding is not Finding.GOES_ON:
                self._tasks.start(self._note(pid, process, finding))
            elif before is not Finding.GOES_ON and (round_ := self._round()) is not None:
                self._tasks.start(self._board.withdraw(round_, process.rank))
        elif finding is Finding.HANGS and now - since >= GRACE_SECONDS:
            process.stall = (finding, now)
            self._tasks.start(self._blame(pid, process))

    async def _note(self, pid: int, process: Running, finding: Finding) -> None:
        """Save the process's stacks, and tell the other agents that it does not go on."""
        where, stalled = process.watch.where, process.watch.stalled
        assert where is not None
        round_ = self._round()
        taken = await self._stacks(pid, process, round_)
        if round_ is not None and process.stall[0] is finding:
            waits = finding is Finding.WAITS
            await self._board.post(round_, process.rank, Seen(where.call, where.recent, taken.at, waits))
            if process.stall[0] is Finding.GOES_ON:  # it went on during the post
                await self._board.withdraw(round_, process.rank)
        if finding is Finding.WAITS:
            what = f"in {where.call.what}" if where.call is not None else "for the others at the end of its step"
            log.warning(
                "rank %d waits %s%s for %.0f s; what it was doing is in %s",
                process.rank, what, taken.at, stalled, taken.path,
            )  # fmt: skip

    async def _blame(self, pid: int, process: Running) -> None:
        where, stalled = process.watch.where, process.watch.stalled
        assert where is not None
        taken = await self._stacks(pid, process, self._round())
        why = process_end.of_rank(process.rank, process_end.hung(where.step, stalled, taken.at))
        log.error("%s; the others wait for it\n%s", why, taken.text)
        if taken.path is not None:
            why += f"; stacks in {self._folder}"
        self._post(e.Hung(process.slot, pid, why, where.step or 0))

    async def stacks_of(self, pid: int, process: Running) -> dict[str, Any]:
        """Where a process is now, for a person: its step, the collective in which it waits, its line, its stacks."""
        self._control_socket.tell(pid, kind="where")  # answered before the stacks are
        taken = await self._stacks(pid, process, self._round())
        where = process.answer or process.watch.where
        call = where.call.what if where is not None and where.call is not None else None
        return {
            "step": where.step if where is not None else None,
            "waits": where.waits if where is not None else False,  # for other ranks
            "waits_in": call,
            "seconds": round(process.watch.stalled, 1),
            "at": taken.at.strip(),
            "stacks": taken.text,
        }

    async def _stacks(self, pid: int, process: Running, round_: Round | None) -> stacks.Stacks:
        since = stacks.size_of(process.files.stacks)
        self._control_socket.tell(pid, kind="stacks", path=str(process.files.stacks))
        text = await stacks.written(process.files.stacks, since)
        if not text and stacks.handles(pid, STACKS_SIGNAL):
            # The process does not answer, so the fault handler reads its stacks on a signal. That can crash a process
            # whose threads run (seen once in some hundred times), so it is the second choice.
            self._fork_server.signal(pid, STACKS_SIGNAL, group=False)
            text = await stacks.written(process.files.stacks, since)
        where = process.watch.where
        step = where.step if where is not None and where.step is not None else "none"
        number = round_.number if round_ is not None else 0
        path = stacks.keep(self._folder, f"round-{number}-step-{step}-rank-{process.rank}.txt", text)
        return stacks.Stacks(text, stacks.script_line(text, self._script), path)

    async def _judge(self) -> None:
        """If all ranks wait, find out why. The agent of rank 0 does this, once it has read the same posts twice."""
        round_ = self._round()
        mine = [p for p in self._running.values() if p.speaks]
        all_wait = bool(mine) and all(p.stall[0] is Finding.WAITS for p in mine)
        if round_ is None or round_.rank != 0 or not all_wait:
            self._last = {}
            return
        seen = await self._board.read(round_, range(round_.processes))
        before, self._last = self._last, seen
        if not seen or seen != before or not all(post.waits for post in seen.values()):
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
