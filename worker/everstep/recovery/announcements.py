"""Receives announcements of rounds from the agent, and reports this process's state to it.

The agent knows the members first: it supervises the processes and watches the round store. A round reaches the process
as one message. The process tells the agent when it is ready for a round, and when it sees a round break. Messages are
JSON lines over a Unix socket whose path is in the environment. Invariant: round numbers only grow.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from everstep.contract import env
from everstep.contract.calls import Call, StepStatus, rows

MAX_LINE = 64 * 1024


@dataclass(frozen=True, slots=True)
class AnnouncedRound:
    """A world on which the agents agreed. `store`: host and port of a TCPStore that only this round uses. `rendezvous`:
    the document that numbers the rounds, if no operator does. `environment`: the variables for a rank's place in the
    world, as a launcher sets them."""

    number: int
    rank: int
    world_size: int
    store: tuple[str, int]
    rendezvous: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


class RoundsOver(RuntimeError):
    """No further round will come: the agent is gone, or says so, or none came in time."""


class Drained(RuntimeError):
    """The others go into the next round without this process, because its agent was asked to stop."""


# The id of a request, its number of steps, and what takes the answer's fields.
Profile = Callable[[str, int, Callable[..., None]], None]


class Announcements:
    """Announcements from the agent's socket. `recovers`: without it the process hears requests alone, and the agent
    starts it anew when a peer is lost."""

    def __init__(self, path: str, *, recovers: bool = True) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._newest: AnnouncedRound | None = None
        self._over: str | None = None
        self._dismissed = False
        self._call: Callable[[AnnouncedRound, bool], None] | None = None
        self._step_status: Callable[[], StepStatus] | None = None
        self._gone: Callable[[str], None] | None = None
        self._profile: Profile | None = None
        self._tell(kind="hello" if recovers else "listens", pid=os.getpid())
        self._pid = os.getpid()
        threading.Thread(target=self._listen, name="everstep-rounds", daemon=True).start()
        _Process.announcements = self
        atexit.register(self._ended)

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> Announcements | None:
        """The announcements of the agent that the environment names; None if it names none."""
        path = environ.get(env.AGENT_SOCKET)
        return cls(path) if path else None

    @property
    def drained(self) -> bool:
        """Whether this process must end when the others go into the next round."""
        return self._dismissed

    def newest(self) -> AnnouncedRound | None:
        """The newest round that was announced."""
        return self._newest

    def wait_newer(self, than: int, seconds: float) -> AnnouncedRound:
        """A round with a number above `than`. Raises `RoundsOver`, `Drained`."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._dismissed or self._over is not None or self._above(than) is not None, seconds
            )
            if self._dismissed:
                raise Drained(f"the others go on after round {than}")
            newest = self._above(than)
            if newest is None:
                raise RoundsOver(self._over if came and self._over else f"no round above {than} within {seconds:g} s")
            return newest

    def on_round(self, call: Callable[[AnnouncedRound, bool], None]) -> None:
        """Call this, in another thread, for each round. The second argument says whether the members of the round
        before still work together, so that they can change rounds at the end of a step."""
        self._call = call

    def ready(self) -> None:
        """Tell the agent that this process can join a round now."""
        self._tell(kind="ready")

    def coming(self, number: int) -> None:
        """Tell the agent that this process has stopped training, and waits for the round's other members."""
        self._tell(kind="coming", round=number)

    def broken(self, number: int, reason: str, recent: tuple[Call, ...] = (), at: str = "") -> None:
        """Tell the agent that a collective of the round failed here. `recent`: the program's newest collectives. `at`:
        its place in the script."""
        self._tell(kind="broken", round=number, reason=reason[:500], recent=rows(recent), at=at[:200])

    def joined(self, number: int, step: int, formed: float, synced: float, how: str) -> None:
        """Tell the agent that this process trains in the round, after `step` completed steps. `formed` and `synced`:
        seconds until its members had met, and until they had one state. `how`: where that state came from, if it was
        sent."""
        self._tell(kind="joined", round=number, step=step, formed=formed, settled=synced, how=how[:200])

    def _ended(self) -> None:
        if os.getpid() == self._pid:  # a forked child has the functions of atexit too, and ends by itself
            self._tell(kind="ended")

    def on_step_status(self, call: Callable[[], StepStatus]) -> None:
        """Call this, in another thread, when the agent asks where the process is."""
        self._step_status = call

    def on_over(self, call: Callable[[str], None]) -> None:
        """Call this, in another thread, with the reason once there is no further round for this process."""
        self._gone = call

    def on_profile(self, call: Profile) -> None:
        """Call this, in another thread, when a person asks for a profile."""
        self._profile = call

    def _above(self, number: int) -> AnnouncedRound | None:
        return self._newest if self._newest is not None and self._newest.number > number else None

    def _tell(self, **message: Any) -> None:
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as e:
            self._end(f"the agent is gone ({e})")

    def _listen(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                while line := lines.readline(MAX_LINE):
                    self._hear(json.loads(line))
            self._end("the agent is gone")
        except (OSError, ValueError, KeyError, TypeError) as e:
            self._end(f"the agent said what cannot be read ({e})")

    def _hear(self, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case "round":
                host, port = message["store"]
                rendezvous = message.get("rendezvous", "")
                variables = {str(k): str(v) for k, v in message.get("environment", {}).items()}
                announced = AnnouncedRound(
                    message["round"], message["rank"], message["world_size"], (host, port), rendezvous, variables
                )
                with self._changed:
                    if self._newest is not None and announced.number <= self._newest.number:
                        return
                    self._newest = announced
                    self._changed.notify_all()
                if self._call is not None:
                    self._call(announced, bool(message.get("whole")))
            case "where":
                if self._step_status is not None:
                    self._tell(kind="where", **self._step_status().fields())
            case "profile":
                answer = partial(self._tell, kind="profiled", id=str(message["id"]))
                if self._profile is not None:
                    self._profile(str(message["id"]), int(message["steps"]), answer)
                else:  # the person would wait until the time that they gave is up
                    answer(error="this process has not begun to train yet; ask again when the job reports steps")
            case "leave":
                with self._changed:
                    self._dismissed = True
                    self._changed.notify_all()
            case "stacks":
                # This holds the interpreter's lock, so no thread changes its stack meanwhile.
                with open(message["path"], "a") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
            case "over":
                self._end(str(message.get("reason", "the agent says so")))
            case _:
                pass  # a message of a newer agent

    def _end(self, reason: str) -> None:
        with self._changed:
            first, self._over = self._over is None, self._over or reason
            self._changed.notify_all()
        if first and self._gone is not None:
            self._gone(reason)


class _Process:
    """Of this process."""

    announcements: Announcements | None = None


def run_complete() -> None:
    """Tell the agent that a run of this process is complete. Without it, exit code 0 of a process that does not end in
    order, by `os._exit(0)`, is a failure: steps since the last commit would be lost as if they had been saved."""
    if (announcements := _Process.announcements) is not None:
        announcements._ended()
