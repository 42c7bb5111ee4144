"""Whether boxes tile a tensor, in time that grows with the numbers in the record and with nothing else.

Pure. A record may come from anybody, so a comparison of each box with each other one is out of the question, however
rarely real records would need it.

Method: the sum of the boxes' indicator functions equals that of the tensor exactly if their mixed differences do, and
these are sums over corners: a box contributes the product over its axes of (its beginning - its end). So each pair of
axis and coordinate gets a number, and the sum of the boxes' products is compared with the tensor's product, modulo a
prime: identity testing of a polynomial (Schwartz 1980, Zippel 1979). The numbers come from a hash of all boxes, so
nobody can choose boxes for numbers that are known; another tiling passes with a chance of 64 in 2^127.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Final, Protocol

from everstep.checkpoint.errors import FormatError

_PRIME: Final = 2**127 - 1


class _Box(Protocol):
    @property
    def offset(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def check_tiling(shape: tuple[int, ...], boxes: Sequence[_Box], where: str) -> None:
    """Raise `FormatError` unless the boxes, which lie inside of it, cover a tensor of this shape exactly once."""
    total = math.prod(shape)
    covered = sum(math.prod(box.shape) for box in boxes)
    if covered != total:
        raise FormatError(f"{where}: its pieces hold {covered} of {total} elements")
    if len(boxes) == 1 or not total:
        return  # one box inside of the tensor, and as large
    digest = hashlib.blake2b(digest_size=32)
    for box in boxes:
        digest.update(repr((box.offset, box.shape)).encode())
    key = digest.digest()
    numbers: dict[tuple[int, int], int] = {}

    def number(axis: int, coordinate: int) -> int:
        found = numbers.get((axis, coordinate))
        if found is None:
            text = b"%d %d" % (axis, coordinate)
            found = int.from_bytes(hashlib.blake2b(text, key=key, digest_size=16).digest()) % _PRIME
            numbers[axis, coordinate] = found
        return found

    def product(offset: tuple[int, ...], size: tuple[int, ...]) -> int:
        found = 1
        for axis, (begin, length) in enumerate(zip(offset, size, strict=True)):
            found = found * (number(axis, begin) - number(axis, begin + length)) % _PRIME
        return found

    if (sum(product(box.offset, box.shape) for box in boxes) - product((0,) * len(shape), shape)) % _PRIME:
        raise FormatError(f"{where}: two of its pieces overlap")
