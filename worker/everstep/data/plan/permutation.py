"""A keyed permutation of [0, n) that is computed, not stored: O(1) memory for any n up to 2**48.

It exists so that the order of an epoch is a function of (seed, epoch) alone, and any rank of any world size can begin
anywhere in it. Knows nothing of datasets, epochs or torch. Invariants: a bijection on [0, n); the order is a stable
format: another order is another `VERSION`.

Up to 256 items are a table, sorted by random words: each order is as likely as any other. Above that, an alternating
Feistel network on the smallest power of two that holds n, its halves equal or one bit apart, made a permutation of
[0, n) by walking its cycles: Luby and Rackoff 1988; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002. Mitchell, Stokes, Frank and Holmes, "Bandwidth-Optimal Random Shuffling for GPUs", 2021, use it as a shuffle in
the same way. It is a shuffle, not a cipher: the round function is two multiplications, and no secrecy is claimed.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

from everstep.data.errors import DataError

VERSION: Final = 1
MAX_N: Final = 2**48
ROUNDS: Final = 10  # statistics of 6 still differ from a random order, of 8 they do not
TABLE_N: Final = 256  # a network on so few bits would need many more rounds to reach all orders equally
_M1: Final = np.uint64(0xFF51AFD7ED558CCD)  # the multipliers of MurmurHash3's 64-bit finalizer
_M2: Final = np.uint64(0xC4CEB9FE1A85EC53)
_HALF: Final = np.uint64(32)  # bits
_CHUNK: Final = 16384  # elements at a time: temporaries stay in the processor's cache

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


def checked(positions: npt.ArrayLike, n: int) -> Indices:
    """The positions as int64. Raises IndexError if one is outside [0, n)."""
    wanted = np.asarray(positions, dtype=np.int64)
    if wanted.size and (wanted.min() < 0 or wanted.max() >= n):
        raise IndexError(f"positions {wanted.min()}..{wanted.max()} of an order of {n} items")
    return wanted


class Permutation:
    """The permutation of [0, n) that `key` names. Two keys give unrelated orders; so do two n under one key."""

    __slots__ = ("_keys", "_left", "_right", "_table", "n")

    def __init__(self, n: int, key: bytes) -> None:
        if not 1 <= n <= MAX_N:
            raise DataError(f"a permutation of {n} items: between 1 and {MAX_N} are supported")
        self.n = n
        bits = (n - 1).bit_length()
        self._left, self._right = bits // 2, bits - bits // 2
        label = b"everstep permutation %d\0" % VERSION
        count = n if n <= TABLE_N else ROUNDS
        drawn = hashlib.shake_128(label + n.to_bytes(8, "little") + key).digest(8 * count)
        words = np.frombuffer(drawn, dtype="<u8").astype(np.uint64)
        self._table: Indices | None = np.argsort(words, kind="stable").astype(np.int64) if n <= TABLE_N else None
        self._keys: tuple[np.uint64, ...] = tuple(words) if self._table is None else ()

    def take(self, positions: npt.ArrayLike) -> Indices:
        """The items at `positions` (any shape), as int64. Raises IndexError if one is outside [0, n)."""
        wanted = checked(positions, self.n)
        if self._table is not None:
            return self._table[wanted]
        flat = wanted.reshape(-1).view(np.uint64)
        out = np.empty(flat.shape, dtype=np.uint64)
        for start in range(0, flat.size, _CHUNK):
            out[start : start + _CHUNK] = self._walk(flat[start : start + _CHUNK], range(ROUNDS))
        return out.view(np.int64).reshape(wanted.shape)

    def position_of(self, item: int) -> int:
        """The place of `item`: the inverse of `take`. Raises IndexError outside [0, n)."""
        if not 0 <= item < self.n:
            raise IndexError(f"item {item} of a permutation of {self.n} items")
        if self._table is not None:
            return int(np.flatnonzero(self._table == item)[0])
        return int(self._walk(np.array([item], dtype=np.uint64), range(ROUNDS)[::-1])[0])

    def _walk(self, values: _Words, rounds: range) -> _Words:
        # It ends: the network is a bijection, so the cycle through a value below n comes back to that value.
        n = np.uint64(self.n)
        out = self._network(values, rounds)
        outside = np.flatnonzero(out >= n)
        while outside.size:
            again = self._network(out[outside], rounds)
            out[outside] = again
            outside = outside[again >= n]
        return out

    def _network(self, values: _Words, rounds: range) -> _Words:
        width = np.uint64(self._right)
        left, right = values >> width, values & np.uint64((1 << self._right) - 1)
        mixed, high = np.empty_like(left), np.empty_like(left)
        halves = (right, left, np.uint64(64 - self._left)), (left, right, np.uint64(64 - self._right))
        for i in rounds:
            source, target, unused = halves[i % 2]
            np.add(source, self._keys[i], out=mixed)
            np.multiply(mixed, _M1, out=mixed)
            np.right_shift(mixed, _HALF, out=high)
            np.bitwise_xor(mixed, high, out=mixed)
            np.multiply(mixed, _M2, out=mixed)
            np.right_shift(mixed, unused, out=mixed)
            np.bitwise_xor(target, mixed, out=target)
        np.left_shift(left, width, out=left)
        np.bitwise_or(left, right, out=left)
        return left
