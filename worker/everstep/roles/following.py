"""The side that asks: it finds the hub, works with it, and finds the next one where that is lost."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from everstep.contract import env
from everstep.contract.addresses import host_and_port
from everstep.roles import wire
from everstep.roles.directory import Address, Directory, Over, directory
from everstep.roles.wire import HubLost, RolesError

# --- stopping
# What a follower does at SIGTERM: it stays while its hub may need it. If all processes of a job are told to stop at
# once, the hub ends its step, saves and leaves. It cannot end a step for which it waits for its followers, if those
# have ended at once. Invariant: the process ends by the signal, as it would have done, when the hub has left, or after
# half of the grace period: the hub needs the other half to save.


class Staying:
    """A context in which SIGTERM is put off. It works in the main thread, if the script has no handler of its own."""

    def __init__(self) -> None:
        self._seconds = env.grace_seconds(os.environ) / 2
        self._pid = os.getpid()
        self._timer: threading.Timer | None = None
        self._installed = False

    def __enter__(self) -> Staying:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()  # the script ends, or goes on without a hub
        if self._installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def hub_left(self) -> None:
        """End this process, if it was asked to stop."""
        if self._timer is not None:
            os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != self._pid:  # a process that was forked meanwhile, such as a DataLoader's worker
            os.kill(os.getpid(), number)
            return
        self._timer = threading.Timer(self._seconds, os.kill, (self._pid, number))
        self._timer.daemon = True
        self._timer.start()


# --- following

log = logging.getLogger("everstep.roles")

Ask = Callable[[Any], Any]

CONNECT_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between two looks for a hub
REMIND_SECONDS = 60.0  # from one log line about the same wait to the next


def follow(work: Callable[[Ask], None], *, url: str | os.PathLike[str] | None = None, name: str = "hub") -> None:
    """Call `work(ask)` with each connection to the job's hub; return when the hub says that its run is over.

    `ask(message)` returns the hub's reply. It raises `HubLost` when the connection has ended. `work` lets that pass.
    Then it is called again with a connection to the next hub; what it had not given yet is lost. If `work` returns, so
    does this function. At SIGTERM the process stays while the hub lives, for half of the grace period at most. Raises
    `RolesError` with the hub's words if its answer failed.
    """
    with Staying() as staying:
        _follow(work, directory(url, name), staying)


def _follow(work: Callable[[Ask], None], where: Directory, staying: Staying) -> None:
    pause, logged, at = FIRST_PAUSE, "", 0.0
    while True:
        address = where.read()
        match address:
            case Over():
                return
            case None:
                why = f"no hub has begun: {where.address} does not exist"
                staying.hub_left()
            case Address():
                asking: _Asking | None = None
                try:
                    with _connected(address) as connection:
                        asking = _Asking(connection)
                        work(asking.ask)
                    return
                except HubLost as e:
                    if asking is not None and not asking.over:
                        raise  # of another hub, which `work` asks too
                    why = str(e)
                staying.hub_left()
                if asking is not None and asking.answered:
                    logged, pause = "", FIRST_PAUSE
        if why != logged or time.monotonic() - at > REMIND_SECONDS:
            log.info("waiting for the next hub: %s", why)
            logged, at = why, time.monotonic()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _connected(to: Address) -> socket.socket:
    try:
        connection = socket.create_connection((to.host, to.port), CONNECT_SECONDS)
    except OSError as e:
        raise HubLost(f"{host_and_port(to.host, to.port)}: {e}") from e
    try:
        wire.prepare(connection)
        wire.greet(connection, to.token)
    except BaseException as e:
        connection.close()
        if isinstance(e, HubLost | OSError):
            raise HubLost(f"{host_and_port(to.host, to.port)}: {e}") from e
        raise
    return connection


class _Asking:
    """A connection on which one question at a time is asked. Invariant: a reply is that of the question before it; a
    connection on which a question was begun and not ended is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._turn = threading.Lock()
        self.answered = self.over = False

    def ask(self, message: Any) -> Any:
        data = wire.packed(message)
        with self._turn:
            if self.over:
                raise HubLost("the connection has ended")
            self.over = True  # if an error leaves the next lines, the reply may come when the next question is asked
            wire.send(self._connection, data)
            received = wire.received(self._connection)
            self.over, self.answered = False, True
        reply = wire.unpacked(received)
        if "error" in reply:
            failed = RolesError(f"the hub's answer failed: {reply['error']}")
            failed.may_pass()  # the error is the hub's, whatever it is
            raise failed
        return reply["reply"]
