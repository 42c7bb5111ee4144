"""Detects that no replica leads, and reports it.

While nobody leads, running jobs go on and nothing is repaired: a lost worker is not replaced, and a suspend has no
effect. From outside, every wait for the leader looks the same. So after some seconds the log, a metric, the answers to
agents and, in local mode, the answers to a person name the cause. This module decides nothing.
"""

import logging
from typing import Protocol

from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.leader import Following, Leadership

log = logging.getLogger(__name__)

NOTICE = 10.0  # seconds without a leader: a fail-over takes less
LOOK = 1.0  # seconds


class Elector(Protocol):
    """What this module needs of a `leader.LeaderElector`."""

    def state(self) -> Leadership: ...

    def is_led(self) -> bool: ...


class Leaderless:
    """For how long this replica has seen nobody lead. `run` it in a task."""

    def __init__(self, elector: Elector, clock: Clock) -> None:
        self._elector, self._clock = elector, clock
        self._since = clock.monotonic()  # when a leader was seen last
        self._warned = False

    def seconds(self) -> float:
        """0 while somebody leads."""
        if self._elector.is_led():
            self._since = self._clock.monotonic()
            return 0.0
        return self._clock.monotonic() - self._since

    def notice(self) -> str | None:
        """The text for everybody who waits for the leader; None if a replica leads, or led a moment ago."""
        seconds = self.seconds()
        if seconds < NOTICE:
            return None
        state = self._elector.state()
        why = f": {state.reason}" if isinstance(state, Following) and state.reason else ""
        return f"no operator has led for {seconds:.0f} s{why}"

    async def run(self) -> None:
        """Log it once each time, until cancelled."""
        while True:
            if (notice := self.notice()) is not None and not self._warned:
                self._warned = True
                log.warning("nobody leads: running jobs go on, nothing is repaired", extra={"reason": notice})
            elif notice is None and self._warned:
                self._warned = False
                log.info("an operator leads again")
            await self._clock.sleep(LOOK)
