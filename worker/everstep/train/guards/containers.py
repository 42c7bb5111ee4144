"""Reads numbers, texts and containers as Python's own classes have them, whatever a script has derived from these.

Invariant: no code of the script's classes is called.
"""

from __future__ import annotations

import enum
import gc
import types
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import islice
from typing import Any

MISSING = object()
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})  # of which `marshal` keeps all bits
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_EXACTLY = frozenset(CONTAINERS)
_EMPTY = dict[str, int]()
VIEWS: tuple[type, ...] = (types.MappingProxyType, *map(type, (_EMPTY.keys(), _EMPTY.values(), _EMPTY.items())))
_EXACT: dict[type, Any] = {
    int: int.__pos__, float: float.__pos__, complex: complex.__pos__, str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
}  # fmt: skip


def as_plain(value: Any) -> Any:
    """A number, a text, bytes or None, without the class that the script has made of it; MISSING for what is another
    value. No method of that class is called."""
    kind = type(value)
    if kind in PLAIN:
        return value
    exact = next((read for base, read in _EXACT.items() if issubclass(kind, base)), None)
    return MISSING if exact is None or issubclass(kind, enum.Enum) else exact(value)


ADDRESSES = range(2**32, 2**64)  # numbers that are addresses, as `id` gives them, or hashes


@dataclass(frozen=True, slots=True)
class Nth:
    """In place of a key that is an address, of which each process has others: which key it is."""

    index: int

    def __repr__(self) -> str:
        return f"id {self.index}"


def steady_key(key: Any, index: int) -> Any:
    """A key of a dictionary as another process has it, too."""
    return Nth(index) if type(key) is int and abs(key) in ADDRESSES else key


def _base(kind: type) -> Any:
    """Python's own class of a container; None for another class."""
    return next(base for base in CONTAINERS if issubclass(kind, base)) if issubclass(kind, CONTAINERS) else None


def length_of(value: Any) -> int | None:
    """The number of a container's elements; None for what is another value."""
    kind = type(value)
    if kind in _EXACTLY:
        return len(value)
    if issubclass(kind, VIEWS):
        return length_of(gc.get_referents(value)[0])
    return None if (base := _base(kind)) is None else int(base.__len__(value))


def as_container(value: Any, most: int | None = None) -> Any:
    """The elements of a container, in one of Python's own classes; None for what is another value. Of a class of the
    script's they are copied, `most` of them, in their order."""
    kind = type(value)
    if kind in _EXACTLY:
        return value
    if issubclass(kind, VIEWS):
        return as_container(gc.get_referents(value)[0], most)
    if (base := _base(kind)) is dict:
        return dict(islice((OrderedDict if issubclass(kind, OrderedDict) else dict).items(value), most))
    return base if base is None else base(islice(base.__iter__(value), most))
