"""Compares the fingerprints of two datasets: whether a saved position fits the dataset.

Compares length always, then the best that both sides have: an identity given by the user or by the dataset's own
`fingerprint()`, else the class name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from everstep.data.errors import DatasetUnusable
from everstep.data.plan.permutation import MAX_N

MAX_IDENTITY: Final = 256


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
