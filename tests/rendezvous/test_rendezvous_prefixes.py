"""An agent dies at each of its store calls in turn, before it takes effect or after (failure 46).

The driver as it ships, in threads. From the chosen call on nothing that the agent does reaches the store any more: that
is all that the others can see of a death. They must form a round without it, one membership a number, every time.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from everstep.contract.document import Document, Member, Sizes, decode
from everstep.membership.backends.memory import MemoryStore
from everstep.membership.driver import Driver
from everstep.membership.errors import JoinTimedOut, StoreUnavailable
from everstep.membership.joining import JoinSettings
from everstep.membership.proposals import Patience
from everstep.membership.world_state import Whole
from support.rendezvous.agents import LIMIT, until

SETTINGS = JoinSettings(patience=Patience(last_call=0.2, rejoin=3.0), ttl=0.6)
CALLS = 8  # of one agent: about what it needs until it is in its second round; later ones renew its lease


class Recorded(MemoryStore):
    """Keeps every document that was ever written."""

    def __init__(self) -> None:
        super().__init__()
        self.documents: list[Document] = []

    def compare_and_swap(self, expected: int, document: bytes) -> int | None:
        version = super().compare_and_swap(expected, document)
        if version is not None:
            self.documents.append(decode(document))
        return version


class Dying:
    """A client whose agent dies at call number `at`; `after`: the call still takes effect. Watching is not a call."""

    def __init__(self, inner: MemoryStore, at: int, after: bool) -> None:
        self._inner, self._left, self._after = inner, at, after
        self._lock = threading.Lock()
        self.dead = threading.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*arguments: Any) -> Any:
            with self._lock:
                if not self.dead.is_set() and name not in ("watch", "close"):
                    if self._left == 0:
                        self.dead.set()
                        if self._after:
                            method(*arguments)
                    self._left -= 1
            if self.dead.is_set() and name != "close":
                raise StoreUnavailable("dead, by a test")
            return method(*arguments)

        return call


class Living:
    """An agent that joins whenever its round is over, as torchrun's loop does; `again`: once more after its first."""

    def __init__(self, driver: Driver, stop: threading.Event, *, again: bool = False) -> None:
        self.driver, self._stop, self._again = driver, stop, again
        self.thread = threading.Thread(target=self._live)
        self.thread.start()

    def _live(self) -> None:
        while not self._stop.is_set():
            if not isinstance(self.driver.wait(0.02), Whole) or self._again:
                with contextlib.suppress(JoinTimedOut):
                    self._again = self.driver.join(0.5).number == 1 and self._again


@pytest.mark.long_but("0-before")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(CALLS))
def test_an_agent_that_dies_at_any_call_holds_nobody_up(at: int, after: bool) -> None:
    store = Recorded()
    dying = Dying(store, at, after)
    stop = threading.Event()
    sizes = Sizes(2, 3)
    agents = [Living(Driver(store, Member(-1, name), sizes, SETTINGS), stop) for name in "ab"]
    victim: Any = dying
    agents.append(Living(Driver(victim, Member(-1, "v"), sizes, SETTINGS), stop, again=True))

    def survivors_train() -> bool:
        if not store.documents:
            return False
        document = store.documents[-1]
        whole = all(isinstance(agent.driver.world_state(), Whole) for agent in agents[:2])
        return whole and {m.agent for m in document.members} == {"a", "b"} and not document.gone

    try:
        until(dying.dead.is_set)
        until(survivors_train)
    finally:
        stop.set()
        for agent in agents:
            agent.thread.join(LIMIT)
            agent.driver.stop()
    members: dict[int, object] = {}
    for document in store.documents:
        assert members.setdefault(document.round, document.members) == document.members
