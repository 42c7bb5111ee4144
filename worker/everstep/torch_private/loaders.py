"""`DataLoader`: its iterators, how far each is, and its worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from everstep.torch_private.patches import Replacements, around, replace

DATASET = "_dataset"  # the attribute of an iterator that has what it reads


def replace_next(replaced: Replacements, make: Callable[[Any], Any]) -> None:
    """Replace, until `replaced.end()`, the function by which all iterators of loaders give their next batch."""
    replaced.put("__next__", make, _BaseDataLoaderIter)


def given_by(iterator: Any) -> int:
    """How many batches the iterator has given in this epoch."""
    return int(iterator._num_yielded)


def sampler_of(loader: Any) -> Any:
    """What gives the indices: of a loader, or of an iterator of one."""
    return loader._index_sampler


def behind_each_fetch(fetched: Callable[[Any, Any], None]) -> None:
    """Call a function with the dataset and its collate function behind each fetch, in this process and in the workers
    that are forked from it, until this process ends."""

    def fetch(function: Any, fetcher: Any, index: Any) -> Any:
        batch = function(fetcher, index)
        fetched(fetcher.dataset, fetcher.collate_fn)
        return batch

    replace("fetch", around(fetch), _IterableDatasetFetcher, _MapDatasetFetcher)


def dataset_of(iterator: Any) -> Any:
    """What the iterator reads."""
    return iterator._dataset


def kept_iterator(loader: DataLoader[Any] | None) -> Any:
    """The iterator that a loader with persistent workers keeps; None if it has none."""
    return getattr(loader, "_iterator", None)


def stop_workers(iterator: Any) -> None:
    """End the worker processes of an iterator, if it has any."""
    if (stop := getattr(iterator, "_shutdown_workers", None)) is not None:
        stop()


@contextmanager
def as_only_reader() -> Iterator[None]:
    """A context in which `get_worker_info()` answers None: what is read then is not one of several workers' part."""
    import torch.utils.data._utils.worker as workers  # noqa: PLC0415  it is imported with torch

    info, workers._worker_info = workers._worker_info, None
    try:
        yield
    finally:
        workers._worker_info = info
