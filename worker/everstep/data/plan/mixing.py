"""Which source a mixture takes its next sample from, and which sample of it: a function of seed and position.

Positions are counted over all epochs of the training. They are cut into periods in which each source has as many places
as its weight says; the places of a period are a table, so that any position is found at once. A source goes through
epochs of its own, one after the other. Pure. Invariants:

- After any number of positions each source has had its proportion of them to within one sample.
- Each source's samples come each once in each of its own epochs, in an order of its own.

The table gives each place to the source whose next sample is due first, of those whose time has come: Baruah, Cohen,
Plaxton and Varvel, "Proportionate progress: a notion of fairness in resource allocation", Algorithmica 1996.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import Final

import numpy as np
import numpy.typing as npt

from everstep.data.errors import DataError
from everstep.data.plan.order import Blocks, Order, Shuffle, Shuffled, order_of
from everstep.data.plan.permutation import Indices, checked

VERSION: Final = 1
MAX_PERIOD: Final = 2**16
MAX_POSITION: Final = 2**62
_KEPT: Final = 64  # orders of sources' epochs


@dataclass(frozen=True, slots=True)
class Part:
    """One source. `share`: its samples in a period. `length`: its samples. `shards`: their lengths."""

    name: str
    share: int
    length: int
    shards: tuple[int, ...] | None = None


def shares_of(weights: dict[str, float | int | Fraction]) -> dict[str, int]:
    """The smallest whole numbers in these proportions. Raises DataError for those that have none below 65536."""
    exact = {}
    for name, weight in weights.items():
        try:
            exact[name] = Fraction(str(weight))
        except ValueError:
            exact[name] = Fraction(0)
        if exact[name] <= 0:
            raise DataError(f"Mixture: weight {weight!r} of {name!r}: a number above 0 is expected")
    scale = lcm(*(w.denominator for w in exact.values()))
    whole = {name: int(w * scale) for name, w in exact.items()}
    common = gcd(*whole.values())
    shares = {name: count // common for name, count in whole.items()}
    if sum(shares.values()) > MAX_PERIOD:
        raise DataError(
            f"Mixture: the weights {weights} repeat after {sum(shares.values())} samples, and {MAX_PERIOD} are the"
            " most: round them, to two or three digits"
        )
    return shares


@lru_cache(maxsize=16)  # each plan begins with it, and the largest takes a tenth of a second
def table_of(shares: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The source of each place of a period. Not to be written to."""
    period = sum(shares)
    table = np.empty(period, dtype=np.int64)
    coming = [(0, k, 0) for k in range(len(shares))]  # (when its next sample may be taken, source, its samples so far)
    heapq.heapify(coming)
    due: list[tuple[int, int, int]] = []
    for slot in range(period):
        while coming and coming[0][0] <= slot:
            _, k, taken = heapq.heappop(coming)
            heapq.heappush(due, (-(-(taken + 1) * period // shares[k]), k, taken))
        _, k, taken = heapq.heappop(due)
        table[slot] = k
        if taken + 1 < shares[k]:
            heapq.heappush(coming, ((taken + 1) * period // shares[k], k, taken + 1))
    return table


class MixedOrder:
    """One epoch, of `n` positions, of the mixture of `parts`. Samples are numbered source after source."""

    def __init__(self, parts: Sequence[Part], n: int, shuffle: Shuffle, seed: int, epoch: int) -> None:
        if (epoch + 1) * n > MAX_POSITION:
            raise DataError(f"epoch {epoch} of {n} samples: a mixture can be counted up to {MAX_POSITION}")
        self.n = n
        self._parts, self._shuffle = parts, shuffle
        self._seeds = [_seed_of(seed, part.name) for part in parts]
        self._firsts = np.cumsum([0, *(part.length for part in parts)])
        shares = np.array([part.share for part in parts], dtype=np.int64)
        self._shares, self._table = shares, table_of(tuple(part.share for part in parts))
        self._before = np.empty_like(self._table)  # samples of the same source earlier in the period
        for k in range(len(parts)):
            here = self._table == k
            self._before[here] = np.arange(int(here.sum()))
        self._period, self._offset = divmod(epoch * n, len(self._table))
        self._orders: dict[tuple[int, int], Order] = {}

    def take(self, positions: npt.ArrayLike) -> Indices:
        indices = checked(positions, self.n)
        periods, slots = np.divmod(indices + self._offset, len(self._table))
        sources = self._table[slots]
        counts = (periods + self._period) * self._shares[sources] + self._before[slots]
        out = np.empty_like(indices)
        for k in np.unique(sources).tolist():
            here = np.flatnonzero(sources == k)
            epochs, within = np.divmod(counts[here], self._parts[k].length)
            for epoch in np.unique(epochs).tolist():
                now = epochs == epoch
                out[here[now]] = self._order(k, epoch).take(within[now]) + self._firsts[k]
        return out

    def _order(self, k: int, epoch: int) -> Order:
        if (order := self._orders.get((k, epoch))) is None:
            if len(self._orders) >= _KEPT:
                self._orders.clear()
            part = self._parts[k]
            order = order_of(_shuffle_of(self._shuffle, part), part.length, self._seeds[k], epoch, part.shards)
            self._orders[k, epoch] = order
        return order


def _shuffle_of(shuffle: Shuffle, part: Part) -> Shuffle:
    """That of a source: where blocks are to be shards, one without shards is shuffled whole."""
    by_shards = isinstance(shuffle, Blocks) and shuffle.size is None
    return Shuffled() if by_shards and part.shards is None else shuffle


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + name.encode(), digest_size=8, person=b"everstep mixture")
    return int.from_bytes(digest.digest(), "little")
