"""An ordinary `torch.utils.data.DataLoader` taken over: the same data, cut for each world, with a position.

Its dataset, collate function and workers stay as they are. Its `batch_size` is that of one process, so the global batch
is `batch_size` times the processes that the job is built for, and stays that at any world size. Its sampler says the
order: a plain shuffle and a `DistributedSampler` are known by their classes, any other draws, as
`everstep.data.randomness.draws` says.
Invariant: what a DataLoader decides in a way that cannot be cut again or found again is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from everstep.data.errors import LoaderUnusable
from everstep.data.loader import ElasticLoader
from everstep.data.mixture import Mixture
from everstep.data.plan.assignment import World
from everstep.data.workers import DEFAULT_CONTEXT

log = logging.getLogger("everstep.data")


class TakenOver(ElasticLoader):
    """The loader that replaces `loader`. `ranks`: the processes for which the job is built. `world`: this process's
    place in the present one. `sizes`: of the worlds for which a `DistributedSampler` may have been made; by default the
    present one's. `batches`: how many of the loader's batches a process takes in a step. Raises LoaderUnusable."""

    _seed_was_passed = False  # a script that seeds nothing has another in each process

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        ranks: int,
        world: World,
        sizes: frozenset[int] | None = None,
        batches: int = 1,
        compare_samples: bool = True,
    ) -> None:
        sampler, self.batch_size, drop_last = _batches(loader)
        self.batches = batches
        # What keeps the batch in a larger world.
        self.batch_advice = (
            f"To train with {self.batch_size} samples a step, write run.loader(dataset, global_batch={self.batch_size})"
        )
        order = _order(loader, sampler, frozenset({world.size}) if sizes is None else sizes)
        super().__init__(
            loader.dataset,
            global_batch=self.batch_size * ranks * batches,
            micro_batch=self.batch_size if batches > 1 else None,
            rank=world.rank,
            world_size=world.size,
            drop_last=drop_last,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            prefetch_factor=loader.prefetch_factor,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            persistent_workers=loader.persistent_workers,
            multiprocessing_context=loader.multiprocessing_context or DEFAULT_CONTEXT,
            compare_samples=compare_samples,
            **order,
        )
        self._loader = loader
        self._facts = _facts(loader)

    @property
    def processes(self) -> int:
        """How many processes have the samples of a step, each its batches: those that the run began with."""
        return self._progress.cursor.global_batch // (self.batch_size * self.batches)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As of an `ElasticLoader`; and the global batch is the saved one, if it is as many times `batch_size` as that
        job had processes."""
        saved, own = state.get("global_batch"), self._progress.cursor.global_batch
        if isinstance(saved, int) and state.get("batch_size") == self.batch_size and saved != own:
            log.warning(
                "DataLoader(batch_size=%d): the run began with %d processes, and goes on with their global_batch=%d",
                self.batch_size, saved // self.batch_size, saved,
            )  # fmt: skip
            self._progress.rebatch(saved)
        super().load_state_dict(state)

    def agree(self, seed: int) -> None:
        """Take the seed of rank 0, before the first step: where a script seeded nothing each rank has another."""
        self._progress.reseed(seed)
        self._live = None

    def _begin(self) -> Any:
        for (name, was), (_, now) in zip(self._facts, _facts(self._loader), strict=True):
            if was is not now and was != now:
                raise LoaderUnusable(
                    f"the DataLoader's {name} was {was} when run.steps() took it, and is {now}: later changes of"
                    " it have no effect on the training. To train with a changed loader, start another run that goes on"
                    " from the commits of this one, with run.loader(…, allow_changes=…)"
                )
        return super()._begin()


def name_of(loader: DataLoader[Any]) -> str:
    """The loader's description in an error: its dataset and its sampler."""
    kind = type(loader).__qualname__
    sampler = loader.sampler if type(loader.batch_sampler) in (BatchSampler, type(None)) else loader.batch_sampler
    return f"the {kind} of {type(loader.dataset).__qualname__} ({type(sampler).__qualname__})"


