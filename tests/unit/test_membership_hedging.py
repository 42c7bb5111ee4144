"""What a call does while its answer does not come."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from everstep.membership.backends.hedging import (
    LOOK_AGAIN,
    LOOK_HANDSHAKE,
    LOOKS,
    UNANSWERED,
    handshake_seconds,
    wait_for_answer,
)


def test_answer_that_comes_soon_causes_no_look() -> None:
    near, far = socket.socketpair()
    with near, far:
        threading.Timer(UNANSWERED / 4, far.send, (b"HTTP/1.1 204",)).start()
        wait_for_answer(near, 5.0, lambda: pytest.fail("it looked for another leader"))
        assert near.recv(4) == b"HTTP", "nothing of the answer is taken away"


def test_call_ends_as_soon_as_another_replica_leads() -> None:
    near, far = socket.socketpair()
    with near, far:
        looks = iter([False, True])
        began = time.monotonic()
        with pytest.raises(ConnectionAbortedError, match="another replica"):
            wait_for_answer(near, 30.0, lambda: next(looks))
        assert time.monotonic() - began >= UNANSWERED + LOOK_AGAIN


def test_looks_that_nobody_answers_are_few_and_end_with_the_call() -> None:
    """As with one replica, which is slow: each look would cost it a connection."""
    near, far = socket.socketpair()
    looks: list[float] = []
    with near, far, pytest.raises(TimeoutError, match="no answer in 4 s"):
        wait_for_answer(near, 4.0, lambda: looks.append(time.monotonic()))
    assert LOOKS < len(looks) <= 3 * LOOKS, "at once, after 0.3 s and after 1.2 s"


@pytest.mark.parametrize("answers", [True, False])
def test_look_that_reaches_the_frozen_replica_delays_none_that_reaches_the_other(answers: bool) -> None:
    """Half of the connections to a Service with two replicas reach the frozen one. Five in a row did, one after the
    other, and a healthy agent was missed by the new leader."""
    near, far = socket.socketpair()
    over, looks = threading.Event(), []

    def look() -> bool | None:
        looks.append(time.monotonic())
        if len(looks) < LOOKS:
            over.wait(30)
            return None
        return answers

    with near, far:
        began = time.monotonic()
        if answers:
            with pytest.raises(ConnectionAbortedError, match="another replica"):
                wait_for_answer(near, 30.0, look)
        else:
            with pytest.raises(TimeoutError):
                wait_for_answer(near, UNANSWERED + LOOK_AGAIN, look)
            assert len(looks) == LOOKS, "an answer is not followed by a look at once"
        assert time.monotonic() - began < 10
        assert looks[-1] - looks[0] < 5, "none waited for the one before"
        over.set()


def test_answer_is_not_left_lying_because_a_look_is_under_way() -> None:
    """With TLS a look waited for the handshake of a frozen replica, and a healthy agent's presence expired."""
    near, far = socket.socketpair()
    over, usual = threading.Event(), []

    def look() -> bool:
        usual.append(handshake_seconds(3.0))
        far.send(b"HTTP/1.1 204")
        return over.wait(30)

    with near, far:
        wait_for_answer(near, 30.0, look)
        assert near.recv(4) == b"HTTP"
        assert not over.is_set()
        over.set()
    assert usual == [LOOK_HANDSHAKE]
    assert handshake_seconds(3.0) == 3.0, "of a call that is no look"
