"""The protocol of a round store: one document, compare-and-swap, presence, and a watch.

An implementation is safe to call from several threads. It belongs to the process that made it; a fork makes its own
connections. Every call is bounded: it returns, or raises StoreUnavailable (try later) or StoreRefused (final).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol


@dataclass(frozen=True, slots=True)
class View:
    """The store's content at one moment. `version` changes with the document (0: there is none).
    `expirations` grows with each presence that ended, and whenever the store cannot know whether one ended.

    `era` grows each time this process finds that the store lost its data, or was restored to an older state.
    Versions grow within one era. Versions of two eras are not comparable: the view of the later era is newer."""

    document: bytes | None
    version: int
    expirations: int = 0
    era: int = 0

    @property
    def edition(self) -> tuple[int, int]:
        """Orders documents: the greater of two is the newer, unless a version is 0."""
        return self.era, self.version


class RoundStore(Protocol):
    """One job's round store."""

    def read(self) -> View:
        """The newest document. It includes every write that was answered before this call."""

    def compare_and_swap(self, expected: int, document: bytes) -> int | None:
        """Write the document if its version is still `expected` (0: if there is none).

        Returns the new version, or None if the store had another. After StoreUnavailable, it may have been written.
        """

    def watch(self, seen: View, timeout: float) -> View:
        """Wait until era, version or expirations differ from `seen`, at most `timeout` seconds. Gives the newest view.

        The view may be older than what `read` gives.
        """

    def announce(self, agent: str, value: bytes, ttl: float) -> float:
        """Make the agent present, with a join request as the value, until `ttl` seconds pass without `renew`. Ask the
        store to write the request into the document. Only the operator's store does that.

        Returns how many seconds to wait for the request to be in the document; an agent that does not see it there by
        then writes it by itself. 0: this store does not write requests. A store that does has read the document when
        this call returns, so the next `watch` returns at once.
        """

    def renew(self, agent: str) -> bool:
        """Keep the agent present. False: it has expired and must be announced again."""

    def withdraw(self, agent: str) -> None:
        """End the agent's presence now."""

    def present(self) -> Mapping[str, bytes]:
        """The agents that are present, with their values."""

    def close(self) -> None:
        """Close connections and end threads. Presences are left to expire."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Bounded waits between attempts. They are jittered, so that two writers that met do not meet again."""

    first: float = 0.01
    most: float = 0.5

    def seconds(self, attempt: int, random: Random) -> float:
        """Seconds to wait before attempt `attempt` (1 is the first repetition)."""
        high = min(self.most, self.first * 2 ** min(attempt, 16))
        return random.uniform(high / 4, high)
