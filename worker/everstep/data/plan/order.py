"""The order of an epoch: which sample stands at which position, as a function of seed and epoch alone.

Pure; knows no rank and no world size. `label` is the order's stable name: it is saved with a position, and a position
is meaningless under another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

import numpy as np
import numpy.typing as npt

from everstep.data.errors import DataError
from everstep.data.plan import blocks, permutation
from everstep.data.plan.blocks import BlockOrder, EqualBlocks, ListedBlocks
from everstep.data.plan.permutation import Indices, Permutation

MAX_SEED: Final = 2**64


class Order(Protocol):
    """From the positions of an epoch to the samples of a dataset: a bijection, but for what a sampler has `Drawn`."""

    n: int

    def take(self, positions: npt.ArrayLike) -> Indices:
        """The samples at one-dimensional `positions`, as int64. Raises IndexError outside [0, n)."""
        ...

    def at(self, position: int) -> int:
        """The sample at one position."""
        ...


@dataclass(frozen=True, slots=True)
class InOrder:
    """No shuffle: 0, 1, 2, …"""


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Every order of the whole dataset is possible: the default."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A shuffle that keeps reads local: see `everstep.data.plan.blocks`.

    `size`: samples a block; None takes the shards of a `ShardedDataset` as the blocks. `window`: how many blocks are
    mixed with one another; the larger, the more random, and the more must be held open at a time.
    """

    size: int | None = None
    window: int = 8

    def __post_init__(self) -> None:
        if (self.size is not None and self.size < 1) or self.window < 1:
            raise DataError(f"Blocks(size={self.size}, window={self.window}): both must be at least 1")


@dataclass(frozen=True, slots=True)
class Drawn:
    """The order that a sampler draws, epoch by epoch (`data.randomness.draws`). A sample may repeat, or never come.

    `draw(seed, epoch)`: the samples of an epoch, always `length` of them and the same for the same arguments. `name`:
    what drew them.
    """

    name: str
    length: int
    draw: Callable[[int, int], Indices]


@dataclass(frozen=True, slots=True)
class Own:
    """An order that the dataset brings along: `make(seed, epoch)`, of `length` positions. `name`: its stable name."""

    name: str
    length: int
    make: Callable[[int, int], Order]


Shuffle = InOrder | Shuffled | Blocks | Drawn | Own


def shuffle_of(asked: bool | Shuffle) -> Shuffle:
    """The shuffle that a `shuffle` argument means: True, False, or a shuffle itself."""
    match asked:
        case True:
            return Shuffled()
        case False:
            return InOrder()
        case InOrder() | Shuffled() | Blocks() | Drawn() | Own():
            return asked
        case _:
            raise DataError(f"shuffle={asked!r}: pass True, False or Blocks(size=…, window=…)")


def label(shuffle: Shuffle) -> str:
    """The stable name of the orders that a shuffle makes. Lengths of shards are the dataset fingerprint's matter."""
    match shuffle:
        case InOrder():
            return "in-order"
        case Shuffled():
            return f"permutation-{permutation.VERSION}"
        case Blocks(size, window):
            kind = f"permutation-{permutation.VERSION}/blocks-{blocks.VERSION}"
            return f"{kind}/size={'shards' if size is None else size}/window={window}"
        case Drawn(name):
            return f"drawn-1/{name}"
        case Own(name):
            return name
        case _:
            assert_never(shuffle)


def order_of(shuffle: Shuffle, n: int, seed: int, epoch: int, shards: Sequence[int] | None = None) -> Order:
    """The order of one epoch of a dataset of n samples. `shards`: lengths, for `Blocks(size=None)`.

    Raises DataError for a seed that is not in [0, 2**64), and for blocks of shards without shards.
    """
    if not 0 <= seed < MAX_SEED:
        raise DataError(f"seed={seed}: an integer from 0 to 2**64 - 1 is expected")
    key = seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    match shuffle:
        case InOrder():
            return _Identity(n)
        case Shuffled():
            return Permutation(n, key)
        case Blocks(size, window) if size is not None:
            return BlockOrder(EqualBlocks(n, size, window, key), key)
        case Blocks(_, window):
            if shards is None:
                raise DataError("Blocks(size=None) takes shards as blocks, and the dataset has none: pass a size")
            return BlockOrder(ListedBlocks(shards, window, key), key)
        case Drawn(_, _, draw):
            return _Listed(draw(seed, epoch))
        case Own(_, _, make):
            return make(seed, epoch)
        case _:
            assert_never(shuffle)


class _Identity:
    def __init__(self, n: int) -> None:
        self.n = n

    def take(self, positions: npt.ArrayLike) -> Indices:
        asked = np.asarray(positions, dtype=np.int64)
        if asked.size and (asked.min() < 0 or asked.max() >= self.n):
            raise IndexError(f"positions {asked.min()}..{asked.max()} of an order of {self.n} items")
        return asked.copy()

    def at(self, position: int) -> int:
        return int(self.take([position])[0])


class _Listed:
    def __init__(self, samples: Indices) -> None:
        self.n = len(samples)
        self._samples = samples

    def take(self, positions: npt.ArrayLike) -> Indices:
        asked = np.asarray(positions, dtype=np.int64)
        if asked.size and (asked.min() < 0 or asked.max() >= self.n):
            raise IndexError(f"positions {asked.min()}..{asked.max()} of an order of {self.n} items")
        return self._samples[asked]

    def at(self, position: int) -> int:
        return int(self.take([position])[0])
