"""The in-flight collectives of one group, and the answers for which the program waits in place of gloo's.

gloo may lose a collective without an error (see `recoverable`), so each one has an answer of our own. Invariant: an
answer ends once, with the collective's result or with `PeerLost`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from everstep.contract.calls import Call, Calls, line_of_script

DEVICE_WORKS = 256  # kept at most before finished ones are dropped


class PeerLost(RuntimeError):
    """A collective cannot end because a member of the round is gone. `run.steps` catches it and repeats the step."""


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether an error is a `PeerLost`, or came from one."""
    chain: list[BaseException] = [error]
    for link in chain:
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and not any(e is f for f in chain)]
    return any(isinstance(e, PeerLost) or _says_so(e) for e in chain)


def _says_so(error: BaseException) -> bool:
    """Whether the error's text is that of a `PeerLost`: an error that passes through C++ (DDP) keeps only its text."""
    return isinstance(error, RuntimeError) and PeerLost.__name__ in str(error)


class CollectiveWork(c10d.Work):
    """The work object that a collective returns. It ends when gloo's work does, or when the round is abandoned.
    `remedy`: what to write if a peer is lost, or ""."""

    def __init__(self, value: Any, check: Callable[[str], None] | None = None, remedy: str = "") -> None:
        super().__init__()
        self._remedy = remedy
        self._value = value
        self._check = check
        self.call = Call(0, "")
        self.work: Any = None  # gloo's
        self._error: PeerLost | None = None
        self._trigger: torch.futures.Future[None] = torch.futures.Future()
        # An error reaches waiters in C++ (DDP's reducer) only through a callback that raises.
        self._future = self._trigger.then(self._end)

    def finish(self, error: PeerLost | None) -> None:
        """End the answer, with an error or without. Called once."""
        if error is not None and self._remedy:
            error = PeerLost(f"{self._remedy} ({error})")
        self._error = error
        self._trigger.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective is over; `timeout` is ignored. Raises `PeerLost`. `check` raises if the collective
        may no longer be waited for."""
        if self._check is not None:
            self._check(self.call.what)
        try:
            self._future.wait()
        except RuntimeError:
            if self._error is None:
                raise
        if self._error is not None:
            raise PeerLost(*self._error.args)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._error is None

    def exception(self) -> PeerLost | None:
        return self._error

    def result(self) -> Any:
        return self._value

    def _source_rank(self) -> int:
        """The sender of a message received from any member, once it is over."""
        return int(self.work._source_rank())

    def synchronize(self) -> None:
        self.wait()

    def _end(self, _: torch.futures.Future[None]) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class CombinedWork(c10d.Work):
    """Several answers as one."""

    def __init__(self, answers: Sequence[Any]) -> None:
        super().__init__()
        self._answers = answers

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all are over. Raises `PeerLost`."""
        return all(answer.wait(timeout) for answer in self._answers)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([answer.get_future() for answer in self._answers])

    def is_completed(self) -> bool:
        return all(answer.is_completed() for answer in self._answers)

    def is_success(self) -> bool:
        return all(answer.is_success() for answer in self._answers)

    def exception(self) -> PeerLost | None:
        return next((e for answer in self._answers if (e := answer.exception()) is not None), None)

    def result(self) -> Any:
        return [answer.result() for answer in self._answers]

    def synchronize(self) -> None:
        self.wait()


class WaitingTime:
    """The time in which collectives were in flight, of all groups that share this object. Those of a mesh overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way, self._seconds, self._since = 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds in which at least one collective was in flight, not counting those of an accelerator."""
        with self._lock:
            return self._seconds + (time.monotonic() - self._since if self._under_way else 0.0)

    def begun(self) -> None:
        with self._lock:
            if not self._under_way:
                self._since = time.monotonic()
            self._under_way += 1

    def ended(self, count: int) -> None:
        with self._lock:
            self._under_way -= count
            if count and not self._under_way:
                self._seconds += time.monotonic() - self._since


class InFlightCollectives:
    """The collectives in flight of one group. It is separate from the group because gloo's threads hold references to
    it: a gloo group whose last reference is dropped in one of its own threads ends the process."""

    def __init__(self, on_lost: Callable[[str, int], None] | None, waiting: WaitingTime) -> None:
        self.lock = threading.Lock()
        self.lost: str | None = "no round has begun"
        self.lost_at = ""  # the script's place when a collective failed
        self.left: list[Any] = []
        self.failures = 0  # collectives that have ended with `PeerLost`
        self.calls = Calls()
        self._device: list[tuple[Call, Any]] = []  # NCCL's works, including finished ones
        self._pending: dict[CollectiveWork, None] = {}  # in the order of their beginning
        self._round = -1
        self._on_lost = on_lost
        self._waiting = waiting

    def waits_in(self) -> Call | None:
        """The oldest collective in flight."""
        device = self._on_device()
        with self.lock:
            calls = [call for call, _ in device] + [answer.call for answer in self._pending]
            return min(calls, key=lambda call: call.number, default=None)

    def _on_device(self) -> list[tuple[Call, Any]]:
        with self.lock:
            self._device = [(call, work) for call, work in self._device if not work.is_completed()]
            return list(self._device)

    def on_device(self) -> list[Any]:
        """The works of an accelerator that are not over."""
        return [work for _, work in self._on_device()]

    def begun_on_device(self, call: Call, work: Any) -> None:
        with self.lock:
            self._device.append((call, work))
            many = len(self._device) >= DEVICE_WORKS
        if many:
            self._on_device()

    def restart(self, round_: int) -> None:
        """The round with this number begins. Called under the lock."""
        self.lost, self.left, self._round = None, [], round_
        self.calls.restart()

    def begin(self, answer: CollectiveWork) -> None:
        """Register an answer before gloo begins its collective. Called under the lock."""
        self._pending[answer] = None
        self._waiting.begun()

    def begun(self, answer: CollectiveWork) -> None:
        """gloo has begun the collective, which may have been given up in between."""
        with self.lock:
            if answer not in self._pending:
                self.left.append(answer.work)

    def give_up(self, reason: str) -> None:
        """End every collective in flight."""
        with self.lock:
            pending = self._lose_pending(reason)
        for answer in pending:
            answer.finish(PeerLost(reason))

    def ended(self, answer: CollectiveWork, outcome: Callable[[], Any]) -> None:
        """Called in gloo's thread, or in one that waits for it, when gloo's work is over."""
        try:
            outcome()
        except RuntimeError as e:
            self.failed(answer, e)
            return
        with self.lock:
            mine = answer in self._pending
            self._pending.pop(answer, None)
        if mine:
            self._waiting.ended(1)
            answer.finish(None)

    def failed(self, answer: CollectiveWork, error: RuntimeError) -> None:
        """Give up all collectives: after an error gloo's connections are unusable, and other collectives may never
        end."""
        reason = str(error).split("\n", 1)[0][:300]
        with self.lock:
            if answer not in self._pending:
                return
            self.lost_at = line_of_script()
            pending = self._lose_pending(reason)
            round_ = self._round  # the next one may begin as soon as the program hears of this failure
        for other in pending:
            other.finish(PeerLost(reason))
        if self._on_lost is not None:
            self._on_lost(reason, round_)

    def _lose_pending(self, reason: str) -> list[CollectiveWork]:
        self.lost = self.lost or reason
        pending, self._pending = list(self._pending), {}
        self.failures += len(pending)
        self._waiting.ended(len(pending))
        self.left += [answer.work for answer in pending if answer.work is not None]
        return pending
