"""How fast this process may send requests to a store that has asked for fewer.

Additive increase, multiplicative decrease, as TCP does it (Chiu and Jain 1989): many processes that share a bucket and
know nothing of each other come to equal shares of what it serves, and none of them is starved. A process that was
never told to slow down is not limited at all. Pure: the time is an argument; `pacer_for` holds the shared ones.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from everstep.contract.forks import ForkLock

FLOOR: Final = 1.0  # requests a second: below it, waiting costs more than another refusal
CEILING: Final = 200.0  # requests a second from which on the limit is lifted
INCREASE: Final = 4.0  # requests a second that are added for each second without a refusal
HOLD: Final = 1.0  # seconds in which several refusals count as one: they answer requests sent at the same rate
_WINDOW: Final = 2.0  # seconds over which the present rate is counted


class Pacer:
    """The rate of one store. All times are seconds of one monotonic clock; thread-safe."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._rate: float | None = None
        self._next = 0.0
        self._slowed = float("-inf")
        self._raised = 0.0
        self._sent: deque[float] = deque(maxlen=int(CEILING * _WINDOW))

    @property
    def rate(self) -> float | None:
        """Requests a second that are allowed now; None without a limit."""
        return self._rate

    def reserve(self, now: float) -> float:
        """Seconds to wait before the next request, whose turn this call takes."""
        with self._lock:
            at = now if self._rate is None else max(now, self._next)
            if self._rate is not None:
                self._next = at + 1 / self._rate
            self._sent.append(at)
            return at - now

    def throttled(self, now: float) -> None:
        """The store refused a request for being too many: half of the present rate from now on."""
        with self._lock:
            if now - self._slowed < HOLD:
                return
            present = self._rate if self._rate is not None else self._recent(now)
            self._rate = max(FLOOR, present / 2)
            self._slowed = self._raised = now

    def succeeded(self, now: float) -> None:
        """The store served a request."""
        with self._lock:
            if self._rate is None or now <= self._raised:
                return
            self._rate += INCREASE * min(1.0, now - self._raised)
            self._raised = now
            if self._rate > CEILING:
                self._rate = None

    def _recent(self, now: float) -> float:
        return sum(now - at < _WINDOW for at in self._sent) / _WINDOW


_shared: dict[str, Pacer] = {}
_lock = ForkLock()


def pacer_for(url: str) -> Pacer:
    """The pacer of the bucket (scheme and host) of a URL: one for all stores of this process that are below it."""
    scheme, _, rest = url.partition("://")
    with _lock:
        return _shared.setdefault(f"{scheme}://{rest.split('/', 1)[0]}", Pacer())
