"""Answers `everstep profile` and `everstep stacks` in a training process that no agent supervises: one that torchrun,
srun or plain python has started.

It listens as an agent does (`contract.agent_requests`). Invariants: only this user reaches the socket; every wait has a
bound; a request never raises into training; a process that is forked from this one does not answer in its place.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

from everstep.contract import agent_requests, env
from everstep.instruments.live_profile import LiveProfile

log = logging.getLogger("everstep.train")

AT_ONCE = 16  # requests
RUN_ID = "TORCHELASTIC_RUN_ID"  # torchrun's name for its job

Answer = dict[str, Any]


class Listener:
    """Of this process. `step`: its present step. `environ`: names the job, and this process in it."""

    def __init__(self, live: LiveProfile, step: Callable[[], int | None], environ: Mapping[str, str]) -> None:
        self.live, self.step = live, step
        self._environ = environ
        self._job = environ.get(env.JOB_NAME, environ.get(RUN_ID, ""))  # torchrun's name changes with the round
        self._jobs = {self._job, environ.get(env.JOB_UID, self._job)}
        self._turns = threading.Semaphore(AT_ONCE)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(agent_requests.new_address(self._jobs))
        self._socket.listen()
        threading.Thread(target=self._accept, name="everstep-requests", daemon=True).start()

    def close(self) -> None:
        """In a forked process: the one before answers alone."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            self._turns.acquire()
            try:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), name="everstep-request", daemon=True).start()
            except (OSError, RuntimeError) as e:  # no more files, or threads
                log.warning("`everstep profile` and `everstep stacks` cannot reach this process any longer: %s", e)
                self._socket.close()
                return

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, ValueError, AttributeError):  # the asker has gone, or errs
                if not agent_requests.is_of_this_user(connection):
                    return
                connection.settimeout(agent_requests.REQUEST_SECONDS)
                with connection.makefile("rwb") as lines:
                    request = json.loads(lines.readline(agent_requests.MAX_REQUEST))
                    if request.get("job") is not None and request["job"] not in self._jobs:
                        return
                    if request.get("names"):
                        lines.write(json.dumps({"job": self._job, "answers": [self._known()]}).encode() + b"\n")
                        lines.flush()
                    answer = self._known() | self._answer(request)
                    lines.write(json.dumps(answer).encode() + b"\n")
                # A loader's worker that was forked meanwhile has the connection too, and would keep it open.
                connection.shutdown(socket.SHUT_RDWR)
        finally:
            self._turns.release()

    def _known(self) -> Answer:
        known: Answer = {"pid": os.getpid(), "pod": self._environ.get(env.POD_NAME, "")}
        if (rank := self._environ.get("RANK", "")).isdigit():
            known["rank"] = int(rank)
        return known

    def _answer(self, request: Mapping[str, Any]) -> Answer:
        match request.get("verb"):
            case agent_requests.STACKS:
                return {"step": self.step(), "stacks": _stacks()}
            case agent_requests.PROFILE:
                return self._profile(request)
            case verb:
                return {"error": f"this process does not know {verb!r}; its version is older"}

    def _profile(self, request: Mapping[str, Any]) -> Answer:
        if error := agent_requests.refused_steps(request.get("steps")):
            return {"error": error}
        answered, result = threading.Event(), Answer()

        def answer(**fields: Any) -> None:
            result.update(fields)
            answered.set()

        self.live.ask(str(request.get("id", "profile"))[:100], request["steps"], answer)
        most = agent_requests.PROFILE_SECONDS
        if not answered.wait(min(most, float(request.get("seconds", most)))):
            return {"error": "the steps were not complete in time"}
        return result


def _stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(agent_requests.MAX_ANSWER // 4)


_listeners: list[Listener] = []  # one at most


def listen(live: LiveProfile, step: Callable[[], int | None], environ: Mapping[str, str] = os.environ) -> None:
    """Answer requests from now on. Where that is impossible, nobody can ask, and training goes on. A later call takes
    the place of the one before."""
    if _listeners:
        _listeners[0].live, _listeners[0].step = live, step
        return
    try:
        _listeners.append(Listener(live, step, environ))
    except OSError as e:
        log.warning("`everstep profile` and `everstep stacks` cannot reach this process: %s", e)


def _forked() -> None:
    while _listeners:
        _listeners.pop().close()


os.register_at_fork(after_in_child=_forked)
