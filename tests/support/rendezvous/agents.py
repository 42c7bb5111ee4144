"""Agents for tests: drivers in threads, over any store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, TypeVar

from everstep.contract.document import Member, Sizes
from everstep.membership.driver import Driver
from everstep.membership.joining import JoinSettings
from everstep.membership.peers.peer_monitor import PeerMonitor
from everstep.membership.proposals import Patience
from everstep.membership.store import RoundStore
from everstep.membership.world_state import Round

T = TypeVar("T")
LIMIT = 30.0  # seconds that any wait may take
# No lease expires because the tests' process had no processor for a while; where one is to expire, it is short.
QUICK = JoinSettings(patience=Patience(last_call=0.5, rejoin=5.0), ttl=20.0)
EXPIRING = replace(QUICK, ttl=2.0)


class Crew:
    """Agents of one job. `store()` gives each its own client."""

    def __init__(self, store: Callable[[], RoundStore], sizes: Sizes, settings: JoinSettings = QUICK) -> None:
        self._store, self._sizes, self._settings = store, sizes, settings
        self.drivers: dict[str, Driver] = {}
        self.monitors: dict[str, PeerMonitor] = {}
        self._pool = ThreadPoolExecutor(16)

    def add(self, name: str, *, linked: bool = False, settings: JoinSettings | None = None) -> Driver:
        if linked:
            self.monitors[name] = PeerMonitor(name)
        peers = self.monitors.get(name)
        member = Member(-1, name, address="127.0.0.1", link_port=peers.port if peers else 0)
        self.drivers[name] = Driver(self._store(), member, self._sizes, settings or self._settings, peers=peers)
        return self.drivers[name]

    def joining(self, names: Iterable[str], timeout: float = LIMIT) -> dict[str, Future[Round]]:
        return {name: self._pool.submit(self.drivers[name].join, timeout) for name in names}

    def join(self, names: Iterable[str]) -> dict[str, Round]:
        return {name: future.result(LIMIT) for name, future in self.joining(names).items()}

    def start(self, names: str, *, linked: bool = False) -> dict[str, Round]:
        """All of these are in one round; if no more would fit, none goes on without the last, however late that is.
        Those that are linked have met their neighbours: of one that dies unmet nobody can say that it is gone."""
        settings = self._settings
        if len(names) == self._sizes.maximum:
            settings = replace(settings, patience=replace(settings.patience, last_call=LIMIT))
        for name in names:
            self.add(name, linked=linked, settings=settings)
        rounds = self.join(names)
        followers = [f for peers in self.monitors.values() for f in peers._followed.values()]
        until(lambda: all(f._connected for f in followers))
        return rounds

    def stop(self) -> None:
        for driver in self.drivers.values():
            driver.stop()
        self._pool.shutdown()


@contextmanager
def crew(store: Callable[[], RoundStore], sizes: Sizes, settings: JoinSettings = QUICK) -> Iterator[Crew]:
    made = Crew(store, sizes, settings)
    try:
        yield made
    finally:
        made.stop()


def until(found: Callable[[], T | Literal[False]], limit: float = LIMIT) -> T:
    """Wait until `found()` is true, and give it. Fails after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not (value := found()):
        assert time.monotonic() < deadline, f"not in {limit} s"
        time.sleep(0.01)
    return value
