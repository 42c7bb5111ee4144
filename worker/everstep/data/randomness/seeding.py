"""Randomness that belongs to the sample, not to the process that happens to read it.

A sample's augmentation must not depend on the world size, the number of workers, or how often the run was disturbed.
So each sample has a seed of its own, made of (seed, epoch, index), and while it is read the global generators of
Python, numpy and torch are set by it. The generators of the training process itself are put back afterwards: reading
data without workers must not change what dropout draws. Knows torch only if the process has loaded it.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from everstep.data.errors import DataError


@dataclass(slots=True)
class Reading:
    """The sample that is being read. `index` moves from sample to sample; None while a dataset reads many at once."""

    seed: int
    epoch: int
    index: int | None = None


_now: ContextVar[Reading | None] = ContextVar("everstep_reading", default=None)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """64 bits that depend on nothing but the run's seed, the epoch and the sample."""
    packed = struct.pack("<QQQ", seed, epoch, index)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=b"everstep sample").digest(), "little")


def sample_rng(index: int | None = None) -> np.random.Generator:
    """A generator for the sample that is being read; call it in `__getitem__` or a transform.

    `index`: needed only where the dataset reads many samples at once (`__getitems__`). Raises DataError outside an
    everstep loader.
    """
    reading = _now.get()
    if reading is None:
        raise DataError("sample_rng() works while an everstep loader reads a sample: call it in the dataset")
    wanted = reading.index if index is None else index
    if wanted is None:
        raise DataError("sample_rng() does not know which of the batch's samples is meant: pass its index")
    return np.random.Generator(np.random.Philox(key=sample_seed(reading.seed, reading.epoch, wanted)))


@contextmanager
def reading(what: Reading) -> Iterator[Reading]:
    """Make `sample_rng` work for `what`."""
    token = _now.set(what)
    try:
        yield what
    finally:
        _now.reset(token)


def seed_generators(value: int) -> None:
    """Set the global generators of Python, numpy and torch."""
    random.seed(value)
    np.random.seed(value >> 32)  # all that it takes in one word; more is twenty times slower
    if "torch" in sys.modules:
        # Not torch.manual_seed, which also visits every accelerator: that is slow, and breaks in a forked worker.
        sys.modules["torch"].default_generator.manual_seed(value)


def generator_states() -> tuple[Any, Any, Any]:
    """The states of the global generators, for `put_back`."""
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), torch.get_rng_state() if torch else None


def put_back(states: tuple[Any, Any, Any]) -> None:
    """Set the global generators to these states."""
    python, numpy, words = states
    random.setstate(python)
    np.random.set_state(numpy)
    if words is not None:
        sys.modules["torch"].set_rng_state(words)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the global generators back as they were."""
    states = generator_states()
    try:
        yield
    finally:
        put_back(states)
