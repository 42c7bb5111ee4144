"""A dataset that is a list of shards of known lengths: files, row groups, objects in a bucket.

Gives a sample for an index, so that it can be shuffled and resumed like any other dataset, from shards that may only be
readable from front to back. Memory is bounded: at most `open_limit` shards are held by a process at a time, each up to
the sample last asked for. Meant for `Blocks(window=…)` with `window <= open_limit`: then every reader opens each shard
once an epoch. Knows no torch and no storage: `open_shard` does the reading.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from everstep.data.errors import DataError, DatasetUnusable
from everstep.data.plan.order import Blocks, Shuffle


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: a name that `open_shard` understands, and how many samples it holds."""

    name: str
    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise DatasetUnusable(f"shard {self.name!r} has length {self.length}: leave out shards without samples")


class ShardedDataset:
    """Samples of `shards`, one shard after the other.

    `open_shard(name)` returns a sequence (read at random) or an iterable (read forward, and kept while the shard is
    open). What it returns is closed with `close()` if it has that. `transform` is applied to each sample that is given
    out, under that sample's own random seed; put augmentation there and not into the reading. With worker processes
    that are not forked, both must be picklable.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        open_shard: Callable[[str], Sequence[Any] | Iterable[Any]],
        *,
        transform: Callable[[Any], Any] | None = None,
        open_limit: int = 16,
        identity: str = "",
    ) -> None:
        if not shards:
            raise DatasetUnusable("a ShardedDataset without shards: pass at least one")
        names = Counter(shard.name for shard in shards)
        if twice := sorted(name for name, count in names.items() if count > 1):
            raise DatasetUnusable(
                f"a ShardedDataset with shard {twice[0]!r} {names[twice[0]]} times: each of its samples would come so"
                " often in an epoch. Name each shard once; to take some data more often, use everstep.data.Mixture"
            )
        if open_limit < 1:
            raise DataError(f"open_limit={open_limit}: at least 1 open shard is expected")
        self.shards = tuple(shards)
        self._ends = list(accumulate(s.length for s in self.shards))
        self._open_shard = open_shard
        self._transform = transform
        self.open_limit = open_limit
        self._identity = identity
        self._open: OrderedDict[int, _Sequence | _Forward] = OrderedDict()  # least recently used first

    @property
    def lengths(self) -> tuple[int, ...]:
        """Samples by shard."""
        return tuple(s.length for s in self.shards)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Raises IndexError outside the dataset, DatasetUnusable for a shard that is not as long as declared."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        number = bisect_right(self._ends, index)
        offset = index - (self._ends[number] - self.shards[number].length)
        sample = self._opened(number).read(offset)
        return sample if self._transform is None else self._transform(sample)

    def fingerprint(self) -> str:
        """Names and lengths of the shards, in order, and `identity`."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            digest.update(f"{len(shard.name)}:{shard.name}:{shard.length};".encode())
        digest.update(self._identity.encode())
        return f"shards:{digest.hexdigest()}"

    def close(self) -> None:
        """Close the open shards. They are opened again when needed."""
        while self._open:
            self._open.popitem()[1].close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # a worker opens its own

    def _opened(self, number: int) -> _Sequence | _Forward:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        while len(self._open) >= self.open_limit:
            self._open.popitem(last=False)[1].close()
        shard = self.shards[number]
        source = self._open_shard(shard.name)
        opened = _Sequence(shard, source) if isinstance(source, Sequence) else _Forward(shard, source)
        self._open[number] = opened
        return opened


def blocks_of(dataset: Any, shuffle: Shuffle) -> tuple[int, ...] | None:
    """The shards' lengths, if the dataset has shards. Raises DataError for a window that it cannot hold open."""
    if not isinstance(dataset, ShardedDataset):
        return None
    if isinstance(shuffle, Blocks) and shuffle.size is None and shuffle.window > dataset.open_limit:
        raise DataError(
            f"Blocks(window={shuffle.window}) mixes more shards than open_limit={dataset.open_limit} holds open, so"
            f" shards would be read again and again: pass open_limit={shuffle.window} or more to ShardedDataset"
        )
    return dataset.lengths


class _Sequence:
    """An open shard that is read at random."""

    def __init__(self, shard: Shard, source: Sequence[Any]) -> None:
        self._source = source
        if len(source) != shard.length:
            raise _wrong_length(shard, str(len(source)))

    def read(self, offset: int) -> Any:
        return self._source[offset]

    def close(self) -> None:
        _close(self._source)


class _Forward:
    """An open shard that can only be read from front to back: what was read is kept until it is closed."""

    def __init__(self, shard: Shard, source: Iterable[Any]) -> None:
        self._shard = shard
        self._source = source
        self._rest: Iterator[Any] = iter(source)
        self._read: list[Any] = []

    def read(self, offset: int) -> Any:
        while len(self._read) <= offset:
            try:
                self._read.append(next(self._rest))
            except StopIteration:
                raise _wrong_length(self._shard, str(len(self._read))) from None
            if len(self._read) == self._shard.length and next(self._rest, _END) is not _END:
                raise _wrong_length(self._shard, "more")
        return self._read[offset]

    def close(self) -> None:
        _close(self._source)


_END = object()


def _close(source: Any) -> None:
    close = getattr(source, "close", None)
    if callable(close):
        close()


def _wrong_length(shard: Shard, actual: str) -> DatasetUnusable:
    return DatasetUnusable(
        f"shard {shard.name!r} was declared with {shard.length} samples and holds {actual}: declare its true length"
    )
