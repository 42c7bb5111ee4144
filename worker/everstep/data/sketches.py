"""What two processes compare of a sample, to tell whether they have read the same one.

All but floating-point values is compared exactly, by a digest. Two kinds of processors may compute the last bits of a
floating-point value otherwise, so such values are compared by their size and three projections, with a tolerance. That
is measured by the whole value, and so a large element (a time stamp beside features) would hide all others. Hence each
decade of magnitude, with what is smaller, is compared by itself too. Rounding may be as large as the last bits of the
largest element, which is all of a small one; but such rounding shows in the largest elements as well. Where those are
equal bit by bit, nothing excuses a difference of the small ones. Invariant: a sketch is small, and JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_DEPTH: Final = 16
_LEAVES: Final = 64  # floating-point values of a sample that are compared each by itself; those behind them, as one
_LARGEST: Final = 65_536  # elements of one of them that are looked at
_NEAR: Final = ((16, 1e-6), (512, 1e-5), (math.inf, 2e-3))  # relative tolerance, for up to so many elements
_NEAR_DOUBLE: Final = 1e-12  # rounding in double precision
_DECADES: Final = 20  # below the largest element
_LARGE: Final = 1e-3  # of the largest element: "large"
_ANY: Final = 999  # above every exponent
_HUGE: Final = 1e150  # whose square might be infinite

Floats = npt.NDArray[np.float64]


class Values(NamedTuple):
    """Of a floating-point value: its number of elements, the largest, what rounding may be beside that, and a digest of
    the large ones. `decades`: by exponent (none: of all) how many elements, their size, and projections."""

    elements: int
    largest: float
    rounding: float
    large: str
    decades: dict[str, list[float]]


Sketch = tuple[str, list[Values]]  # the exact part's digest; the floating-point values


def sketch(sample: Any) -> tuple[Sketch, set[str]]:
    """A sketch of a sample, and the classes of what it leaves out because it has no stable content."""
    digest, floats, left_out = hashlib.blake2b(digest_size=16), list[Floats](), set[str]()
    _feed(sample, digest, floats, left_out, 0)
    if len(floats) > _LEAVES:
        floats[_LEAVES:] = [_looked_at(np.concatenate(floats[_LEAVES:]))]
    return (digest.hexdigest(), [_values(leaf) for leaf in floats]), left_out


def digest_of(sample: Any) -> bytes:
    """A digest by which one process knows a sample again: floating-point values count bit by bit."""
    digest, floats = hashlib.blake2b(digest_size=8), list[Floats]()
    _feed(sample, digest, floats, set(), 0)
    for leaf in floats:
        digest.update(leaf.tobytes())
    return digest.digest()


def stored(saved: Any) -> Sketch:
    """A sketch, from its JSON."""
    return saved[0], [Values(*values) for values in saved[1]]


def differ(first: Sketch, other: Sketch) -> bool:
    if first[0] != other[0] or len(first[1]) != len(other[1]):
        return True
    return any(_apart(mine, theirs) for mine, theirs in zip(first[1], other[1], strict=True))


def _apart(first: Values, other: Values) -> bool:
    if first.elements != other.elements:
        return True
    near = _near(first.elements)
    rounding = 0.0
    if first.large != other.large:
        rounding = max(first.rounding, other.rounding) * max(first.largest, other.largest)
    # Rounding may lift the largest element over an edge; then one process has a decade more above, of all elements.
    top = min(max(map(int, filter(None, v.decades)), default=_ANY) for v in (first, other))
    none = [0.0] * 5
    for decade in first.decades.keys() | other.decades.keys():
        if decade and int(decade) > top:
            continue
        mine, theirs = first.decades.get(decade, none), other.decades.get(decade, none)
        allowed = near * max(mine[1], theirs[1])
        if decade:
            allowed += rounding * math.sqrt(max(mine[0], theirs[0]))
        if any(abs(a - b) > allowed for a, b in zip(mine[2:], theirs[2:], strict=True)):
            return True
    return False


def _near(elements: int) -> float:
    return next(relative for most, relative in _NEAR if elements <= most)


def _feed(value: Any, digest: Any, floats: list[Floats], left_out: set[str], depth: int) -> None:
    def below(parts: Iterable[Any]) -> None:
        for part in parts:
            _feed(part, digest, floats, left_out, depth + 1)

    kind = type(value)
    if depth > _DEPTH:
        left_out.add(f"deepest {kind.__name__}")
    elif isinstance(value, Mapping):
        digest.update(f"map {len(value)};".encode())
        below(part for pair in value.items() for part in pair)
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)};".encode())
        below(value)
    elif isinstance(value, set | frozenset):
        digest.update(f"set {sorted(map(repr, value)) if _is_of_plain(value) else len(value)};".encode())
    elif isinstance(value, bytes | bytearray | memoryview):
        digest.update(f"bytes {len(value)};".encode())
        digest.update(value)
    elif isinstance(value, float):
        _feed_array(np.float64(value).reshape(1), digest, floats)
    elif value is None or isinstance(value, str | int | complex):
        digest.update(f"{kind.__name__} {value!r};".encode())
    elif (array := _array(value)) is not None:
        digest.update(f"{array.dtype.str}{array.shape};".encode())
        _feed_array(array, digest, floats)
    elif dataclasses.is_dataclass(value):
        digest.update(f"{kind.__name__};".encode())
        below(getattr(value, f.name) for f in dataclasses.fields(value))
    else:
        left_out.add(kind.__name__)
        digest.update(f"{kind.__name__};".encode())


def _is_of_plain(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str | int | float | bytes) for value in values)


def _array(value: Any) -> npt.NDArray[Any] | None:
    """A tensor, an array, or an image of PIL; None for what has no content of numbers."""
    try:
        if isinstance(value, torch.Tensor):
            tensor = value.detach()
            tensor = tensor.cpu() if tensor.layout is torch.strided and not tensor.is_quantized else tensor.to_dense()
            array = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).resolve_conj().numpy()
        elif hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
            array = np.asarray(value)
        else:
            return None
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if array.dtype.hasobject else np.ascontiguousarray(array)


def _feed_array(array: npt.NDArray[Any], digest: Any, floats: list[Floats]) -> None:
    if array.dtype.kind not in "fc":
        digest.update(array.tobytes())
        return
    flat = array.reshape(-1)
    flat = _looked_at(flat.view(flat.real.dtype) if array.dtype.kind == "c" else flat).astype(np.float64)
    if (odd := np.flatnonzero(~np.isfinite(flat))).size:
        digest.update(odd.tobytes() + str(flat[odd].tolist()).encode())
        flat = np.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0)
    floats.append(flat)


def _looked_at(flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return flat[:: -(-flat.size // _LARGEST) or 1]


def _values(flat: Floats) -> Values:
    size = np.abs(flat)
    largest = float(size.max(initial=0.0))
    large = hashlib.blake2b(flat[size >= _LARGE * largest].tobytes(), digest_size=8).hexdigest()
    if largest > _HUGE:
        flat, size = flat / _HUGE, size / _HUGE
    decades = {"": _projected(flat, flat)}
    if (inside := size[size > 0]).size:
        top = math.floor(math.log10(inside.max()))
        lowest = max(math.floor(math.log10(inside.min())) + 1, top - _DECADES)
        for exponent in range(top, lowest - 1, -1):
            # An element that rounding lifts over the edge is nothing on both sides of it.
            edge = 10.0**exponent
            below = np.where(size < edge, flat, 0.0)
            decades[str(exponent)] = _projected(below * (1 - np.abs(below) / edge), below)
    with np.errstate(over="ignore"):
        is_double = flat.size <= _NEAR[1][0] and not bool(np.all(flat.astype(np.float32) == flat))
    rounding = _NEAR_DOUBLE if is_double else _near(flat.size)
    return Values(flat.size, float(inside.max(initial=0.0)), rounding, large, decades)


def _projected(weighed: Floats, below: Floats) -> list[float]:
    signs = _signs()[:, : weighed.size]
    return [float(np.count_nonzero(below)), float(np.sqrt(below @ below)), *(signs @ weighed).tolist()]


@cache
def _signs() -> Floats:
    drawn = np.random.Generator(np.random.Philox(key=1)).integers(0, 2, size=(3, _LARGEST))
    return drawn.astype(np.float64) * 2 - 1
