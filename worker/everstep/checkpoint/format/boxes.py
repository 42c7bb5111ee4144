"""Boxes of tensors: how a state is divided over ranks so that each writes its even share.

Pure: shapes and numbers, no torch. A box is an axis-aligned part of a tensor. Invariant: the portions that `share`
gives to all parts tile every tensor exactly once, and are the same on every rank that asks with the same sizes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from everstep.checkpoint.errors import FormatError

# --- tiling
# Whether boxes tile a tensor, in time that grows with the numbers in the record and with nothing else. A record may
# come from anybody, so a comparison of each box with each other one is out of the question, however rarely real records
# would need it. Method: the sum of the boxes' indicator functions equals that of the tensor exactly if their mixed
# differences do, and these are sums over corners: a box contributes the product over its axes of (its beginning - its
# end). So each pair of axis and coordinate gets a number, and the sum of the boxes' products is compared with the
# tensor's product, modulo a prime: identity testing of a polynomial (Schwartz 1980, Zippel 1979). The numbers come from
# a hash of all boxes, so nobody can choose boxes for numbers that are known; another tiling passes with a chance of 64
# in 2^127.

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
        if (axis, coordinate) not in numbers:
            text = b"%d %d" % (axis, coordinate)
            numbers[axis, coordinate] = int.from_bytes(hashlib.blake2b(text, key=key, digest_size=16).digest()) % _PRIME
        return numbers[axis, coordinate]

    def product(offset: tuple[int, ...], size: tuple[int, ...]) -> int:
        result = 1
        for axis, (begin, length) in enumerate(zip(offset, size, strict=True)):
            result = result * (number(axis, begin) - number(axis, begin + length)) % _PRIME
        return result

    if (sum(product(box.offset, box.shape) for box in boxes) - product((0,) * len(shape), shape)) % _PRIME:
        raise FormatError(f"{where}: two of its pieces overlap")


# --- boxes

# A cut is rounded to whole trailing blocks of at most this part of a share: rows where rows are small, else parts of
# one. So small tensors are never cut, and no share is off by more than 2 / _GRAINS.
_GRAINS: Final = 128


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it begins on each axis, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that cut the box out of its tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Item:
    """Something to divide: a box of elements with a name. `bytes_each` is the size of an element."""

    name: str
    shape: tuple[int, ...]
    bytes_each: int


@dataclass(frozen=True, slots=True)
class Portion:
    """A box of the item of this name."""

    name: str
    box: Box


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def order(items: Iterable[Item]) -> list[Item]:
    """The order of items in files and shares: widest elements first, so that all are aligned; then by name."""
    return sorted(items, key=lambda i: (-i.bytes_each, i.name))


def share(items: Iterable[Item], parts: int) -> list[list[Portion]]:
    """Divide items over `parts` takers, evenly by bytes: lay them end to end, cut the line at equal distances.

    A taker's portions are neighbours on the line, so a file of them is read back as one range.
    """
    line = order(items)
    total = sum(math.prod(i.shape) * i.bytes_each for i in line)
    limit = total / parts / _GRAINS
    taken: list[list[Portion]] = [[] for _ in range(parts)]
    part, position = 0, 0
    for item in line:
        elements = math.prod(item.shape)
        grain = _grain(item.shape, limit / item.bytes_each)
        start = 0
        while part < parts - 1 and total * (part + 1) <= (position + elements * item.bytes_each) * parts:
            exact = (total * (part + 1) / parts - position) / item.bytes_each
            cut = max(start, min(elements, round(exact / grain) * grain))
            taken[part] += _portions(item, start, cut)
            part, start = part + 1, cut
        if start < elements:
            taken[part] += _portions(item, start, elements)
        elif not elements:
            taken[part].append(Portion(item.name, whole(item.shape)))
        position += elements * item.bytes_each
    return taken


def flat_boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """The boxes of elements `begin` to `end` (exclusive) in row-major order, themselves in that order."""
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, into = divmod(begin, row)
    last, over = divmod(end, row)
    if into:
        stop = over if first == last else row
        yield from _below(first, flat_boxes(shape[1:], into, stop))
        if first == last:
            return
        first += 1
    if last > first:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if over:
        yield from _below(last, flat_boxes(shape[1:], 0, over))


def flat_begin(shape: Sequence[int], box: Box) -> int | None:
    """The row-major index of the box's first element in a tensor of this shape, if the box is one run of elements
    there; else None."""
    inner = len(shape)
    while inner and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    if any(n != 1 for n in box.shape[: max(0, inner - 1)]) and box.elements:
        return None
    return first_element(shape, box)


def first_element(shape: Sequence[int], box: Box) -> int:
    """The row-major index of the box's first element."""
    index = 0
    for size, at in zip(shape, box.offset, strict=True):
        index = index * size + at
    return index


def moved(outer: Box, box: Box) -> Box:
    """`box`, whose offset counts from the beginning of `outer`, as a box of the whole tensor."""
    return Box(tuple(b + o for b, o in zip(box.offset, outer.offset, strict=True)), box.shape)


def text(box: Box) -> str:
    """The box as Python slices."""
    return "[" + ",".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.shape, strict=True)) + "]"


def _grain(shape: Sequence[int], limit: float) -> int:
    """Elements of the largest trailing block that holds at most `limit`, at least 1."""
    block = 1
    for size in reversed(shape):
        if block * size > limit:
            break
        block *= size
    return max(1, block)


def _portions(item: Item, start: int, end: int) -> list[Portion]:
    return [Portion(item.name, box) for box in flat_boxes(item.shape, start, end)]


def _below(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((index, *box.offset), (1, *box.shape))
