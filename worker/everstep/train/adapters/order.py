"""Checks that the order of a prepared loader's samples can be reproduced."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import IterableDataset, RandomSampler

from everstep.checkpoint import SettingUnusable


def known_order(loader: Any) -> None:
    """Raises `SettingUnusable` unless the order of `loader`'s samples follows from a seed and the epoch."""
    if isinstance(dataset := getattr(loader, "dataset", None), IterableDataset):
        dataset = getattr(dataset, "dataset", dataset)  # Accelerate's own divides it among the ranks
        raise SettingUnusable(
            f"{type(dataset).__name__} is an IterableDataset, which has no position from which a run could go on. Pass "
            "a dataset with __len__ and __getitem__, or everstep.data.ElasticLoader(everstep.data.Stream(dataset, "
            "length), global_batch=…)"
        )
    if not hasattr(loader, "total_batch_size"):
        raise SettingUnusable(
            f"{type(loader).__name__}: a DataLoader that accelerator.prepare() returned, or an everstep.data."
            "ElasticLoader, is expected"
        )
    sampler = loader.get_sampler()
    if isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler):
        raise SettingUnusable(
            "the loader shuffles by a generator whose state at the begin of the epoch is lost, so a resumed epoch "
            "would have another order: pass Accelerator(dataloader_config=DataLoaderConfiguration("
            "use_seedable_sampler=True)), or use everstep.data.ElasticLoader"
        )
