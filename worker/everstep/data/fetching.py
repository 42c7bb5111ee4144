"""The dataset as DataLoader workers see it: a request in, samples out, each read under its own random seed.

Samples are visited in ascending order, which is kind to storage, and returned in the order that was asked for. Runs in
worker processes, or in the training process when there are none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple
from typing import Any, NamedTuple

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from everstep.data.randomness.generators import AnyGenerator, generators_of, kept
from everstep.data.randomness.seeding import Reading, generators_kept, reading, sample_seed, seed_generators
from everstep.data.stream import Mark, Stream


class Request(NamedTuple):
    """The samples of one micro-batch. A tuple of a list: it is pickled for every batch, and an array takes longer."""

    seed: int
    epoch: int
    samples: list[int]
    first: int = 0  # of the whole step: its number in the epoch


class Rows(list[Any]):
    """The samples of a request; `mark`: where a stream can begin again, by what all ranks have read before the step."""

    mark: Mark | None = None


class Collating:
    """Keeps the mark of a stream beside what `collate_fn` makes of its rows."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate or default_collate

    def __call__(self, rows: Rows) -> tuple[Any, str]:
        return self._collate(list(rows)), json.dumps(astuple(rows.mark)) if rows.mark else ""


class Fetching(Dataset[Any]):
    """Wraps a map-style dataset. `seeded`: set the random generators, the global ones and those that the dataset holds,
    for each sample.

    Without it, a dataset that can read many samples at once (`__getitems__`) does so; a worker's generators are set for
    each request then, because how many a worker has read before depends on how often the run was disturbed. In the
    training process they are those of the step. So it is with torch's own datasets of tensors, which draw nothing:
    setting three generators takes longer there than reading the sample.
    """

    def __init__(self, dataset: Any, seeded: bool) -> None:
        self._dataset = dataset
        self._seeded = seeded and not _only_indexes(dataset)
        self._requests = 0
        self._generators: tuple[AnyGenerator, ...] = ()

    @property
    def source(self) -> Any:
        """The dataset that it wraps."""
        return self._dataset

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_requests": 0, "_generators": ()}  # a worker finds those of its own copy

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, request: Request) -> list[Any]:
        """The samples of a request, for torch's fetcher to collate."""
        wanted = request.samples
        if isinstance(self._dataset, Stream):
            self._dataset.move(request.epoch, request.first)
        in_worker = get_worker_info() is not None
        if in_worker and not self._seeded and wanted:
            seed_generators(sample_seed(request.seed, request.epoch, wanted[0]))
        at_once = getattr(self._dataset, "__getitems__", None)
        if not self._seeded and callable(at_once):
            with reading(Reading(request.seed, request.epoch)):
                return list(at_once(wanted))
        self._requests += 1
        if self._seeded and not self._requests & (self._requests - 1):  # a worker may make them when it has begun
            self._generators = generators_of(
                self._dataset.transform if isinstance(self._dataset, Stream) else self._dataset
            )
        # The training process has generators of its own to keep; a worker's serve nothing but samples.
        keep = self._seeded and not in_worker
        with (
            generators_kept() if keep else nullcontext(),
            kept(self._generators if keep else ()),
            reading(Reading(request.seed, request.epoch)) as now,
        ):
            try:
                rows = Rows(self._one_by_one(wanted, now))
                if isinstance(self._dataset, Stream):
                    rows.mark = self._dataset.mark(request.first)
                return rows
            except Exception as e:
                e.add_note(f"while reading sample {now.index} in epoch {request.epoch}")
                raise

    def _one_by_one(self, wanted: list[int], now: Reading) -> list[Any]:
        rows: list[Any] = [None] * len(wanted)
        for row in sorted(range(len(wanted)), key=wanted.__getitem__):
            now.index = index = wanted[row]
            if self._seeded:
                value = sample_seed(now.seed, now.epoch, index)
                seed_generators(value)
                for generator in self._generators:
                    generator.seed(value)
            rows[row] = self._dataset[index]
        return rows


def _only_indexes(dataset: Any) -> bool:
    """Whether a sample is rows of tensors, which no code but torch's own reads. A subclass may draw."""
    kind = type(dataset)
    if kind is TensorDataset:
        return all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
    if kind is Subset:
        return _only_indexes(dataset.dataset)
    return kind is ConcatDataset and all(map(_only_indexes, dataset.datasets))
