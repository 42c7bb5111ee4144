"""A sampler's epochs as a function of (seed, epoch), so that a new process finds the place in them where it goes on.

A sampler of torch's, or of the script's own, draws the samples of an epoch when it is iterated, from generators that
nobody saves. Here it is iterated with all these generators set by seed and epoch, after `set_epoch` if it has that.
So it draws the same for an epoch, whenever and wherever it is asked, and what it draws can be cut for any world.
Invariant: a sampler that does not is refused: when it is taken, or by the digest in a position that is loaded.
"""

from __future__ import annotations

import hashlib
from itertools import islice
from typing import Any, Final

import numpy as np

from everstep.data.errors import LoaderUnusable
from everstep.data.plan.order import Drawn
from everstep.data.plan.permutation import MAX_N, Indices
from everstep.data.randomness.generators import generators_of, kept
from everstep.data.randomness.seeding import generators_kept, sample_seed, seed_generators

_SAMPLER: Final = 2**64 - 1  # no sample has this index
DIGEST_BYTES: Final = 8


def drawn_by(sampler: Any, samples: int) -> Drawn:
    """The order that `sampler` draws of a dataset of so many samples. Raises LoaderUnusable."""
    name = type(sampler).__qualname__
    length = _length(sampler, name)
    cuts = getattr(sampler, "num_replicas", 1)
    if cuts not in (None, 1):
        raise LoaderUnusable(
            f"{name} takes the share of one of num_replicas={cuts} processes by itself. The loader cuts for each world:"
            f" make it draw for all, {name}(…, num_replicas=1, rank=0)"
        )
    draws = Draws(sampler, name, length, samples)
    first = draws.fresh(0, 0)
    draws.fresh(0, 1)
    if not np.array_equal(first, draws.fresh(0, 0)):
        raise LoaderUnusable(
            f"{name} draws other samples when it is asked for the same epoch again, so a new process could not find its"
            " place. Let it draw by set_epoch(epoch) and by generators that are its attributes, or the global ones, and"
            " by nothing that it counts itself"
        )
    return Drawn(name, length, draws)


def digest(drawn: Indices) -> str:
    """A digest that tells one epoch's samples from another's, in hexadecimal."""
    return hashlib.blake2b(np.ascontiguousarray(drawn, dtype="<i8").tobytes(), digest_size=DIGEST_BYTES).hexdigest()


class Draws:
    """The draws of one sampler; the newest are kept, for the many times that a plan begins in one epoch."""

    def __init__(self, sampler: Any, name: str, length: int, samples: int) -> None:
        self._sampler, self._name, self._length, self._samples = sampler, name, length, samples
        self._newest: tuple[int, int, Indices] | None = None

    def __call__(self, seed: int, epoch: int) -> Indices:
        if self._newest is None or self._newest[:2] != (seed, epoch):
            self._newest = seed, epoch, self.fresh(seed, epoch)
        return self._newest[2]

    @property
    def newest(self) -> tuple[int, Indices] | None:
        """The epoch that was asked for last, and its samples."""
        return self._newest[1:] if self._newest is not None else None

    def fresh(self, seed: int, epoch: int) -> Indices:
        """Iterate the sampler. Leaves all generators as they were. Raises LoaderUnusable."""
        value = sample_seed(seed, epoch, _SAMPLER)
        own = generators_of(self._sampler)
        with generators_kept(), kept(own):
            seed_generators(value)
            for generator in own:
                generator.seed(value)
            if callable(move := getattr(self._sampler, "set_epoch", None)):
                move(epoch)
            drawn = list(islice(iter(self._sampler), self._length + 1))
        return self._checked(drawn, epoch)

    def _checked(self, drawn: list[Any], epoch: int) -> Indices:
        if len(drawn) != self._length:
            many = f"{len(drawn)}" if len(drawn) < self._length else "more"
            raise LoaderUnusable(
                f"{self._name} has length {self._length} and draws {many} samples in epoch {epoch}: let __len__ say how"
                " many it draws, the same in each epoch"
            )
        try:
            samples = np.array([index.__index__() for index in drawn], dtype=np.int64)
        except (AttributeError, TypeError) as e:
            raise LoaderUnusable(
                f"{self._name} draws {next(i for i in drawn if not hasattr(i, '__index__'))!r}: one sample's index at a"
                " time is expected, an integer"
            ) from e
        if samples.min() < 0 or samples.max() >= self._samples:
            raise LoaderUnusable(
                f"{self._name} draws samples {samples.min()} to {samples.max()} of a dataset of {self._samples}:"
                f" 0 to {self._samples - 1} are expected"
            )
        return samples


def _length(sampler: Any, name: str) -> int:
    try:
        length = len(sampler)
    except (TypeError, NotImplementedError) as e:
        raise LoaderUnusable(
            f"{name} has no length, so the position in what it draws cannot be saved: give it __len__, the samples of"
            " an epoch over all processes together"
        ) from e
    if not 1 <= length <= MAX_N:
        raise LoaderUnusable(f"{name} draws {length} samples: between 1 and {MAX_N} are expected")
    return length
