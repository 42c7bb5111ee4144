"""The side that asks: it finds the hub, works with it, and finds the next one where that is lost."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from everstep.roles import wire
from everstep.roles.directory import Address, Over, directory
from everstep.roles.errors import HubLost, RolesError

log = logging.getLogger("everstep.roles")

Ask = Callable[[Any], Any]

CONNECT_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between two looks for a hub
REMIND_SECONDS = 60.0  # from one log line about the same wait to the next


def follow(work: Callable[[Ask], None], *, url: str | os.PathLike[str] | None = None, name: str = "hub") -> None:
    """Call `work(ask)` with each connection to the job's hub; return when the hub says that its run is over.

    `ask(message)` returns the hub's reply. It raises `HubLost` when the connection has ended. `work` lets that pass.
    Then it is called again with a connection to the next hub; what it had not given yet is lost. If `work` returns, so
    does this function. Raises `RolesError` with the hub's words if its answer failed.
    """
    where = directory(url, name)
    pause, said, at = FIRST_PAUSE, "", 0.0
    while True:
        found = where.read()
        match found:
            case Over():
                return
            case None:
                why = f"no hub has begun: {where.place} does not exist"
            case Address():
                try:
                    with _connected(found) as connection:
                        said, pause = "", FIRST_PAUSE
                        work(lambda message: _ask(connection, message))
                    return
                except HubLost as e:
                    why = str(e)
        if why != said or time.monotonic() - at > REMIND_SECONDS:
            log.info("waiting for the next hub: %s", why)
            said, at = why, time.monotonic()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _connected(to: Address) -> socket.socket:
    try:
        connection = socket.create_connection((to.host, to.port), CONNECT_SECONDS)
        wire.prepare(connection)
        connection.sendall(to.token.encode())
        connection.settimeout(None)
    except OSError as e:
        raise HubLost(f"{to.host}:{to.port}: {e}") from e
    return connection


def _ask(connection: socket.socket, message: Any) -> Any:
    wire.send(connection, message)
    said = wire.receive(connection)
    if "error" in said:
        raise RolesError(f"the hub's answer failed: {said['error']}")
    return said["reply"]
