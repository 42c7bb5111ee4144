"""The feed of a run: the loaders that it trains on, elastic ones or ordinary DataLoaders that are taken over.

The loop and the worlds use one `Feed`, which moves all its loaders together. Invariant: all loaders are at the same
step; data that cannot be divided for every world is refused before the first step.
"""

from __future__ import annotations

import logging
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from everstep.contract import refusal
from everstep.data import Batch, DataError, ElasticLoader, Stream
from everstep.data.batch import Weight
from everstep.data.plan.assignment import World
from everstep.data.stream import Mark
from everstep.data.takeover import TakenOver, name_of
from everstep.recovery.errors import LoopError
from everstep.recovery.state.randomness import Gather
from everstep.train.guards import call_mistakes
from everstep.train.guards.common_samples import Source

log = logging.getLogger("everstep.train")


class Feed:
    """`loaders` by name; a single one has the name "". A step gets the result of `pack` on their batches. `sizes`: the
    sizes of the worlds that the run may have."""

    def __init__(
        self,
        loaders: Mapping[str, ElasticLoader],
        pack: Callable[[list[Any]], Any],
        argument: Any = None,
        sizes: Collection[int] = (),
    ) -> None:
        self._argument = argument
        self._loaders = dict(loaders)
        self._pack = pack
        self._streams = [_Endless(loader) for loader in self._loaders.values()]
        self._first = next(iter(self._loaders.values()))
        self._needs = {id(loader): loader.needs_weights(sizes) for loader in self._loaders.values()}
        self.fetched_by: Callable[[Callable[[], Any]], Any] | None = None  # a profile measures how long it takes
        self.fetched = 0.0  # seconds for which the steps have waited for batches
        self._given: list[tuple[ElasticLoader, Weight]] = []  # in the present step
        self._agreed: tuple[int, ...] = ()  # the epochs whose drawn orders are known to be the same on all ranks
        self._read_alike: tuple[tuple[int, int], ...] = ()  # of each stream, the epoch and the mark's number, likewise
        if len(self._loaders) > 1 and (cut := [n for n, loader in self._loaders.items() if loader.micro_batch]):
            raise LoopError(
                f"steps(): loader {cut[0]} has micro_batch=, and a run of several loaders takes one batch of each in a"
                " step: leave it out"
            )

    @property
    def saved(self) -> Any:
        """The object that holds the position, with `state_dict` and `load_state_dict`."""
        return self if len(self._loaders) > 1 else self._first

    @property
    def whole(self) -> bool:
        """Whether a step is one batch, and not several micro-batches."""
        return self._first.micro_batch is None

    @property
    def epoch(self) -> int:
        """The epoch of the first loader; the others have their own."""
        return self._first.epoch

    @property
    def epoch_begins(self) -> bool:
        """Whether no step of the first loader's epoch is complete."""
        return self._first.cursor.index == 0

    def __len__(self) -> int:
        """Steps of an epoch of the first loader."""
        return len(self._first)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch, also across the end of an epoch; with several loaders, one batch of each."""
        began = time.monotonic()
        try:
            return self._fetch() if self.fetched_by is None else self.fetched_by(self._fetch)
        finally:
            self.fetched += time.monotonic() - began

    def _fetch(self) -> Any:
        try:
            batches = [next(stream) for stream in self._streams]
        except BaseException as e:
            self.rewind()  # loaders that gave a batch before another one failed give it again
            if isinstance(e, DataError):
                raise LoopError(str(e), certain=refusal.find(e) is not None) from e
            raise
        for loader, batch in zip(self._loaders.values(), batches, strict=True):
            if isinstance(batch, Batch):
                self._given.append((loader, batch.weighing))
        return self._pack(batches)

    def check_weights(self, step: int) -> None:
        """An optimizer has stepped in the present step. Raises `LoopError` if the loss of a batch was not weighted."""
        for loader, weight in self._given:
            if weight.read or (weight.value == 1 and not self._needs[id(loader)]):
                continue
            why = f"{weight.value:.6g} in this step" if weight.value != 1 else "1 now, and not in each step and world"
            raise LoopError(
                f"step {step}: the loss was not weighted by its batch's weight, which is {why} (ranks or micro-batches "
                "with other numbers of samples): the gradient is not that of the mean over the global batch. Write "
                "`batch.scale(loss).backward()`, or `run.scale(loss)` where there is no batch at hand; the loss is a "
                "mean over the batch's rows, and is not divided by the number of micro-batches. A loss that is "
                "weighted in another way (a sum over the rows) says so by reading batch.weight"
            )

    def _compare_streams(self, gather: Gather) -> None:
        """Compare marks when the position, which is the same on all ranks, has reached another mark. A rank's knowledge
        of a stream depends on when it began to read it, so only marks with the same number are compared."""
        streams = [loader for loader in self._loaders.values() if isinstance(loader.dataset, Stream)]
        at = tuple((loader.cursor.epoch, loader.cursor.index // loader.dataset.every) for loader in streams)
        if at == self._read_alike:
            return
        by_rank = gather([number for loader in streams for number in _numbers_of(loader.mark)])
        for i in range(len(streams)):
            known = {(row[3 * i], row[3 * i + 1], row[3 * i + 2]) for row in by_rank if row[3 * i] >= 0}
            if len({(epoch, index) for epoch, index, _ in known}) < len(known):
                raise LoopError(
                    "the ranks read other samples than each other from the same Stream, so that some samples are"
                    " trained twice and others not at all. Let its source give the same in the same order on each rank:"
                    " whole, not split by rank, and shuffled by set_epoch(epoch) and a seed alone"
                )
        self._read_alike = at

    def acknowledge(self) -> None:
        """The step is complete: its batches are trained on."""
        self._given.clear()
        for loader in self._loaders.values():
            loader.acknowledge()

    def rewind(self) -> None:
        """The present step will be repeated."""
        self._given.clear()
        for loader in self._loaders.values():
            loader.rewind()

    def abandon(self) -> None:
        """Stop no workers when the block is left: they are of the process that forked this one, or end with it."""
        self._loaders = {}

    def __enter__(self) -> None:
        """The block is the loop over the feed. Behind it the workers end, because the script may go on, also behind an
        error that it has caught, which would keep the loaders' iterators alive. `SystemExit`: a process that ends needs
        not wait for what they are reading."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, SystemExit):
            for loader in self._loaders.values():
                loader.close()

    def moved(self) -> None:
        """The world has changed: all its members compare their data anew."""
        self._agreed, self._read_alike = (), ()

    def reshard(self, rank: int, world_size: int) -> None:
        """Read as this rank, which may be another rank's share in a shadow step. This causes no comparison, because the
        other ranks make none."""
        for loader in self._loaders.values():
            loader.reshard(rank, world_size)

    def reads(self, dataset: Any) -> bool:
        """Whether one of the loaders' own DataLoaders reads from this."""
        return any(loader.reads(dataset) for loader in self._loaders.values())

    def sources(self) -> dict[str, Source]:
        """What the loaders read, for `CommonSamples`."""
        return {
            name: Source(
                loader.cursor.dataset.kind, loader.dataset, loader.sketches, loader.may_change, loader.samples_option
            )
            for name, loader in self._loaders.items()
        }

    @property
    def datasets(self) -> set[int]:
        """The ids of the datasets that the loaders read, with the datasets inside of them (subsets, concatenations)."""
        datasets = [loader.dataset for loader in self._loaders.values()]
        for dataset in datasets:
            inside = [getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())]
            datasets += [d for d in inside if d is not None and not any(d is f for f in datasets)]
        return {id(dataset) for dataset in datasets}

    def say_global_batch(self) -> None:
        """Say of each DataLoader how many samples a step has. Rank 0 calls it when the run begins."""
        for loader in self._loaders.values():
            if isinstance(loader, TakenOver):
                say_global_batch(loader.processes, loader.batch_size, loader.batches, loader.batch_advice)

    def is_of(self, argument: Any) -> bool:
        """Whether this object was passed to `steps`."""
        return argument is self._argument

    def agree(self, first: Callable[[int], int] | None, same: Callable[[int], bool]) -> None:
        """Before the first step, compare the data of the ranks. `first`: gives rank 0's number, so that all use its
        seeds; None if a position was restored. `same`: whether all ranks give the same number. Both are collective.
        Raises LoopError."""
        for name, loader in self._loaders.items():
            if first is not None and isinstance(loader, TakenOver):
                loader.agree(first(loader.cursor.seed))
            cursor = loader.cursor
            if not same(zlib.crc32(repr(cursor).encode())):
                raise LoopError(
                    f"steps(): the ranks' loaders{f' {name}' if name else ''} are not alike; here it has seed="
                    f"{cursor.seed}, global_batch={cursor.global_batch} and {cursor.dataset}. Pass the same dataset,"
                    " whole, with the same seed and batch on each rank: the session gives each rank its share"
                )

    def completed(self, world_size: int, same: Callable[[int], bool], gather: Gather) -> None:
        """A step is complete on all ranks. Once an epoch of a world, this compares the orders that samplers have drawn,
        and the samples that streams have read. `same`: whether all ranks give the same number. `gather`: all ranks'
        numbers. Both are collective. Raises LoopError."""
        if world_size == 1:
            return
        self._compare_streams(gather)
        drawn = [loader.drawn for loader in self._loaders.values()]
        epochs = tuple(d[0] for d in drawn if d is not None)
        if not epochs or epochs == self._agreed:
            return
        digest = sum(int(d[1], 16) for d in drawn if d is not None) % 2**62
        if not same(digest):
            names = " and ".join(loader.cursor.order.removeprefix("drawn-1/") for loader in self._loaders.values())
            raise LoopError(
                f"{names}: the ranks' samplers draw other samples than each other in epoch {epochs[0]}, so that some"
                " samples are trained twice and others not at all. Let a sampler draw by set_epoch(epoch) and its"
                " generators alone, from the same weights and arguments on each rank"
            )
        self._agreed = epochs

    def state_dict(self) -> dict[str, Any]:
        return {"loaders": {name: loader.state_dict() for name, loader in self._loaders.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("loaders")
        if not isinstance(saved, Mapping) or set(saved) != set(self._loaders):
            names = ", ".join(saved) if isinstance(saved, Mapping) else "a single loader's position"
            raise LoopError(
                f"the saved run has {names}, and this one has loaders {', '.join(self._loaders)}: pass steps() those"
                " that the run began with, in the same order or by the same names"
            )
        for name, loader in self._loaders.items():
            loader.load_state_dict(saved[name])


def say_global_batch(processes: int, batch_size: int, batches: int, advice: str) -> None:
    """Write one line about a step in which each of several processes takes `batches` batches of a DataLoader. torchrun
    trains so too, so it is no warning. But it surprises who kept his loader, so it goes to stderr where nothing shows
    it. `advice`: how another batch is had."""
    if processes == 1:
        return
    several = f" x {batches} batches" if batches > 1 else ""
    text = (
        f"{processes} processes x {batch_size} samples{several} = {processes * batch_size * batches} samples a step:"
        f" batch_size={batch_size} is that of one process, as under torchrun. {advice}"
    )
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info("%s", text)
    else:
        sys.stderr.write(f"everstep: {text}\n")


def feed_of(
    argument: Any, ranks: int, world: World, sampler_sizes: frozenset[int], sizes: Collection[int] = ()
) -> Feed | None:
    """The feed for the argument of `steps`: None, a loader, or a tuple, list or mapping of them. `sampler_sizes`: the
    `sizes` of `TakenOver`. `sizes`: those of `Feed`. Raises LoopError, DataError."""
    if argument is None:
        return None
    if isinstance(argument, Mapping):
        names, several, pack = [str(name) for name in argument], list(argument.values()), _by_name(tuple(argument))
    elif isinstance(argument, list | tuple):
        names, several, pack = [str(i) for i in range(len(argument))], list(argument), tuple
    else:
        return Feed({"": _loader_of(argument, "", ranks, world, sampler_sizes)}, _alone, argument, sizes)
    if not several:
        raise LoopError("steps(): no loader in what was passed; leave it out for a run without data")
    if len({id(loader) for loader in several}) < len(several):
        raise LoopError("steps(): the same loader twice; each has one position. Make one for each place")
    loaders = {
        name: _loader_of(loader, f" {name}", ranks, world, sampler_sizes)
        for name, loader in zip(names, several, strict=True)
    }
    return Feed(loaders, pack, argument, sizes)


def _loader_of(argument: Any, name: str, ranks: int, world: World, sampler_sizes: frozenset[int]) -> ElasticLoader:
    if isinstance(argument, ElasticLoader):
        return argument
    if not isinstance(argument, DataLoader):
        raise LoopError(call_mistakes.no_loader(argument, name))
    try:
        return TakenOver(argument, ranks=ranks, world=world, sizes=sampler_sizes)
    except DataError as e:
        raise LoopError(
            f"steps(): {name_of(argument)} cannot be taken over: {e}. Or write run.steps(run.loader(dataset,"
            " global_batch=…), …), where `dataset[i]` is one sample",
            certain=refusal.find(e) is not None,
        ) from e


def _alone(batches: list[Any]) -> Any:
    return batches[0]


def _by_name(names: tuple[Any, ...]) -> Callable[[list[Any]], Any]:
    return lambda batches: dict(zip(names, batches, strict=True))


class _Endless(Iterator[Any]):
    """A loader's batches, epoch after epoch. Goes on after an error."""

    def __init__(self, loader: ElasticLoader) -> None:
        self._loader = loader
        self._epoch: Iterator[Any] | None = None

    def __next__(self) -> Any:
        while True:
            if self._epoch is None:
                self._epoch = iter(self._loader)
            try:
                return next(self._epoch)
            except StopIteration:
                self._epoch = None


def _numbers_of(mark: Mark | None) -> tuple[int, int, int]:
    """Epoch, index and digest of a mark; the epoch is -1 if there is none."""
    if mark is None or not mark.digest:
        return -1, 0, 0
    return mark.epoch, mark.index, int(mark.digest, 16) % 2**62
