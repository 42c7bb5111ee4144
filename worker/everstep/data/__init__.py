"""Elastic data: every sample exactly once an epoch, in one order, whatever the world size does.

The names below are loaded on first use, so that the pure modules (permutation, order, cursor, assignment, progress) can
be used without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.data.batch import Batch
    from everstep.data.errors import (
        BatchUnusable,
        DataError,
        DatasetChanged,
        DatasetUnusable,
        PositionMismatch,
        Unacknowledged,
    )
    from everstep.data.fingerprints import Fingerprint, fingerprint
    from everstep.data.loader import ElasticLoader
    from everstep.data.mixture import Mixture
    from everstep.data.plan.assignment import World
    from everstep.data.plan.cursor import Cursor
    from everstep.data.plan.order import Blocks
    from everstep.data.plan.permutation import Permutation
    from everstep.data.randomness.seeding import sample_rng
    from everstep.data.sampler import ElasticSampler
    from everstep.data.shards import Shard, ShardedDataset
    from everstep.data.stream import Stream

__all__ = [
    "Batch",
    "BatchUnusable",
    "Blocks",
    "Cursor",
    "DataError",
    "DatasetChanged",
    "DatasetUnusable",
    "ElasticLoader",
    "ElasticSampler",
    "Fingerprint",
    "Mixture",
    "Permutation",
    "PositionMismatch",
    "Shard",
    "ShardedDataset",
    "Stream",
    "Unacknowledged",
    "World",
    "fingerprint",
    "sample_rng",
]

_HOME = {
    "Batch": "batch",
    "Blocks": "plan.order",
    "Cursor": "plan.cursor",
    "ElasticLoader": "loader",
    "ElasticSampler": "sampler",
    "Fingerprint": "fingerprints",
    "Mixture": "mixture",
    "Permutation": "plan.permutation",
    "Shard": "shards",
    "ShardedDataset": "shards",
    "Stream": "stream",
    "World": "plan.assignment",
    "fingerprint": "fingerprints",
    "sample_rng": "randomness.seeding",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
