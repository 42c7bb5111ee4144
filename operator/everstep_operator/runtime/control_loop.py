"""Workers that take keys from the queue and reconcile them, but only while this replica leads.

A term is one epoch of leadership. It begins with every known key on the queue, behind the keys with news. It ends by
cancelling all passes, because a pass that outlives its leadership must not write. Between terms no key is stored.
Passes are level-triggered, so cancelling one is harmless. An error affects only its own key. After a retryable error
the key is tried again with a back-off. After a terminal error it is tried again slowly, because its remedy (a quota, a
permission) sends no event. (Failure modes 24 and 39 in docs/operations/failure-modes.md.)

Order of shutdown: cancel `run` first and the elector after it, so that the Lease is released when nothing writes any
more.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from everstep_operator.errors import OperatorError, TerminalError
from everstep_operator.kube.errors import KubeError
from everstep_operator.runtime.clock import Clock, within
from everstep_operator.runtime.errors import NotLeading
from everstep_operator.runtime.queue import WorkQueue

K = TypeVar("K", bound=Hashable)

log = logging.getLogger(__name__)

TURNS_BETWEEN_PASSES = 10  # of the event loop: a renewal of the Lease takes about as many


@dataclass(frozen=True, slots=True)
class Result:
    """How a pass ended: in how many seconds the next one follows (None: only after an event), and what it waits for.
    `gone`: the key's object is gone, and the key is forgotten.
    """

    reason: str
    requeue_after: float | None = None
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Succeeded:
    result: Result


@dataclass(frozen=True, slots=True)
class WillRetry:
    error: Exception
    retry_in: float


@dataclass(frozen=True, slots=True)
class Blocked:
    """A terminal error, which a person has to remedy. The key is tried again on events and after `retry_in` seconds."""

    error: TerminalError
    retry_in: float


Outcome: TypeAlias = Succeeded | WillRetry | Blocked


class Elector(Protocol):
    """What the controller needs of an elector; see `leader.LeaderElector`."""

    async def wait_leading(self) -> int: ...

    async def wait_lost(self, epoch: int) -> str: ...


@dataclass(frozen=True, slots=True)
class ControllerLimits:
    """`workers` passes at a time: most of a pass is waiting for the API server. A pass takes at most `pass_seconds`."""

    workers: int = 32
    pass_seconds: float = 60.0
    terminal_retry: float = 60.0


class Controller(Generic[K]):
    """Drives `reconcile` for the keys of `queue`; `all_keys` names every key at the start of a term."""

    def __init__(
        self,
        name: str,
        reconcile: Callable[[K], Awaitable[Result]],
        queue: WorkQueue[K],
        *,
        leadership: Elector,
        all_keys: Callable[[], Iterable[K]],
        clock: Clock,
        limits: ControllerLimits = ControllerLimits(),
        on_outcome: Callable[[K, Outcome, float], None] | None = None,
    ) -> None:
        self._name = name
        self._reconcile = reconcile
        self._queue = queue
        self._leadership = leadership
        self._all_keys = all_keys
        self._clock = clock
        self._limits = limits
        self._on_outcome = on_outcome
        self._reasons: dict[K, str] = {}
        self._start = asyncio.Lock()

    async def run(self) -> None:
        """Lead whenever allowed, until cancelled."""
        while True:
            # A follower would otherwise collect the keys of all created and deleted objects while it follows.
            self._queue.pause()
            epoch = await self._leadership.wait_leading()
            self._queue.resume()
            self._reasons.clear()
            keys = list(self._all_keys())
            log.info("term begins", extra={"controller": self._name, "epoch": epoch, "keys": len(keys)})
            for key in keys:
                self._queue.add(key, routine=True)
            reason = await self._term(epoch)
            log.info("term ended", extra={"controller": self._name, "epoch": epoch, "reason": reason})

    async def _term(self, epoch: int) -> str:
        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(self._work()) for _ in range(self._limits.workers)]
            try:
                reason = await self._leadership.wait_lost(epoch)
            finally:
                for worker in workers:
                    worker.cancel()
        return reason

    async def _work(self) -> None:
        while True:
            # A plan of a large job takes many milliseconds of the event loop, which also renews the Lease. So several
            # turns of the loop lie between the beginnings of two passes.
            async with self._start:
                for _ in range(TURNS_BETWEEN_PASSES):
                    await asyncio.sleep(0)
                key = await self._queue.get()
            try:
                await self._pass(key)
            finally:
                self._queue.done(key)

    async def _pass(self, key: K) -> None:
        started = self._clock.monotonic()
        outcome: Outcome
        try:
            outcome = Succeeded(await within(self._clock, self._limits.pass_seconds, self._reconcile(key)))
        except NotLeading as error:
            # The term is ending. The next one starts with every key, so this key is not lost.
            log.info("pass cut", extra={"controller": self._name, "key": _text(key), "error": str(error)})
            return
        except TerminalError as error:
            outcome = Blocked(error, self._limits.terminal_retry)
        except Exception as error:
            wait = (error.retry_after or 0.0) if isinstance(error, KubeError) else 0.0
            outcome = WillRetry(error, self._queue.add_backoff(key, at_least=wait))
        self._conclude(key, outcome)
        if self._on_outcome is not None:
            self._on_outcome(key, outcome, self._clock.monotonic() - started)

    def _conclude(self, key: K, outcome: Outcome) -> None:
        match outcome:
            case Succeeded(result):
                self._queue.forget(key)
                if result.requeue_after is not None:
                    self._queue.add_after(key, result.requeue_after)
                self._log_reason(key, logging.INFO, "reconciled", result.reason, None)
                if result.gone:
                    self._reasons.pop(key, None)
            case WillRetry(error, delay):
                # An error from outside explains itself. Any other error is a bug of ours and needs its traceback.
                trace = None if isinstance(error, OperatorError | TimeoutError) else error
                self._log_reason(key, logging.WARNING, f"pass failed, again in {delay:.2f} s", repr(error), trace)
            case Blocked(error, delay):
                self._queue.add_after(key, delay)
                self._log_reason(key, logging.ERROR, f"pass refused, again in {delay:.0f} s", str(error), None)

    def _log_reason(self, key: K, level: int, message: str, reason: str, trace: Exception | None) -> None:
        # A reason is logged when it changes, however many passes repeat it.
        if self._reasons.get(key) == reason:
            return
        self._reasons[key] = reason
        extra = {"controller": self._name, "key": _text(key), "reason": reason}
        log.log(level, message, extra=extra, exc_info=trace)


def _text(key: object) -> str:
    """The key as kubectl writes it: namespace/name."""
    return "/".join(map(str, key)) if isinstance(key, tuple) else str(key)
