"""While a call waits for a leader that does not answer, looks whether another replica leads by now.

The kernel of a frozen machine accepts connections and acknowledges requests, so a call to a frozen leader ends only at
its timeout. That is too late for an agent that has to announce itself to the next leader within a lease. But a slow
answer must not be given up: a busy leader would get every call twice. So the first call goes on, and meanwhile a thread
sends it to the configured address too. Of that answer only the name of the leader counts. Of two replicas behind that
address one is frozen, and half of the attempts reach it: so several are made, each while the one before is not
answered. Renewals are made so, because they are small, may be sent twice, and are made all the time. Invariant: as long
as no other replica is named, a call ends as it would have ended, and as soon: an answer is not left lying because a
look is under way.
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
LOOKS = 4  # at once, if nobody answers: of 16 agents one reaches the frozen one of two replicas by all of them
LOOK_SPACING = 0.08  # seconds between these
LOOK_AGAIN = 0.5  # seconds after one that was answered
PAUSE, MOST_PAUSE = 0.3, 4.0  # seconds after all were not answered; four times as long after each further time

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
    answered. It runs in threads. Raises TimeoutError, ConnectionAbortedError if another leads."""
    deadline = time.monotonic() + seconds
    pause, after_silence = UNANSWERED, PAUSE
    while not _is_readable(sock, min(pause, deadline - time.monotonic())):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no answer in {seconds:g} s")
        match _look_around(sock, deadline, look):
            case True:
                raise ConnectionAbortedError("another replica of the operator leads by now")
            case False:
                pause, after_silence = LOOK_AGAIN, PAUSE
            case None:
                pause, after_silence = after_silence, min(MOST_PAUSE, 4 * after_silence)


def _look_around(sock: Socket, deadline: float, look: Callable[[], bool | None]) -> bool | None:
    """The result of the first look that is answered. None if none is, if the answer itself has come, or if the time is
    over."""
    begun: list[tuple[Socket, list[bool | None]]] = []
    next_at = time.monotonic()
    with contextlib.ExitStack() as stack:
        while not _is_readable(sock, 0.0) and (now := time.monotonic()) < deadline:
            answers = [result for _, results in begun for result in results if result is not None]
            if answers:
                return any(answers)
            under_way = [ended for ended, results in begun if not results]
            if len(begun) < LOOKS and now >= next_at:
                begun.append(_begin(look))
                stack.enter_context(begun[-1][0])
                next_at = now + LOOK_SPACING
            elif under_way or len(begun) < LOOKS:
                until = next_at if len(begun) < LOOKS else deadline
                _is_readable(sock, min(until, deadline) - now, *under_way)
            else:
                break
    return None


def _begin(look: Callable[[], bool | None]) -> tuple[Socket, list[bool | None]]:
    """Begin a look. The socket can be read when it has ended, and the list has its result then."""
    ended, its_end = socket.socketpair()
    results: list[bool | None] = []

    def run() -> None:
        _look.on = True
        result = None
        with its_end:
            try:
                result = look()
            finally:
                results.append(result)

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
