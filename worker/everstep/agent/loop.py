"""Carries out the decisions of `decide` in one asyncio loop, in which only tasks wait.

Invariant: events are handled one at a time, in the order in which they came. A message of a process whose fork is not
confirmed yet waits for the confirmation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_never

from everstep.agent.arguments import Arguments, UsageError
from everstep.agent.decide import events as e
from everstep.agent.decide import machine, stopping
from everstep.agent.decide.stall import Watch
from everstep.agent.decide.state import Config, SlotPhase, begin, started
from everstep.agent.hang.watcher import Watcher
from everstep.agent.membership import Membership, open_driver
from everstep.agent.processes import stacks
from everstep.agent.processes.client import ForkServer, ForkServerError
from everstep.agent.processes.control_socket import ControlSocket
from everstep.agent.processes.environ import Setting, environment, of_round
from everstep.agent.processes.faults import FirstError, judge, memory_kills
from everstep.agent.processes.output import Files, Output
from everstep.agent.processes.running import Running, Settling
from everstep.agent.requests import Requests
from everstep.agent.tasks import Tasks
from everstep.contract import env, exit_codes, process_end, termination, unsaved
from everstep.contract.error_file import PATH as ERROR_FILE
from everstep.membership.backends.opening import remedy
from everstep.membership.driver import Driver
from everstep.membership.world_state import Round

log = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0  # to tell the other agents of the end
LEAVE_SHARE = 0.3  # of the grace period, at most
LEFT_ITS_RUN = (
    "exit code 0, but the process was ended before its run was complete, by os._exit(0) or the like: what it had "
    "trained since the last commit is not saved. Leave the loop on all ranks after the same step, and end the script "
    "by its last line or by sys.exit()"
)
LEFT_ITS_SAVE = (
    "exit code 0, but {unsaved} when the process was ended, by os._exit(0) or the like: that step is no commit. Call "
    "close() of the Checkpointer, which waits for it, before os._exit"
)


class Agent:
    """One worker's agent, from its start to its exit code."""

    def __init__(self, arguments: Arguments, environ: Mapping[str, str]) -> None:
        self._arguments, self._environ = arguments, dict(environ)
        self._events: deque[e.Event] = deque()
        self._woken = asyncio.Event()
        self._folder = tempfile.mkdtemp(prefix="everstep-agent-")
        self._fork_server = ForkServer(arguments.preload, self._fork_server_environ(), self._exited)
        self._control_socket = ControlSocket(os.path.join(self._folder, "s"), self._received)
        self._stores_log = Path(self._folder) / "stores.log"
        self._running: dict[int, Running] = {}
        self._early: list[tuple[int, Mapping[str, Any] | int]] = []  # messages and ends during a fork
        self._forking = 0
        self._signals: dict[int, int] = {}  # by slot, for processes whose fork is not confirmed yet
        self._tasks = Tasks(self._failed)
        self._stores = 0
        self._memory_kills = memory_kills()
        self._finish: e.Finish | None = None
        self._cpus: list[list[int]] = []
        self._first_error = FirstError()
        self._settling = Settling()

    async def run(self) -> int:
        """Run until the end; returns the exit code.

        Raises UsageError, RendezvousFailed, ForkServerError, StoresUnavailable before training processes were started.
        """
        a = self._arguments
        try:
            await self._control_socket.start()
            await self._fork_server.start()
            await self._start_stores()
            processes = await self._count()
            self._cpus = await self._bind(processes)
            driver, timeout = await asyncio.to_thread(self._open_driver, processes)
            spent = "" if env.JOB_UID in self._environ else remedy(a.backend, a.run_id)
            self._membership = Membership(driver, timeout, self._post, spent)
            self._membership.start()
            self._setting = Setting(
                self._environ, processes, a.run_id, a.role, a.max_restarts, self._control_socket.path,
                a.virtual_local_rank, processes * a.nodes[1], processes * a.nodes[0],
            )  # fmt: skip
            self._output = Output(a, self._environ)
            alone = env.JOB_UID not in self._environ
            grace = min(a.shutdown_seconds, a.grace_seconds)
            config = Config(
                driver.agent, processes, a.max_restarts, alone, a.recovery_seconds, a.shutdown_seconds, grace
            )
            self._state = begin(config)
            self._watcher = Watcher(
                self._running, self._newest_round, self._post, self._fork_server, self._control_socket,
                a.program.target, self._output.stacks(),
            )  # fmt: skip
            self._requests = Requests(self._running, self._watcher, self._control_socket, a.run_id, self._environ)
            await self._requests.start()
            self._listen()
            if a.hang_seconds:
                self._tasks.start(self._watcher.watch())
            try:
                self._post(e.Began(not a.local and await self._membership.keeps()))
                finish = await self._decide_all()
            finally:
                await self._membership.flush(min(LEAVE_SECONDS, a.grace_seconds * LEAVE_SHARE))
                await self._membership.leave()
                await self._requests.close()
                await self._watcher.close()
                await self._output.close()
            self._tell_end(finish)
            return finish.code
        finally:
            await self._tasks.close()
            await self._control_socket.close()
            await self._fork_server.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- events

    def _post(self, event: e.Event) -> None:
        self._events.append(event)
        self._woken.set()

    async def _decide_all(self) -> e.Finish:
        while self._finish is None:
            await self._woken.wait()
            self._woken.clear()
            while self._events and self._finish is None:
                event = self._events.popleft()
                self._state, instructions = machine.decide(self._state, event)
                for instruction in instructions:
                    log.debug("%s -> %s", event, instruction)
                    self._carry_out(instruction)
        return self._finish

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for name in self._arguments.signals:
            number = getattr(signal, name, None)
            if number is None:
                raise UsageError(f"--signals-to-handle: {name}: no such signal")
            loop.add_signal_handler(number, self._signalled, int(number))

    def _signalled(self, number: int) -> None:
        if self._finish is not None and number == signal.SIGINT:  # all processes have ended, so the next one ends us
            asyncio.get_running_loop().remove_signal_handler(number)
            return
        if advice := stopping.advice(self._state, number):
            log.info("%s", advice)
        self._post(e.StopRequested(number, self._membership.enough_without_us()))

    def _exited(self, pid: int, code: int) -> None:
        if pid not in self._running:
            if self._forking:
                self._early.append((pid, code))
            elif pid == self._stores:
                tail = stacks.tail(self._stores_log)
                log.error("the process that hosts stores ended (%d); another is started\n%s", code, tail)
                self._tasks.start(self._start_stores())
            return
        self._tasks.start(self._ended(pid, code))

    async def _ended(self, pid: int, code: int) -> None:
        if code == exit_codes.OK:
            await self._control_socket.closed(pid)
        process = self._running.pop(pid)
        self._requests.ended(pid)
        await self._output.ended(process.slot)
        kills = memory_kills()
        if code == exit_codes.OK and process.joined and not process.ended:
            code, fault, why = 1, e.Fault.PROGRAM, LEFT_ITS_RUN
        elif code == exit_codes.OK and (lost := unsaved.read(process.files.error.parent, pid)):
            code, fault, why = 1, e.Fault.PROGRAM, LEFT_ITS_SAVE.format(unsaved=lost)
        else:
            fault, why = judge(code, process.files.error, kills > self._memory_kills)
        self._memory_kills = kills
        if code == exit_codes.PREEMPTED and self._membership.another_leaves():
            fault = e.Fault.LEAVER
        mismatch = None
        try:
            more, mismatch = await self._watcher.crashed(process, code)
            why += more
        except Exception:  # the end of a process must be handled even if its description fails
            log.exception("how rank %d ended cannot be said", process.rank)
        number = self._state.round.number if self._state.round is not None else 0
        if mismatch is not None:
            why = mismatch.why
            self._post(e.Mismatched(number, why))
        slot = self._state.slots[process.slot]
        if code != 0 and slot.pid == pid and not slot.killed:
            # What refused ranks have printed is long, often the same, and in the agent's last line once more.
            shown = f"exit code {code}: refused" if fault is e.Fault.REFUSED else why
            log.warning("rank %d (local rank %d, pid %d): %s", process.rank, process.slot, pid, shown)
            self._first_error.note(number, process.files.error, code, why)
        self._post(e.Exited(process.slot, pid, code, fault, process_end.of_rank(process.rank, why)))

    def _received(self, pid: int, message: Mapping[str, Any]) -> None:
        process = self._running.get(pid)
        if process is None:
            if self._forking:
                self._early.append((pid, message))
            return
        slot = process.slot
        match message["kind"]:  # a newer library may send another one
            case "hello":
                process.speaks = True
                self._post(e.Hello(slot, pid))
            case "listens":
                process.listens = True
            case "ready":
                self._post(e.Ready(slot, pid))
            case "coming":
                self._post(e.Entered(slot, pid, int(message["round"])))
            case "joined":
                if (line := self._settling.joined(slot, message, len(self._state.slots))) is not None:
                    log.info("%s", line)
                process.joined = True
                self._post(e.Trains(slot, pid, int(message["round"]), int(message["step"])))
            case "ended":
                process.ended = True
            case "profiled":
                self._requests.profiled(pid, message)
            case "where" | "broken" as kind:
                self._watcher.receive(process, message)
                if kind == "broken":
                    why = f"rank {process.rank}: {message['reason']}"
                    self._post(e.Hurt(slot, pid, int(message["round"]), why[:180]))

    # --- instructions

    def _carry_out(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.JoinNext(after):
                self._membership.join(after, self._control_socket.open_store(), prepared=self._state.keeps)
            case e.Fork(slots, round_):
                self._tasks.start(self._fork(slots, round_))
            case e.Announce() | e.Drained() | e.Signal():
                self._tell_processes(instruction)
            case e.Timer():
                self._tasks.start(self._elapse(instruction))
            case e.Finish():
                self._finish = instruction
            case _:
                self._membership.change(instruction)

    def _tell_processes(self, instruction: e.Announce | e.Drained | e.Signal) -> None:
        for slot in instruction.slots:
            pid = self._state.slots[slot].pid
            match instruction:
                case e.Announce(_, round_, whole):
                    self._announce(slot, round_, whole)
                case e.Drained():
                    self._control_socket.tell(pid, kind="leave")
                case e.Signal(_, number):
                    if pid:
                        self._fork_server.signal(pid, number, group=not self._answers(pid, number))
                    else:
                        self._signals[slot] = number
                case _:
                    assert_never(instruction)

    def _answers(self, pid: int, number: int) -> bool:
        """Whether the process finishes its step and saves on this signal. Its DataLoaders' workers are needed for that,
        so the signal is not for them; what it leaves is ended after it."""
        process = self._running.get(pid)
        return number != signal.SIGKILL and process is not None and (process.speaks or process.listens)

    async def _fork(self, slots: tuple[int, ...], round_: Round | None) -> None:
        self._forking += 1
        try:
            for slot in slots:
                await self._fork_one(slot, round_)
        except Exception as error:
            if not isinstance(error, ForkServerError):
                log.exception("a process cannot be started")
            self._post(e.NotFormed(f"no process could be started: {error}"))
            for slot in slots:
                if not self._state.slots[slot].pid:  # it was never forked, so its end must be reported here
                    self._post(e.Exited(slot, 0, 1, e.Fault.OUTSIDE, "it was not started"))
        finally:
            self._forking -= 1
            early, self._early = self._early, []
            for pid, what in early:
                if isinstance(what, int):
                    self._exited(pid, what)
                else:
                    self._received(pid, what)

    async def _fork_one(self, slot: int, round_: Round | None) -> None:
        rank = round_.first_process + slot if round_ is not None else slot
        files = self._output.open(slot, rank)
        program = self._arguments.program
        pid = await self._fork_server.fork(
            {
                "kind": "program",
                "slot": slot,
                "target": program.target,
                "arguments": program.arguments,
                "module": program.module,
                "executable": program.executable,
                "environment": self._environment(slot, round_, files),
                "stdout": files.stdout,
                "stderr": files.stderr,
                "stacks": str(files.stacks),
                "cpus": self._cpus[slot] if self._cpus else None,
            }
        )
        if round_ is not None:
            self._mark_joined()
        watch = Watch(self._arguments.hang_seconds, self._arguments.hang_factor)
        self._running[pid] = Running(slot, rank, files, watch)
        self._state = started(self._state, slot, pid)
        if (number := self._signals.pop(slot, None)) is not None:
            self._fork_server.signal(pid, number)

    def _announce(self, slot: int, round_: Round, whole: bool) -> None:
        first = round_.members[0]
        self._mark_joined()
        pid = self._state.slots[slot].pid
        if pid in self._running:
            self._running[pid].rank = round_.first_process + slot
        self._control_socket.tell(
            pid,
            kind="round",
            round=round_.number,
            rank=round_.first_process + slot,
            world_size=round_.processes,
            store=[first.address, first.store_port],
            rendezvous=round_.rendezvous,
            whole=whole,
            environment=of_round(slot, round_),
        )

    def _mark_joined(self) -> None:
        """Tell the start-up probe of the pod that this worker is in a round."""
        if path := self._environ.get(env.JOINED_FILE):
            with contextlib.suppress(OSError):  # then the probe ends by its own time
                Path(path).touch()

    async def _elapse(self, timer: e.Timer) -> None:
        await asyncio.sleep(timer.seconds)
        self._post(e.Elapsed(timer))

    def _newest_round(self) -> Round | None:
        """The processes' present round, or the last one."""
        return self._state.round

    def _failed(self, error: BaseException) -> None:
        log.error("the agent failed", exc_info=error)
        self._post(e.NotFormed(f"the agent failed: {type(error).__name__}: {error}"))

    # --- around it

    def _open_driver(self, processes: int) -> tuple[Driver, float]:
        return open_driver(self._arguments, processes, self._environ)

    def _environment(self, slot: int, round_: Round | None, files: Files) -> dict[str, str]:
        return environment(
            self._setting, slot, round_, str(files.error), str(files.calls), self._state.round,
            self._membership.expected_rank,
        )  # fmt: skip

    def _fork_server_environ(self) -> dict[str, str]:
        environ = dict(self._environ)
        many = self._arguments.processes != "1"
        if many:  # OpenMP reads its settings when it is loaded, which is in the fork server, for all its processes
            environ.setdefault("OMP_NUM_THREADS", "1")
        return environ

    async def _start_stores(self) -> None:
        environ = {**self._environ, env.AGENT_SOCKET: self._control_socket.path}
        # torch writes dozens of lines for each store of a lost agent that does not answer. The agent logs the fact
        # itself, so these lines go to a file.
        path = str(self._stores_log)
        command = {"kind": "stores", "environment": environ, "stdout": path, "stderr": path}
        self._stores = await self._fork_server.fork(command)

    async def _count(self) -> int:
        wanted = self._arguments.processes
        if wanted.isdecimal():
            return int(wanted)
        answer = await self._control_socket.ask_stores(kind="devices")
        if wanted == "auto":
            return int(answer["accelerators"]) or int(answer["cpus"])
        count = int(answer[wanted + "s"])
        if not count:
            raise UsageError(
                f"--nproc-per-node={wanted}: torch sees no {wanted.upper()} on this machine; give a number"
            )
        return count

    async def _bind(self, processes: int) -> list[list[int]]:
        """The CPUs of each local rank, as --numa-binding says; empty without it."""
        if self._arguments.numa is None:
            return []
        answer = await self._control_socket.ask_stores(kind="numa", mode=self._arguments.numa, processes=processes)
        if "error" in answer:
            raise UsageError(f"--numa-binding={self._arguments.numa}: {answer['error']}")
        return list(answer["cpus"])

    def _tell_end(self, finish: e.Finish) -> None:
        if finish.code == 0:
            log.info("%s", finish.why)
            return
        log.error("exit code %d: %s", finish.code, finish.why)
        if path := self._environ.get(ERROR_FILE):
            self._first_error.write(path, finish.code, finish.why)
        if all(slot.phase is not SlotPhase.RUNNING for slot in self._state.slots):
            termination.write(finish.why, finish.code, [], self._environ)
