"""Compares the fingerprints of two datasets: whether a saved position fits the dataset.

Compares length always, then the best that both sides have: an identity given by the user or by the dataset's own
`fingerprint()`, else the class name. Knows torch tensors by their methods only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from everstep.data.errors import DatasetUnusable
from everstep.data.plan.permutation import MAX_N

MAX_IDENTITY: Final = 256
_MAX_DEPTH: Final = 16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`identity` is "" where there is none."""

    length: int
    kind: str
    identity: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of {self.length} samples" + (f", identity {self.identity!r}" if self.identity else "")


_FORWARD = (
    "pass everstep.data.Stream(dataset, length=…) if it can only be read forward, or describe its shards and their"
    " lengths with everstep.data.ShardedDataset"
)


def length_of(dataset: Any) -> int:
    """The number of samples. Raises DatasetUnusable for a dataset without length, without indexing, or empty."""
    name = type(dataset).__name__
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError) as e:
        raise DatasetUnusable(
            f"dataset {name} has no length: a position in it cannot be found again. Give it __len__ and __getitem__,"
            f" or {_FORWARD}"
        ) from e
    # torch's IterableDataset has a __getitem__, which only raises.
    if not hasattr(dataset, "__getitem__") or any(c.__name__ == "IterableDataset" for c in type(dataset).__mro__):
        raise DatasetUnusable(
            f"dataset {name} can only be iterated: samples are read by index. Give it __getitem__, or {_FORWARD}"
        )
    if not 1 <= length <= MAX_N:
        raise DatasetUnusable(f"dataset {name} has {length} samples: between 1 and {MAX_N} are expected")
    return length


def fingerprint(dataset: Any, *, identity: str | None = None) -> Fingerprint:
    """The fingerprint of a map-style dataset.

    `identity`: the user's own name and version of the data; by default what the dataset's `fingerprint()` returns, if
    it has one. Raises DatasetUnusable.
    """
    length = length_of(dataset)
    if identity is None:
        own = getattr(dataset, "fingerprint", None)
        identity = str(own()) if callable(own) else ""
    if len(identity) > MAX_IDENTITY:
        identity = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    return Fingerprint(length, type(dataset).__qualname__, identity)


def difference(saved: Fingerprint, own: Fingerprint) -> str | None:
    """The difference that shows that the two are not the same dataset; None if there is none.

    The class name counts only where no identity can be compared: code moves, data stays.
    """
    if saved.length != own.length:
        return f"its length was {saved.length} and is {own.length}"
    if saved.identity and own.identity:
        return None if saved.identity == own.identity else f"it was {saved.identity!r} and is {own.identity!r}"
    if saved.kind != own.kind:
        return f"it was a {saved.kind} and is a {own.kind}"
    return None


def digest_of(sample: Any) -> bytes:
    """A digest of a sample; of what cannot be hashed in it, of the name of its class."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, sample, 0)
    return digest.digest()


def _feed(digest: Any, value: Any, depth: int) -> None:
    """Hash a sample by what it holds: arrays, tensors, text, bytes, numbers, and containers of them."""
    if depth > _MAX_DEPTH:
        _put(digest, "class", type(value).__qualname__.encode())
    elif isinstance(value, Mapping):
        _put(digest, "map", str(len(value)).encode())
        for key, item in value.items():
            _feed(digest, key, depth + 1)
            _feed(digest, item, depth + 1)
    elif isinstance(value, list | tuple):
        _put(digest, "list", str(len(value)).encode())
        for item in value:
            _feed(digest, item, depth + 1)
    elif isinstance(value, bytes | bytearray):
        _put(digest, "bytes", bytes(value))
    elif value is None or isinstance(value, str | int | float | complex):
        _put(digest, type(value).__name__, repr(value).encode())
    elif (array := _array(value)) is not None and not array.dtype.hasobject:
        _put(digest, f"{array.dtype.str}{array.shape}", array.tobytes())
    else:
        _put(digest, "class", type(value).__qualname__.encode())


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    """Arrays and tensors of the same values hash the same; a type that numpy lacks (bfloat16) is hashed as float32.
    None for what is neither."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        try:
            value = value.numpy()
        except TypeError:
            value = value.float().numpy()
    return np.ascontiguousarray(value) if hasattr(value, "__array__") else None


def _put(digest: Any, tag: str, data: bytes) -> None:
    digest.update(f"{tag}:{len(data)}:".encode())
    digest.update(data)
