"""While a call waits for a leader that does not answer, looks whether another replica leads by now.

The kernel of a frozen machine accepts connections and acknowledges requests, so a call to a frozen leader ends only at
its timeout. That is too late for an agent that has to announce itself to the next leader within a lease. But a slow
answer must not be given up: a busy leader would get every call twice. So the first call goes on, and meanwhile a thread
sends it to the configured address too. Of that answer only the name of the leader counts. Renewals are made so, because
they are small, may be sent twice, and are made all the time. Invariant: as long as no other replica is named, a call
ends as it would have ended, and as soon: an answer is not left lying because a look is under way.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

# Seconds before the first look. No other replica leads sooner, and a leader that pauses for so long gets no call twice.
UNANSWERED = 2.2
LOOK_SECONDS = 0.3  # for its answer: a replica that only follows has it at once
LOOK_HANDSHAKE = 0.6  # seconds for each answer of TLS before it
LOOK_AGAIN = 0.5  # seconds between two looks that were answered
# Unanswered ones in a row that are repeated at once: of two replicas behind an address one may be frozen.
FREE_LOOKS = 3
MOST_PAUSE = 4.0  # seconds between later ones

Socket: TypeAlias = socket.socket
# What a thread does while its request is not answered.
_meanwhile = threading.local()
# Whether this thread only looks.
_look = threading.local()


@contextlib.contextmanager
def meanwhile(work: Callable[[Socket], None] | None) -> Iterator[None]:
    """`work` gets the connection of each request that this thread makes in the block, before its answer is read."""
    before = getattr(_meanwhile, "work", None)
    _meanwhile.work = work
    try:
        yield
    finally:
        _meanwhile.work = before


def handshake_seconds(usual: float) -> float:
    """For each answer of TLS, if a call may wait `usual` seconds for it: of two replicas the look may have reached the
    frozen one, and is to try again soon."""
    return LOOK_HANDSHAKE if getattr(_look, "on", False) else usual


class AnsweredLater:
    """A base beside one of urllib3's classes of connections: does what `meanwhile` says before an answer is read."""

    def getresponse(self) -> Any:
        work, mine = getattr(_meanwhile, "work", None), self
        if work is not None:
            work(mine.sock)  # type: ignore[attr-defined]
        return super().getresponse()  # type: ignore[misc]


def wait_for_answer(sock: Socket, seconds: float, look: Callable[[], bool | None]) -> None:
    """Wait for the answer's first byte. `look` gives True if another replica leads, False if not, None if it was not
    answered. It runs in a thread. Raises TimeoutError, ConnectionAbortedError if another leads."""
    deadline = time.monotonic() + seconds
    unanswered, pause = 0, UNANSWERED
    while not _is_readable(sock, min(pause, deadline - time.monotonic())):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no answer in {seconds:g} s")
        ended, results = _begin(look)
        with ended:
            _is_readable(sock, deadline - time.monotonic(), ended)
        match results[-1:]:
            case [True]:
                raise ConnectionAbortedError("another replica of the operator leads by now")
            case [False]:
                unanswered, pause = 0, LOOK_AGAIN
            case [None]:
                unanswered += 1
                pause = min(MOST_PAUSE, LOOK_SECONDS * 2.0 ** (unanswered - FREE_LOOKS)) * (unanswered > FREE_LOOKS)
            case _:
                pause = 0.0  # the answer is there, or the time is over


def _begin(look: Callable[[], bool | None]) -> tuple[Socket, list[bool | None]]:
    """Begin a look. The socket can be read when it has ended, and the list has its result then."""
    ended, its_end = socket.socketpair()
    results: list[bool | None] = []

    def run() -> None:
        _look.on = True
        with its_end:
            results.append(look())

    threading.Thread(target=run, name="everstep-look", daemon=True).start()
    return ended, results


def _is_readable(sock: Socket, seconds: float, *others: Socket) -> bool:
    """Whether one of them can be read within that time."""
    if getattr(sock, "pending", int)():  # of TLS: it is decrypted already
        return True
    poll = select.poll()
    for each in (sock, *others):
        poll.register(each, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1e3))
