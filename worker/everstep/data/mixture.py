"""`Mixture`: several datasets as one, in proportions that hold at every position: see `everstep.data.plan.mixing`."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction
from itertools import accumulate
from typing import Any

from everstep.data.errors import DataError, DatasetUnusable
from everstep.data.fingerprints import Fingerprint, fingerprint
from everstep.data.plan.mixing import VERSION, MixedOrder, Part, shares_of
from everstep.data.plan.order import Drawn, Own, Shuffle, label, shuffle_of
from everstep.data.shards import blocks_of

Weight = float | int | Fraction


class Mixture:
    """Samples of several datasets in fixed proportions, for `run.loader(…)` and `ElasticLoader`.

        Mixture({"web": (web, 0.7), "books": (books, 0.2), "code": (code, 0.1)})

    `sources`: by name, a map-style dataset or `ShardedDataset`, and its weight: a proportion of the samples, whatever
    the datasets' lengths are. After any number of steps each source has had its proportion to within one sample, and
    each goes through epochs of its own, each sample once, that run on over those of the mixture.
    `length`: samples of an epoch of the mixture; by default as many as all sources have together. `shuffle`: of each
    source, as of `ElasticLoader`. Raises DataError.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[Any, Weight]],
        *,
        length: int | None = None,
        shuffle: bool | Shuffle = True,
    ) -> None:
        pairs = list(sources.values()) if isinstance(sources, Mapping) else []
        if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            example = '{"web": (web, 0.7), "code": (code, 0.3)}'
            raise DataError(f"Mixture: names with datasets and weights are expected: {example}")
        self._names = [str(name) for name in sources]
        self.datasets = [dataset for dataset, _ in sources.values()]
        self._shuffle = shuffle_of(shuffle)
        if isinstance(self._shuffle, Own | Drawn):
            raise DataError(f"Mixture(shuffle={shuffle!r}): pass True, False or Blocks(size=…, window=…)")
        shares = shares_of({str(name): weight for name, (_, weight) in sources.items()})
        self._identities = [
            _fingerprint(name, dataset) for name, dataset in zip(self._names, self.datasets, strict=True)
        ]
        self._parts = [
            Part(name, shares[name], identity.length, blocks_of(dataset, self._shuffle))
            for name, dataset, identity in zip(self._names, self.datasets, self._identities, strict=True)
        ]
        self._ends = list(accumulate(part.length for part in self._parts))
        self._length = self._ends[-1] if length is None else length
        if not isinstance(self._length, int) or self._length < 1:
            raise DataError(f"Mixture(length={length!r}): at least 1 sample an epoch is expected")

    def __len__(self) -> int:
        """Samples of all sources together."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """The sources' samples one after the other, by number; the loader's order mixes them."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a mixture of {len(self)}")
        k = bisect_right(self._ends, index)
        return self.datasets[k][index - self._ends[k] + self._parts[k].length]

    def source_of(self, index: int) -> str:
        """The name of the source of one of `batch.indices`."""
        return self._names[bisect_right(self._ends, index)]

    def fingerprint(self) -> str:
        """The sources' names, lengths and fingerprints, in order."""
        digest = hashlib.blake2b(digest_size=16)
        for name, identity in zip(self._names, self._identities, strict=True):
            digest.update(f"{len(name)}:{name}:{identity.length}:{identity.identity or identity.kind};".encode())
        return f"mixture:{digest.hexdigest()}"

    def order(self) -> Own:
        """The order by which the loader takes its samples."""
        shares = ":".join(str(part.share) for part in self._parts)
        name = f"mixture-{VERSION}/{shares}/length={self._length}/{label(self._shuffle)}"
        parts, length, shuffle = tuple(self._parts), self._length, self._shuffle
        return Own(name, length, lambda seed, epoch: MixedOrder(parts, length, shuffle, seed, epoch))


def _fingerprint(name: str, dataset: Any) -> Fingerprint:
    try:
        return fingerprint(dataset)
    except DatasetUnusable as e:
        raise DatasetUnusable(f"source {name!r} of the mixture: {e}") from e
