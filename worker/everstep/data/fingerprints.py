"""Compares the fingerprints of two datasets: whether a saved position fits the dataset.

Compares length always, then the best that both sides have: an identity given by the user or by the dataset's own
`fingerprint()`, else the class name. A hash of a few samples is opt-in, because reading is not free and augmented
samples differ from call to call. Knows torch tensors by their methods only.
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
MAX_HASHED: Final = 1024
_MAX_DEPTH: Final = 16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`identity` and `samples` are "" where there is none. `samples`: "<how many>:<hash>"."""

    length: int
    kind: str
    identity: str = ""
    samples: str = ""

    def __str__(self) -> str:
        parts = [f"{self.kind} of {self.length} samples"]
        parts += [f"identity {self.identity!r}"] if self.identity else []
        parts += [f"sample hash {self.samples}"] if self.samples else []
        return ", ".join(parts)


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


def fingerprint(dataset: Any, *, identity: str | None = None, hash_samples: int = 0) -> Fingerprint:
    """The fingerprint of a map-style dataset.

    `identity`: the user's own name and version of the data; by default what the dataset's `fingerprint()` returns, if
    it has one. `hash_samples`: how many samples, evenly spread, to read and hash. Raises DatasetUnusable.
    """
    length = length_of(dataset)
    if identity is None:
        own = getattr(dataset, "fingerprint", None)
        identity = str(own()) if callable(own) else ""
    if len(identity) > MAX_IDENTITY:
        identity = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    if not 0 <= hash_samples <= MAX_HASHED:
        raise DatasetUnusable(f"hash_samples={hash_samples}: between 0 and {MAX_HASHED} are expected")
    samples = ""
    if count := min(hash_samples, length):
        digest = hashlib.blake2b(digest_size=16)
        for i in range(count):
            _feed(digest, dataset[i * (length - 1) // max(count - 1, 1)], 0)
        samples = f"{count}:{digest.hexdigest()}"
    return Fingerprint(length, type(dataset).__qualname__, identity, samples)


def difference(saved: Fingerprint, own: Fingerprint) -> str | None:
    """The difference that shows that the two are not the same dataset; None if there is none.

    The class name counts only where neither an identity nor samples can be compared: code moves, data stays.
    """
    if saved.length != own.length:
        return f"its length was {saved.length} and is {own.length}"
    if saved.identity and own.identity:
        return None if saved.identity == own.identity else f"it was {saved.identity!r} and is {own.identity!r}"
    if saved.samples and own.samples and saved.samples.split(":")[0] == own.samples.split(":")[0]:
        return None if saved.samples == own.samples else "its samples have another hash"
    if saved.kind != own.kind:
        return f"it was a {saved.kind} and is a {own.kind}"
    return None


def digest_of(sample: Any) -> bytes:
    """A digest of a sample; if the sample cannot be hashed, of the name of its class."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        _feed(digest, sample, 0)
    except DatasetUnusable:
        _put(digest, "class", type(sample).__qualname__.encode())
    return digest.digest()


def _feed(digest: Any, value: Any, depth: int) -> None:
    """Hash a sample by what it holds: arrays, tensors, text, bytes, numbers, and containers of them."""
    if depth > _MAX_DEPTH:
        raise DatasetUnusable(f"a sample is nested deeper than {_MAX_DEPTH} levels and cannot be hashed")
    if isinstance(value, Mapping):
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
    elif hasattr(value, "__array__") or hasattr(value, "detach"):
        array = _array(value)
        _put(digest, f"{array.dtype.str}{array.shape}", array.tobytes())
    else:
        raise DatasetUnusable(
            f"a sample holds a {type(value).__name__}, which has no hash: pass dataset_id= instead of hash_samples="
        )


def _array(value: Any) -> np.ndarray[Any, Any]:
    """Arrays and tensors of the same values hash the same; a type that numpy lacks (bfloat16) is hashed as float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        try:
            value = value.numpy()
        except TypeError:
            value = value.float().numpy()
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        raise DatasetUnusable("a sample holds an array of objects: pass dataset_id= instead of hash_samples=")
    return array


def _put(digest: Any, tag: str, data: bytes) -> None:
    digest.update(f"{tag}:{len(data)}:".encode())
    digest.update(data)
