"""Answers what a person asks this agent from a second terminal: `everstep stacks`, `everstep profile`.

Invariants: only this user reaches the socket; a request never ends a process or the agent; every wait has a bound.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from everstep.agent.hang.watcher import Watcher
from everstep.agent.processes.control_socket import ControlSocket
from everstep.agent.processes.running import Running
from everstep.contract import agent_requests, env

log = logging.getLogger("everstep.agent")

Answer = dict[str, Any]


class Requests:
    """`running`: the agent's live map of its processes. `run`: the id of the rendezvous, the job's name without one."""

    def __init__(
        self,
        running: Mapping[int, Running],
        watcher: Watcher,
        control_socket: ControlSocket,
        run: str,
        environ: Mapping[str, str],
    ) -> None:
        self._running, self._watcher, self._control_socket = running, watcher, control_socket
        self._environ = environ
        self._job = environ.get(env.JOB_NAME, run)
        self._names = {run, self._job, environ.get(env.JOB_UID, run)}
        self._server: asyncio.Server | None = None
        self._profiles: dict[tuple[str, int], asyncio.Future[Answer]] = {}  # by id and pid
        self._next = 0

    async def start(self) -> None:
        """Listen. Where that is impossible, nobody can ask, and training goes on."""
        try:
            name = agent_requests.new_address(self._names)
            self._server = await asyncio.start_unix_server(self._serve, name, limit=agent_requests.MAX_REQUEST)
        except OSError as e:
            log.warning("`everstep stacks` and `everstep profile` cannot reach this agent: %s", e)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def profiled(self, pid: int, message: Mapping[str, Any]) -> None:
        """A process has made its profile, or says why not."""
        waiting = self._profiles.get((str(message.get("id")), pid))
        if waiting is not None and not waiting.done():
            waiting.set_result({k: v for k, v in message.items() if k not in ("kind", "id")})

    def ended(self, pid: int) -> None:
        """A process has ended; nobody waits for it any longer."""
        for (_, of), waiting in self._profiles.items():
            if of == pid and not waiting.done():
                waiting.set_result({"error": "the process ended before its profile was complete"})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not agent_requests.is_of_this_user(writer.get_extra_info("socket")):
                return
            async with asyncio.timeout(agent_requests.REQUEST_SECONDS):
                request = json.loads(await reader.readline())
            if request.get("job") is None or request["job"] in self._names:
                processes = list(self._running.items())
                if request.get("names"):
                    known = {"job": self._job, "answers": [self._known(pid, process) for pid, process in processes]}
                    writer.write(json.dumps(known).encode() + b"\n")
                    await writer.drain()
                for answer in asyncio.as_completed([self._answer(request, pid, process) for pid, process in processes]):
                    writer.write(json.dumps(await answer).encode() + b"\n")
                    await writer.drain()
        except (ConnectionError, TimeoutError, ValueError, AttributeError):
            pass  # the asker has gone, or asks for nothing that can be read
        finally:
            writer.close()

    async def _answer(self, request: Mapping[str, Any], pid: int, process: Running) -> Answer:
        known = self._known(pid, process)
        match request.get("verb"):
            case agent_requests.STACKS:
                return known | await self._watcher.stacks_of(pid, process)
            case agent_requests.PROFILE:
                return known | await self._profile(pid, process, request)
            case verb:
                return known | {"error": f"this agent does not know {verb!r}; its version is older"}

    def _known(self, pid: int, process: Running) -> Answer:
        return {"rank": process.rank, "pid": pid, "pod": self._environ.get(env.POD_NAME, "")}

    async def _profile(self, pid: int, process: Running, request: Mapping[str, Any]) -> Answer:
        steps = request.get("steps")
        if error := agent_requests.refused_steps(steps):
            return {"error": error}
        if not (process.speaks or process.listens):
            return {
                "error": "the steps of this process are not known: its script has not begun to train yet, or uses "
                "neither everstep.start, nor an adapter, nor everstep_horovod"
            }
        self._next += 1
        key = str(request.get("id", self._next))[:100], pid
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._profiles[key] = waiting
        try:
            self._control_socket.tell(pid, kind="profile", id=key[0], steps=steps)
            most = agent_requests.PROFILE_SECONDS
            async with asyncio.timeout(min(most, float(request.get("seconds", most)))):
                return await waiting
        except TimeoutError:
            return {"error": "the steps were not complete in time"}
        finally:
            self._profiles.pop(key, None)
