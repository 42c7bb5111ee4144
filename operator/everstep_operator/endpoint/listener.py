"""Accepts connections, and closes at once those that the connection limits refuse.

asyncio makes a transport, a task and a protocol for each connection before it can be refused. That takes 0.1 ms of the
event loop, and objects in a cycle for the garbage collector (30 ms a few thousand connections later). Here a refused
connection costs `accept` and `close`, some 20 µs. Knows no protocol. Invariants: one turn of the event loop accepts a
bounded number, so that open connections are answered in between; a process without free file descriptors goes on
serving those that it has.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import struct

from everstep_operator.endpoint.connection_limits import Connection, ConnectionLimits

log = logging.getLogger("everstep.listener")

# In one turn of the event loop: an accepted connection costs as much as several refused ones.
MAX_ACCEPTED, MAX_REFUSED = 4, 32
RETRY = 1.0  # seconds until the next attempt if the process or the kernel has no resources for another connection
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Close with a reset: then the kernel keeps no state of the connection. After a normal close it would for a minute.
RESET = struct.pack("ii", 1, 0)


class Listener:
    """Listens from `open()` to `close()`."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int, backlog: int) -> int:
        """Listen at each address of `host`; gives the first one's port. `backlog` connections may wait to be accepted.

        Raises OSError when an address is taken or is not this machine's.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, *_, address in dict.fromkeys(found):
                listening = socket.create_server(address[:2], family=family, backlog=backlog)
                self._listening.append(listening)
                listening.setblocking(False)
                loop.add_reader(listening, self._accept, listening)
        except BaseException:
            self.close()
            raise
        return int(self._listening[0].getsockname()[1])

    def close(self) -> None:
        """Accept nothing more. Connections stay."""
        loop = asyncio.get_running_loop()
        for listening in self._listening:
            loop.remove_reader(listening)
            listening.close()
        self._listening.clear()

    def _accept(self, listening: socket.socket) -> None:
        served = refused = 0
        while served < MAX_ACCEPTED and refused < MAX_REFUSED:
            try:
                guest, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                if e.errno not in EXHAUSTED:
                    raise
                self._pause(listening, e)
                return
            connection = self._limits.connect(str(address[0]) if isinstance(address, tuple) else "")
            if connection is None:
                refused += 1
                guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                guest.close()
                continue
            served += 1
            guest.setblocking(False)
            task = asyncio.ensure_future(self._serve(guest, connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _serve(guest: socket.socket, connection: Connection) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, guest)
        except BaseException as e:
            guest.close()
            connection.release()
            if not isinstance(e, OSError):  # an OSError: the client has gone again
                raise

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Stop listening for a moment: the kernel would report the waiting connection again and again."""
        log.warning("no connection can be accepted", extra={"reason": str(error), "seconds": RETRY})
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)

        def resume() -> None:
            if listening in self._listening:
                loop.add_reader(listening, self._accept, listening)

        loop.call_later(RETRY, resume)
