"""`ElasticSampler`: a `DistributedSampler` whose position survives a resize, for those who keep their own loop.

It gives indices and cannot know which of them a DataLoader has prefetched and which were trained on, so the loop says
how many samples were consumed. Ranks take turns in the order of the epoch: after every rank has used k samples, the
first k * num_replicas of the rest of the epoch are used, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np
from torch.utils.data import Sampler

from everstep.data.errors import DataError
from everstep.data.fingerprints import fingerprint
from everstep.data.plan.assignment import World
from everstep.data.plan.cursor import Cursor, check_changes, parse, resume
from everstep.data.plan.order import Shuffle, label, order_of, shuffle_of
from everstep.data.shards import blocks_of
from everstep.data.world import world_of

_CHUNK: Final = 4096


class ElasticSampler(Sampler[int]):
    """Yields this rank's dataset indices for the rest of the epoch.

        sampler = ElasticSampler(dataset, seed=0)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                ...
                optimizer.step()
                sampler.consumed(32 * world_size)        # over all ranks together

    As in `DistributedSampler`, all ranks get equally many indices. With `drop_last=False` up to num_replicas - 1
    samples at the end of an epoch are therefore given out twice; with `drop_last=True` as many are left out.
    `ElasticLoader` does neither, and keeps the global batch when the world changes, which a sampler cannot.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | Shuffle = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        dataset_id: str | None = None,
        allow_changes: Collection[str] = (),
    ) -> None:
        identity = fingerprint(dataset, identity=dataset_id)
        self._shuffle = shuffle_of(shuffle)
        self._shards = blocks_of(dataset, self._shuffle)
        order_of(self._shuffle, identity.length, seed, 0, self._shards)
        self._allowed = check_changes(allow_changes)
        self._cursor = Cursor(seed, 0, 0, 0, label(self._shuffle), identity)
        self._began = 0  # the position that the present iteration began at
        self.drop_last = drop_last
        self.world = world_of(rank, num_replicas)

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    @property
    def cursor(self) -> Cursor:
        """The position after the samples that were reported as consumed."""
        return self._cursor

    def __len__(self) -> int:
        """Indices that this rank gets from where the present iteration began to the end of the epoch."""
        rest = self._cursor.dataset.length - self._began
        return rest // self.num_replicas if self.drop_last else -(-rest // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        """This rank's indices from the consumed position to the end of the epoch."""
        self._began = self._cursor.index
        return self._indices(len(self))

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of `epoch`. The present epoch stays where it is, so that a resumed one goes on."""
        if epoch != self._cursor.epoch:
            self._move(self._cursor.moved(epoch, 0))

    def consumed(self, samples: int) -> None:
        """`samples` more of the epoch are in the parameters, over all ranks together.

        Call it after `optimizer.step()`, on every rank. The end of the epoch is not passed, so the last batch may be
        reported as a full one. An iteration in progress is not affected.
        """
        if samples < 0:
            raise DataError(f"consumed({samples}): report how many samples were used since the last call, at least 0")
        index = min(self._cursor.index + samples, self._cursor.dataset.length)
        self._cursor = self._cursor.moved(self._cursor.epoch, index)

    def reshard(self, rank: int, num_replicas: int) -> None:
        """The world has changed. Takes effect with the next iteration, from the consumed position."""
        self.world = World(rank, num_replicas)
        self._began = self._cursor.index

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def num_replicas(self) -> int:
        return self.world.size

    def state_dict(self) -> dict[str, Any]:
        """The consumed position, as JSON values, in the format of `ElasticLoader`: either can load the other's."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position, with its seed.

        Raises DatasetChanged or PositionMismatch, and changes nothing, for a position that does not fit.
        """
        self._move(resume(parse(state), self._cursor, self._allowed))

    def _move(self, cursor: Cursor) -> None:
        self._cursor, self._began = cursor, cursor.index

    def _indices(self, count: int) -> Iterator[int]:
        cursor, world, n = self._cursor, self.world, self._cursor.dataset.length
        order = order_of(self._shuffle, n, cursor.seed, cursor.epoch, self._shards)
        for start in range(0, count, _CHUNK):
            turns = np.arange(start, min(start + _CHUNK, count), dtype=np.int64)
            yield from order.take((cursor.index + world.rank + turns * world.size) % n).tolist()
