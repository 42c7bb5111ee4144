"""Which round there is, as the agent of this process says.

The agent knows the members first: it supervises the processes and watches the round store. A round reaches the process
as one message; the process answers when it is ready for one, and when it sees a round break. JSON lines over a Unix
socket whose path is in the environment. Invariant: round numbers only grow; an older one is never seen again.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from everstep.contract import env
from everstep.contract.calls import Call, row, rows

MAX_LINE = 64 * 1024


@dataclass(frozen=True, slots=True)
class AnnouncedRound:
    """A world that was agreed on. `store`: host and port of a TCPStore that is this round's alone. `rendezvous`: what
    counts the rounds, if no operator does. `environment`: variables by which a script knows its place in it, as a
    launcher sets them."""

    number: int
    rank: int
    world_size: int
    store: tuple[str, int]
    rendezvous: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepStatus:
    """The step that the process is in (None: between two), whether a collective waits for others, and seconds of the
    slowest recent step. `call`: the collective of the program's that waits; `recent`: its newest, oldest first."""

    step: int | None
    waits: bool
    slowest: float
    call: Call | None = None
    recent: tuple[Call, ...] = ()


class RoundsOver(RuntimeError):
    """There will be no further round: the agent is gone, or says so, or none came in time."""


class Drained(RuntimeError):
    """The others go into the next round without this process, whose agent was asked to stop."""


class Announcements(Protocol):
    """Where rounds come from."""

    @property
    def drained(self) -> bool:
        """Whether this process is to end where the others go into the next round."""
        ...

    def newest(self) -> AnnouncedRound | None:
        """The newest round that was announced."""
        ...

    def wait_newer(self, than: int, seconds: float) -> AnnouncedRound:
        """A round with a number above `than`. Raises `RoundsOver`, `Drained`."""
        ...

    def on_round(self, call: Callable[[AnnouncedRound, bool], None]) -> None:
        """Call, in another thread, for each round: with whether the members of the one before still work together, so
        that it can be left at a step boundary."""
        ...

    def ready(self) -> None:
        """This process can join a round now."""
        ...

    def coming(self, number: int) -> None:
        """This process has left what it did, and waits for the round's other members."""
        ...

    def broken(self, number: int, reason: str, recent: tuple[Call, ...] = (), at: str = "") -> None:
        """A collective of the round failed here; the newest collectives of the program, and where it was."""
        ...

    def joined(self, number: int, step: int, formed: float, settled: float, how: str) -> None:
        """This process trains in the round, after `step` completed steps. Seconds until its members had met and until
        they were at one state, and where that state came from, if it was sent."""
        ...

    def on_step_status(self, call: Callable[[], StepStatus]) -> None:
        """Ask this, in another thread, when the agent wants to know where the process is."""
        ...

    def on_over(self, call: Callable[[str], None]) -> None:
        """Call this, in another thread, with the reason once there is no further round for this process."""
        ...


class AgentAnnouncements:
    """Announcements from the agent's socket."""

    def __init__(self, path: str) -> None:
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
        self._tell(kind="hello", pid=os.getpid())
        threading.Thread(target=self._listen, name="everstep-rounds", daemon=True).start()

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> AgentAnnouncements | None:
        """By the environment; None without an agent that announces rounds."""
        path = environ.get(env.AGENT_SOCKET)
        return cls(path) if path else None

    @property
    def drained(self) -> bool:
        return self._dismissed

    def newest(self) -> AnnouncedRound | None:
        return self._newest

    def wait_newer(self, than: int, seconds: float) -> AnnouncedRound:
        with self._changed:
            found = self._changed.wait_for(
                lambda: self._dismissed or self._over is not None or self._above(than) is not None, seconds
            )
            if self._dismissed:
                raise Drained(f"the others go on after round {than}")
            newest = self._above(than)
            if newest is None:
                raise RoundsOver(self._over if found and self._over else f"no round above {than} within {seconds:g} s")
            return newest

    def on_round(self, call: Callable[[AnnouncedRound, bool], None]) -> None:
        self._call = call

    def ready(self) -> None:
        self._tell(kind="ready")

    def coming(self, number: int) -> None:
        self._tell(kind="coming", round=number)

    def broken(self, number: int, reason: str, recent: tuple[Call, ...] = (), at: str = "") -> None:
        self._tell(kind="broken", round=number, reason=reason[:500], recent=rows(recent), at=at[:200])

    def joined(self, number: int, step: int, formed: float, settled: float, how: str) -> None:
        self._tell(kind="joined", round=number, step=step, formed=formed, settled=settled, how=how[:200])

    def on_step_status(self, call: Callable[[], StepStatus]) -> None:
        self._step_status = call

    def on_over(self, call: Callable[[str], None]) -> None:
        self._gone = call

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
                found = AnnouncedRound(
                    message["round"], message["rank"], message["world_size"], (host, port), rendezvous, variables
                )
                with self._changed:
                    if self._newest is not None and found.number <= self._newest.number:
                        return
                    self._newest = found
                    self._changed.notify_all()
                if self._call is not None:
                    self._call(found, bool(message.get("whole")))
            case "where":
                if self._step_status is not None:
                    self._tell(kind="where", **_fields(self._step_status()))
            case "leave":
                with self._changed:
                    self._dismissed = True
                    self._changed.notify_all()
            case "stacks":
                # With the interpreter's lock, so that no thread changes its stack meanwhile.
                with open(message["path"], "a") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
            case "over":
                self._end(str(message.get("reason", "the agent says so")))
            case _:
                pass  # of a newer agent

    def _end(self, reason: str) -> None:
        with self._changed:
            first, self._over = self._over is None, self._over or reason
            self._changed.notify_all()
        if first and self._gone is not None:
            self._gone(reason)


def _fields(status: StepStatus) -> dict[str, Any]:
    calls = {"call": row(status.call), "recent": rows(status.recent)}
    return {"step": status.step, "waits": status.waits, "slowest": status.slowest, **calls}
