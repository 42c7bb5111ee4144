"""What a rendezvous needs of a store, and no more: one document, compare-and-swap, presence, and a watch.

An implementation is safe to call from several threads, belongs to the process that made it (a fork makes its own
connections), and bounds every call: it returns, or raises StoreUnavailable (again later) or StoreRefused (never).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol


@dataclass(frozen=True, slots=True)
class View:
    """What the store held at one moment. `version` changes with the document (0: there is none);
    `expirations` grows with each presence that ended, and whenever the store cannot tell whether one did.

    `era` grows each time this process finds that the store lost what it held, or was put back to an older state.
    Versions grow within one era. Those of two eras have no order: the later era is the newer."""

    document: bytes | None
    version: int
    expirations: int = 0
    era: int = 0

    @property
    def edition(self) -> tuple[int, int]:
        """Which document this is. The greater of two is the newer, unless a version is 0."""
        return self.era, self.version


class RoundStore(Protocol):
    """One job's round store."""

    def read(self) -> View:
        """The newest document: what any call that was answered before has written is seen."""
        ...

    def compare_and_swap(self, expected: int, document: bytes) -> int | None:
        """Write the document if its version is still `expected` (0: if there is none).

        Returns the new version, or None if another was there. After StoreUnavailable it may have been written.
        """
        ...

    def watch(self, seen: View, timeout: float) -> View:
        """Wait until era, version or expirations differ from those seen, at most `timeout` seconds; the newest view.

        The view may be older than what `read` gives.
        """
        ...

    def announce(self, agent: str, value: bytes, ttl: float) -> None:
        """Make the agent present, with this value, until `ttl` seconds pass without `renew`."""
        ...

    def ask(self, agent: str, value: bytes, ttl: float) -> float:
        """`announce`, and have the store write this request into the document, if it is one that does such a thing.

        Seconds after which the agent should have seen that it did, and otherwise writes by itself; 0: it does not. A
        store that does knows by then what it held, and `watch` gives it at once.
        """
        ...

    def renew(self, agent: str) -> bool:
        """Keep the agent present. False: it has expired and must be announced again."""
        ...

    def withdraw(self, agent: str) -> None:
        """End the agent's presence now."""
        ...

    def present(self) -> Mapping[str, bytes]:
        """The agents that are present, with their values."""
        ...

    def close(self) -> None:
        """Give up connections and threads. Presence is left to expire."""
        ...


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between attempts that met another's: jittered, so that those who met do not meet again; bounded."""

    first: float = 0.01
    most: float = 0.5

    def seconds(self, attempt: int, random: Random) -> float:
        """Before attempt `attempt` (1 is the first repetition)."""
        high = min(self.most, self.first * 2 ** min(attempt, 16))
        return random.uniform(high / 4, high)
