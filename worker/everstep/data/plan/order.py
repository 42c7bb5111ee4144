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
from everstep.data.plan import permutation
from everstep.data.plan.permutation import MAX_N, Indices, Permutation, checked

# --- blocks
# Block shuffle: a random order that reads storage in runs. A dataset is cut into blocks. Blocks are shuffled, then the
# samples of each `window` of successive blocks are shuffled among themselves: at any time samples come from `window`
# blocks only. It exists for datasets whose storage is slow at random access (shards, object stores, disks); what it
# costs is that samples of one block stay near one another. Invariant: like every order, a bijection on [0, n) and a
# stable format (`VERSION`). Blocks of one size need O(1) memory; shards of listed lengths need O(shards).

VERSION: Final = 1


class Layout(Protocol):
    """How blocks lie in the dataset and, once they are shuffled, in the epoch. Slots are shuffled block numbers."""

    n: int
    blocks: int

    def window_of(self, position: int) -> int:
        """The window that holds an epoch position."""

    def span(self, window: int) -> tuple[int, int]:
        """The epoch positions of a window: first, and one past the last."""

    def items(self, window: int, offsets: Indices) -> Indices:
        """The dataset items at `offsets` into the window's blocks, laid end to end."""


class EqualBlocks:
    """Blocks of `size` samples, the last may be shorter. It stands in slot `p` after the shuffle; all else is division.

    Behind the short block everything comes `missing` samples earlier than it would with full blocks.
    """

    def __init__(self, n: int, size: int, window: int, key: bytes) -> None:
        self.n = n
        self.blocks = -(-n // size)
        self._size, self._full = size, window * size
        self._order = Permutation(self.blocks, key + b"blocks")
        self._missing = self.blocks * size - n
        self._short = self._order.position_of(self.blocks - 1)
        self._short_window = self._short // window

    def window_of(self, position: int) -> int:
        behind = position >= (self._short_window + 1) * self._full - self._missing
        return (position + (self._missing if behind else 0)) // self._full

    def span(self, window: int) -> tuple[int, int]:
        first = window * self._full - (self._missing if window > self._short_window else 0)
        last = (window + 1) * self._full - (self._missing if window >= self._short_window else 0)
        return first, min(last, self.n)

    def items(self, window: int, offsets: Indices) -> Indices:
        offset = offsets + window * self._full
        if window == self._short_window:
            offset = np.where(offset >= (self._short + 1) * self._size - self._missing, offset + self._missing, offset)
        slot, within = np.divmod(offset, self._size)
        return self._order.take(slot) * self._size + within


class ListedBlocks:
    """Blocks whose lengths are given one by one: the shards of a dataset."""

    def __init__(self, lengths: Sequence[int] | npt.NDArray[np.int64], window: int, key: bytes) -> None:
        sizes = np.asarray(lengths, dtype=np.int64)
        self.n = int(sizes.sum())
        self.blocks = len(sizes)
        self._window = window
        order = Permutation(self.blocks, key + b"blocks").take(np.arange(self.blocks))
        self._starts = (np.cumsum(sizes) - sizes)[order]  # by slot: where the block begins in the dataset
        self._ends = np.cumsum(sizes[order])  # by slot: one past its last epoch position

    def window_of(self, position: int) -> int:
        return int(np.searchsorted(self._ends, position, side="right")) // self._window

    def span(self, window: int) -> tuple[int, int]:
        first, last = window * self._window, min((window + 1) * self._window, self.blocks)
        return int(self._ends[first - 1]) if first else 0, int(self._ends[last - 1])

    def items(self, window: int, offsets: Indices) -> Indices:
        positions = offsets + self.span(window)[0]
        slots = np.searchsorted(self._ends, positions, side="right")
        begins = np.where(slots > 0, self._ends[slots - 1], 0)
        return np.asarray(self._starts[slots] + (positions - begins), dtype=np.int64)


class BlockOrder:
    """The block-shuffled order of [0, n) that `key` names."""

    def __init__(self, layout: Layout, key: bytes) -> None:
        if layout.n > MAX_N:
            raise DataError(f"a block shuffle of {layout.n} items: at most {MAX_N} are supported")
        self.n = layout.n
        self._layout = layout
        self._key = key
        # Of the window in use: orders are read from front to back.
        self._permutation: tuple[int, Permutation] | None = None

    def take(self, positions: npt.ArrayLike) -> Indices:
        """The items at one-dimensional `positions`, as int64. Raises IndexError if one is outside [0, n)."""
        wanted = checked(positions, self.n)
        out = np.empty_like(wanted)
        todo = np.arange(len(wanted))
        while todo.size:
            window = self._layout.window_of(int(wanted[todo[0]]))
            first, end = self._layout.span(window)
            inside = (wanted[todo] >= first) & (wanted[todo] < end)
            here = todo[inside]
            out[here] = self._layout.items(window, self._within(window, end - first).take(wanted[here] - first))
            todo = todo[~inside]
        return out

    def _within(self, window: int, size: int) -> Permutation:
        if self._permutation is None or self._permutation[0] != window:
            self._permutation = window, Permutation(size, self._key + b"window" + window.to_bytes(8, "little"))
        return self._permutation[1]


# --- order

MAX_SEED: Final = 2**64


class Order(Protocol):
    """From the positions of an epoch to the samples of a dataset: a bijection, but for what a sampler has `Drawn`."""

    n: int

    def take(self, positions: npt.ArrayLike) -> Indices:
        """The samples at one-dimensional `positions`, as int64. Raises IndexError outside [0, n)."""


@dataclass(frozen=True, slots=True)
class InOrder:
    """No shuffle: 0, 1, 2, …"""


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Every order of the whole dataset is possible: the default."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A shuffle that keeps reads local: see `everstep.data.plan.order`.

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


def shuffle_of(argument: bool | Shuffle) -> Shuffle:
    """The shuffle that a `shuffle` argument means: True, False, or a shuffle itself."""
    match argument:
        case True:
            return Shuffled()
        case False:
            return InOrder()
        case InOrder() | Shuffled() | Blocks() | Drawn() | Own():
            return argument
        case _:
            raise DataError(f"shuffle={argument!r}: pass True, False or Blocks(size=…, window=…)")


def label(shuffle: Shuffle) -> str:
    """The stable name of the orders that a shuffle makes. Lengths of shards are the dataset fingerprint's matter."""
    match shuffle:
        case InOrder():
            return "in-order"
        case Shuffled():
            return f"permutation-{permutation.VERSION}"
        case Blocks(size, window):
            kind = f"permutation-{permutation.VERSION}/blocks-{VERSION}"
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
        return checked(positions, self.n).copy()


class _Listed:
    def __init__(self, samples: Indices) -> None:
        self.n = len(samples)
        self._samples = samples

    def take(self, positions: npt.ArrayLike) -> Indices:
        return self._samples[checked(positions, self.n)]
