"""The process that others ask: it listens, says where, and answers each peer in a thread of its own.

Invariants: `left` is called once for each peer that was answered, after its last answer; peers are numbered from 0 in
the order in which they come, and no number is used twice.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from everstep.contract.addresses import loopback
from everstep.roles import wire
from everstep.roles.directory import LOCAL_ADDRESS, Address, Over, directory
from everstep.roles.wire import HubLost

log = logging.getLogger("everstep.roles")

MAX_PEERS = 4096  # connections at one time
RETRY_SECONDS = 0.5  # after which a hub without free file descriptors or threads looks for the next peer


class Hub:
    """Answers the processes of a job that `follow` it, until the end of its `with` block.

    `answer(peer, message)` returns the reply. It is called in a thread of the peer's own, and may wait; the peer waits
    meanwhile. Messages and replies are trees of tensors, numbers and texts. A reply is read after `answer` has
    returned: it holds copies of what a step changes. An error in it ends the peer, by name.
    `left(peer)` is called when the peer's connection has ended: its process died, or its machine was silent for 20
    seconds. `url`: where the address is kept (default: `EVERSTEP_CHECKPOINT_URL`). `name`: of several hubs in a job.
    `host`: the address to listen on (default: the pod's, else the loopback).

    If the block ends without an error, the run is over, and followers end. Else they look for the next hub.
    """

    def __init__(
        self,
        answer: Callable[[int, Any], Any],
        left: Callable[[int], None] | None = None,
        *,
        url: str | os.PathLike[str] | None = None,
        name: str = "hub",
        host: str | None = None,
    ) -> None:
        self._answer, self._left = answer, left
        self._directory = directory(url, name)
        self._token = secrets.token_hex(16)
        self._numbers = itertools.count()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._host = host or os.environ.get(LOCAL_ADDRESS) or loopback()

    def __enter__(self) -> Hub:
        family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]  # a pod may have IPv6 alone
        self._listener = socket.create_server((self._host, 0), family=family)
        threading.Thread(target=self._accept, name="everstep-hub", daemon=True).start()
        port: int = self._listener.getsockname()[1]
        self._directory.write(Address(self._host, port, self._token))
        log.info("hub listens on %s:%d, as %s says", self._host, port, self._directory.address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._directory.write(Over())  # before connections end: followers look here then
        with self._lock:
            self._closed = True
            still = list(self._open)
        for connection in (self._listener, *still):
            _end(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as e:
                if self._closed:
                    return
                log.warning("the hub cannot take a new peer now: %s", e)  # such as: too many open files
                time.sleep(RETRY_SECONDS)
                continue
            with self._lock:
                takes = not self._closed and len(self._open) < MAX_PEERS
                if takes:
                    self._open.add(connection)
            if not takes:
                _end(connection)
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="everstep-peer", daemon=True).start()
            except RuntimeError as e:  # no more threads
                log.warning("the hub cannot take a new peer now: %s", e)
                with self._lock:
                    self._open.discard(connection)
                _end(connection)

    def _serve(self, connection: socket.socket) -> None:
        peer: int | None = None
        try:
            wire.prepare(connection)
            if not wire.admits(connection, self._token):
                return
            while True:
                data = wire.received(connection)
                try:
                    message = wire.unpacked(data)
                    peer = next(self._numbers) if peer is None else peer
                    reply = wire.packed({"reply": self._answer(peer, message)})
                except HubLost:
                    raise
                except Exception as e:
                    log.exception("the hub's answer to peer %s failed; that process ends", peer)
                    reply = wire.packed({"error": f"{type(e).__name__}: {e}"})
                wire.send(connection, reply)
        except HubLost as e:
            log.debug("peer %s: %s", peer, e)
        finally:
            with self._lock:
                self._open.discard(connection)
            _end(connection)
            if peer is not None and self._left is not None and not self._closed:
                try:
                    self._left(peer)
                except Exception:
                    log.exception("left(%d) failed: what that peer had may be handed out to nobody", peer)


def _end(connection: socket.socket) -> None:
    """A thread that waits in it wakes up."""
    with contextlib.suppress(OSError):  # the other side was first
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
