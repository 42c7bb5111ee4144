"""`ElasticLoader`: torch's DataLoader, fed from the one cursor.

All that is decided is decided in `progress` and below; this module moves data. Invariants: batches come in the order of
their plan; the position that is saved counts what was consumed, never what was prefetched; iterating leaves the random
generators of the training process alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from everstep.data.batch import Batch, Weight, batch_of
from everstep.data.common import is_comparable, read_samples
from everstep.data.errors import DataError, DatasetChanged, PositionMismatch
from everstep.data.fetching import Collating, Fetching, Request
from everstep.data.fingerprints import fingerprint
from everstep.data.mixture import Mixture
from everstep.data.plan.assignment import Epoch, World, whole
from everstep.data.plan.cursor import Cursor, check_changes, parse
from everstep.data.plan.order import Drawn, Own, Shuffle, label, order_of, shuffle_of
from everstep.data.plan.progress import Progress
from everstep.data.randomness.draws import Draws, digest, drawn_by
from everstep.data.randomness.seeding import sample_seed
from everstep.data.shards import blocks_of
from everstep.data.sketches import Sketch
from everstep.data.stream import Mark, Marks, Stream, mark_of
from everstep.data.workers import DEFAULT_CONTEXT, WorkerStart, sigterm_held
from everstep.data.world import world_of
from everstep.torch_private.loaders import kept_iterator, stop_workers

log = logging.getLogger("everstep.data")


class ElasticLoader:
    """Every sample exactly once an epoch, in the same order and the same steps, at any world size.

        loader = ElasticLoader(dataset, global_batch=512, seed=0)
        while loader.epoch < epochs:
            for batch in loader:                         # the rest of the present epoch
                loss = criterion(model(batch.data[0]), batch.data[1])      # a mean over the rows
                batch.scale(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                loader.acknowledge()                     # this step's samples are in the parameters
                if checkpointer.should_save(step): checkpointer.save(step, {..., "data": loader})

    `state_dict` is a few JSON values, the same on every rank. Load it at any world size: training goes on with the
    sample after the last one consumed. Asking for the next batch acknowledges the one before; between a batch and that,
    `state_dict` raises `Unacknowledged`, because only the loop knows whether the optimizer has stepped. A loop that
    survives an error in a step calls `rewind` and gets the step again.

    Arguments:
    - `dataset`: has `__len__` and `__getitem__`; or a `ShardedDataset`.
    - `global_batch`: samples of a step over all ranks together. Ranks' shares differ by at most one sample; `weight`
      makes up for it.
    - `rank`, `world_size`: by default those of torch.distributed, else of torchrun's environment, else 0 of 1.
    - `micro_batch`: at most so many samples are yielded at a time; `batch.last` says when to step.
    - `shuffle`: True, False, or `Blocks(size, window)`. `drop_last`: leave out an epoch's last step if it is not full.
    - `sampler`: in place of `shuffle`, what draws an epoch's samples over all ranks together: torch's
      `WeightedRandomSampler`, or one of your own with `__len__`. `everstep.data.randomness.draws` says what it may do.
    - `dataset_id`: the data's name and version, to tell a changed dataset by. `allow_changes`: of "dataset", "order",
      "global_batch", what may differ from the saved run.
    - `seed_samples`: set Python's, numpy's and torch's generators for each sample, so that augmentation is the same
      at any world size. Costs about 20 µs a sample; without it, `__getitems__` is used where there is one.
    - `num_workers`, `collate_fn`, `prefetch_factor`, `pin_memory`, `timeout`, `worker_init_fn`: as torch's.
    - `persistent_workers`: keep workers from epoch to epoch; what the training process changes in the dataset later
      does not reach them. `multiprocessing_context`: "fork" on Linux.
    - `compare_samples`: in a session, compare a few samples with those of the other ranks and of the saved run.

    Raises DatasetUnusable, BatchUnusable or DataError for what cannot work, before anything is read.
    """

    _seed_was_passed = True
    samples_option = "run.loader(dataset, …, compare_samples=False)"  # what switches the comparison off

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        micro_batch: int | None = None,
        shuffle: bool | Shuffle | None = None,
        sampler: Any = None,
        drop_last: bool = False,
        dataset_id: str | None = None,
        allow_changes: Collection[str] = (),
        seed_samples: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        persistent_workers: bool = True,
        multiprocessing_context: Any = DEFAULT_CONTEXT,
        compare_samples: bool = True,
    ) -> None:
        global_batch, seed = whole("global_batch", global_batch), whole("seed", seed)
        micro_batch = None if micro_batch is None else whole("micro_batch", micro_batch)
        identity = fingerprint(dataset, identity=dataset_id)
        if sampler is not None and shuffle is not None:
            raise DataError(f"shuffle={shuffle!r} and a sampler: the sampler is the order; leave out shuffle=")
        self._dataset, self._samples = dataset, identity.length
        kind = _kind_of(dataset, shuffle, sampler, identity.length)
        self._drawn = kind if isinstance(kind, Drawn) else None
        if self._drawn is not None:  # a position is one in what was drawn
            what = f"{self._drawn.name} of {identity.length} of {identity.kind}"
            identity = replace(identity, length=self._drawn.length, kind=what)
        elif isinstance(kind, Own):
            identity = replace(identity, length=kind.length)
        shards = blocks_of(dataset, kind)
        order_of(kind, identity.length, seed, 0, shards)  # what cannot be shuffled is refused here
        self._allowed = check_changes(allow_changes)
        self._progress = Progress(
            Cursor(seed, 0, 0, global_batch, label(kind), identity),
            Epoch(identity.length, global_batch, drop_last),
            kind,
            world_of(rank, world_size),
            micro_batch=micro_batch,
            shards=shards,
        )
        self._compares = compare_samples and is_comparable(dataset)
        self._start = WorkerStart(worker_init_fn)
        self._generator = torch.Generator()
        self._requests = _Requests(self._progress)
        self._options: dict[str, Any] = {
            "dataset": Fetching(dataset, seed_samples),
            "batch_sampler": self._requests,
            "generator": self._generator,
            "num_workers": num_workers,
            "collate_fn": Collating(collate_fn) if isinstance(dataset, Stream) else collate_fn,
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": self._start,
            "persistent_workers": persistent_workers and num_workers > 0,
            "multiprocessing_context": multiprocessing_context if num_workers > 0 else None,
        }
        self._torch: DataLoader[Any] | None = DataLoader(**self._options)
        self._live: Iterator[Any] | None = None
        self._marks = Marks()
        self._looked_at: Weight | None = None  # of a batch that was given where no gradient is made

    @property
    def cursor(self) -> Cursor:
        """The position after the last acknowledged step."""
        return self._progress.cursor

    @property
    def epoch(self) -> int:
        """The epoch of the next step that is not acknowledged, from 0."""
        return self._progress.cursor.epoch

    @property
    def micro_batch(self) -> int | None:
        """Samples that are yielded at a time at most; None for a rank's whole share."""
        return self._progress.micro_batch

    @property
    def world(self) -> World:
        """The rank and world size that batches are cut for."""
        return self._progress.world

    def needs_weights(self, sizes: Iterable[int]) -> bool:
        """Whether in a world of one of these sizes some batch of an epoch has another weight than 1."""
        epoch, most = self._progress.epoch, self.micro_batch
        counts = {min(epoch.length, epoch.global_batch), epoch.length % epoch.global_batch} - {0}
        return any(n % size or (most is not None and n // size > most) for n in counts for size in sizes)

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return self._progress.epoch.steps

    def __iter__(self) -> Iterator[Batch[Any]]:
        """The rest of the present epoch. A step in hand that was only looked at, under `torch.no_grad()`, comes again;
        for another one Unacknowledged is raised."""
        if self._looked_at is not None and not self._looked_at.read and not torch.is_grad_enabled():
            self._progress.rewind()
        self._progress.check_acknowledged("a new iteration was begun")
        self._live = None
        return _Epoch(self, self.epoch)

    def acknowledge(self) -> None:
        """The optimizer step of the batch in hand is done. Does nothing if none is in hand."""
        self._progress.acknowledge()

    def rewind(self) -> None:
        """The step in hand failed: it comes again, whole. An iteration in progress goes on with it."""
        self._progress.rewind()
        self._live = None

    def reshard(self, rank: int, world_size: int) -> None:
        """The world has changed: go on as `rank` of `world_size`, without a restart.

        A step in hand that was not acknowledged comes again, whole, cut for the new world. An iteration in progress
        goes on. Raises BatchUnusable, and changes nothing, if the world is too large for the batch.
        """
        self._progress.reshard(World(rank, world_size))
        self._live = None
        if isinstance(self._dataset, Stream):
            cursor = self._progress.cursor
            self._marks.restart(cursor.epoch, cursor.index, self._marks.at(cursor.epoch, cursor.index))
            self._read_anew()

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values. Raises Unacknowledged if a step is in hand."""
        self._progress.check_acknowledged("a position was asked for")
        cursor = self._progress.cursor
        state = cursor.state_dict()
        if self._drawn is not None and cursor.index:  # else the epoch is still to be drawn
            state["drawn"] = digest(self._drawn.draw(cursor.seed, cursor.epoch))
        if (mark := self._marks.at(cursor.epoch, cursor.index)) is not None:
            state["stream"] = asdict(mark)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position. The saved seed replaces the one that was passed.

        Raises DatasetChanged or PositionMismatch, and changes nothing, for a position that does not fit.
        """
        self._check_drawn(state)
        passed = self._progress.cursor.seed
        self._progress.load(state, self._allowed)
        self._live = None
        if isinstance(self._dataset, Stream):
            cursor = self._progress.cursor
            self._marks.restart(cursor.epoch, cursor.index, mark_of(state.get("stream"), cursor))
            self._read_anew()
        if self._progress.cursor.seed != passed and self._seed_was_passed:
            log.warning(
                "the saved position has seed %d, which goes on; seed %d is not used", self._progress.cursor.seed, passed
            )

    @property
    def drawn(self) -> tuple[int, str] | None:
        """The epoch that a sampler has drawn last, and its digest, which is the same on all ranks that train alike;
        None without a sampler, and before it has drawn one."""
        draws = self._drawn.draw if self._drawn is not None else None
        newest = draws.newest if isinstance(draws, Draws) else None
        return None if newest is None else (newest[0], digest(newest[1]))

    @property
    def mark(self) -> Mark | None:
        """Of a stream, the last mark whose digest is known here: ranks that train alike have the same for one index."""
        return self._marks.newest

    @property
    def dataset(self) -> Any:
        """The dataset that was passed."""
        return self._dataset

    @property
    def may_change(self) -> bool:
        """Whether a restart may go on with another dataset."""
        return "dataset" in self._allowed

    def sketches(self) -> dict[int, Sketch]:
        """Sketches of a few samples, by index; none where they are not to be compared. Reads them anew."""
        if not self._compares:
            return {}
        if self._options["num_workers"] == 1:
            # A file that the dataset opened has one position for all forked workers: right where only one reads.
            self.close()
        names = ("num_workers", "multiprocessing_context", "worker_init_fn")
        return read_samples(self._dataset, **{name: self._options[name] for name in names})

    def reads(self, dataset: Any) -> bool:
        """Whether this is what the loader's own DataLoader reads from."""
        return dataset is self._options["dataset"]

    def close(self) -> None:
        """Stop the workers. Iterating again starts new ones."""
        kept = kept_iterator(self._torch)
        self._torch = None
        for workers in (self._live, kept):
            # torch stops workers when their iterator is collected; one that has raised is in a cycle with its
            # traceback, and its workers would run on until the collector comes.
            stop_workers(workers)
        self._live = None

    def _next(self, epoch: int) -> Batch[Any]:
        self._progress.ask()
        cursor = self._progress.cursor
        if cursor.epoch != epoch:
            self._live = None
            raise StopIteration
        try:
            if self._live is None:
                self._live = self._begin()
            data = next(self._live)
            if isinstance(self._dataset, Stream):
                data, mark = data
                read = self._progress.hand_out()
                self._marks.add(epoch, read.share.step.first, Mark(*json.loads(mark)) if mark else None)
            else:
                read = self._progress.hand_out()
            batch = batch_of(data, epoch, read)
            looks = self.micro_batch is None and not torch.is_grad_enabled()
            self._looked_at = batch.weighing if looks else None
            return batch
        except BaseException as e:
            # The plan and the workers' answers may be out of step now, or a worker gone: begin again from the cursor.
            # Signals count too: torch's SIGCHLD handler raises for a dead worker, wherever the program is.
            self._progress.rewind()
            self.close()
            if isinstance(e, StopIteration):
                raise RuntimeError(f"the DataLoader ended before epoch {epoch} did") from e
            raise

    def _read_anew(self) -> None:
        """All ranks begin a stream at the same mark, so that what its source says later is the same on all of them."""
        self.close()  # workers know nothing of it
        self._dataset.restore(self._marks.newest)

    def _check_drawn(self, state: Mapping[str, Any]) -> None:
        drawn = state.get("drawn")
        if self._drawn is None or not drawn:
            return
        saved = parse(state)
        if saved.order == self._progress.cursor.order and saved.dataset.length == self._drawn.length:
            mine = digest(self._drawn.draw(saved.seed, saved.epoch))
            if mine != drawn:
                raise PositionMismatch(
                    f"the position is sample {saved.index} of epoch {saved.epoch} as {self._drawn.name} drew it, and"
                    " here it draws other samples for that epoch: its weights or arguments were changed, or it counts"
                    " something itself. Let it depend on set_epoch(epoch) and its generators alone"
                )

    def _check_length(self) -> None:
        if (length := len(self._dataset)) != self._samples:
            raise DatasetChanged(
                f"dataset {type(self._dataset).__name__} had {self._samples} samples when the loader was made, and has"
                f" {length} in epoch {self.epoch}: give it all of its samples before the loader is made, or go on with"
                " the new ones in another run, with allow_changes={'dataset'}"
            )

    def _begin(self) -> Iterator[Any]:
        self._check_length()
        if self._torch is None:
            self._torch = DataLoader(**self._options)
        # Else torch would draw the workers' base seed from the global generator, and a run that was interrupted would
        # draw once more than one that was not. Ranks differ, so that workers that seed themselves do too.
        cursor = self._progress.cursor
        self._generator.manual_seed(sample_seed(cursor.seed, cursor.epoch, cursor.index) ^ self.world.rank)
        self._start.about_to_start()
        with sigterm_held(self._options["multiprocessing_context"]):
            return iter(self._torch)


class _Epoch(Iterator[Batch[Any]]):
    """One `for` loop over a loader: it ends when the loader's position leaves the epoch that it began in."""

    def __init__(self, loader: ElasticLoader, epoch: int) -> None:
        self._loader = loader
        self._epoch = epoch

    def __next__(self) -> Batch[Any]:
        return self._loader._next(self._epoch)


class _Requests:
    """The batch sampler for torch. Separate from the loader, so that a dropped loader drops its workers."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __iter__(self) -> Iterator[Request]:
        cursor = self._progress.cursor
        for read in self._progress:
            yield Request(cursor.seed, cursor.epoch, read.samples.tolist(), read.share.step.first)


def _kind_of(dataset: Any, shuffle: bool | Shuffle | None, sampler: Any, samples: int) -> Shuffle:
    if isinstance(dataset, Mixture):
        if shuffle is not None or sampler is not None:
            raise DataError(
                f"{'shuffle' if sampler is None else 'sampler'}= with a Mixture, which has an order of its own: leave"
                " it out, and pass shuffle= to Mixture"
            )
        return dataset.order()
    if isinstance(dataset, Stream):
        if shuffle or sampler is not None:
            raise DataError(
                f"{'shuffle' if sampler is None else 'sampler'}= with a Stream, which is read in its own order: leave"
                " it out, and shuffle the source (its files, say) by set_epoch(epoch)"
            )
        shuffle = False
    return shuffle_of(shuffle is None or shuffle) if sampler is None else drawn_by(sampler, samples)