def _batches(loader: DataLoader[Any]) -> tuple[Any, int, bool]:
    """The sampler of single samples, the batch of one process, and whether a batch that is not full is left out."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise LoaderUnusable(
            f"{type(loader).__qualname__} iterates in a way of its own, and the position in that is not known: pass a"
            " torch.utils.data.DataLoader, before it is prepared or wrapped by anything"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise LoaderUnusable(
            f"{type(loader.dataset).__qualname__} is an IterableDataset: it can only be read from the front, and"
            " each process would read all of it. Give it __len__ and __getitem__; or describe its files by"
            " everstep.data.ShardedDataset([Shard(name, samples), …], open_shard); or write"
            " run.steps(run.loader(everstep.data.Stream(dataset, length), global_batch=…), …), with the samples of an"
            " epoch as its length"
        )
    batches = loader.batch_sampler
    if batches is None:
        raise LoaderUnusable(
            "batch_size=None: the dataset makes batches itself, which cannot be cut for another world. Let it give"
            " single samples, and pass batch_size="
        )
    if type(batches) is not BatchSampler:
        raise LoaderUnusable(
            f"batch_sampler={type(batches).__qualname__}(…) makes batches itself, which cannot be cut for another"
            " world. Pass what gives it its order as sampler=, and batch_size="
        )
    return batches.sampler, batches.batch_size, batches.drop_last


def _order(loader: DataLoader[Any], sampler: Any, sizes: frozenset[int]) -> dict[str, Any]:
    """The seed and order, as arguments of an ElasticLoader."""
    samples = _size(loader.dataset)
    generator = getattr(sampler, "generator", None) or loader.generator
    seed = (generator or torch).initial_seed() % 2**64
    iterates = type(sampler).__iter__
    if isinstance(loader.dataset, Mixture):
        if iterates is not SequentialSampler.__iter__:
            raise LoaderUnusable(
                f"{type(sampler).__qualname__}: a Mixture has an order of its own: leave out shuffle= and sampler= of"
                " the DataLoader, and pass shuffle= to Mixture"
            )
        return {"seed": seed}
    if iterates is DistributedSampler.__iter__:
        _check_cut(sampler, sizes, samples)
        return {"seed": sampler.seed % 2**64, "shuffle": sampler.shuffle}
    if iterates is SequentialSampler.__iter__ and _size(sampler) == samples:
        return {"shuffle": False}
    if iterates is RandomSampler.__iter__ and not sampler.replacement and _size(sampler) == samples:
        return {"seed": seed, "shuffle": True}
    return {"seed": seed, "sampler": sampler}


def _check_cut(sampler: DistributedSampler[Any], sizes: frozenset[int], samples: int) -> None:
    name = type(sampler).__qualname__
    if _size(sampler.dataset) != samples:
        raise LoaderUnusable(
            f"{name} is for {_size(sampler.dataset)} samples, and the dataset has {samples}: make it for the"
            f" DataLoader's own dataset, {name}(dataset)"
        )
    if sampler.num_replicas not in sizes:
        raise LoaderUnusable(
            f"{name}(num_replicas={sampler.num_replicas}, rank={sampler.rank}) is not cut for the processes of this job"
            f" ({' or '.join(map(str, sorted(sizes)))}), and the session cuts the data for all of them: leave out"
            f" num_replicas= and rank=, or the {name} altogether"
        )


def _size(dataset: Any) -> int:
    """Its length; 0 for one that has none, which the loader refuses in its own words."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return 0


def _facts(loader: DataLoader[Any]) -> tuple[tuple[str, Any], ...]:
    """The settings taken from a DataLoader that a script can change afterwards."""
    batches: Any = loader.batch_sampler
    return (
        ("batch_sampler.batch_size", batches.batch_size),
        ("batch_sampler.drop_last", batches.drop_last),
        ("batch_sampler.sampler", batches.sampler),
        ("collate_fn", loader.collate_fn),
        ("worker_init_fn", loader.worker_init_fn),
        ("num_workers", loader.num_workers),
    )
