"""Accelerate: restore, save and stop a loop over objects that an `Accelerator` prepared. docs/reference/adapters.md has
whole scripts: `with start(accelerator, url, model=…, optimizer=…, loader=…) as run:`, and in it `run.train(learn)`.

If an agent announces rounds, a lost peer ends no other process: see `prepared`. Otherwise the body may also stand in a
loop, `for batch in run.batches():`, with `run.step(loss=loss)` after every batch.

Invariants: a position is a number of samples of an epoch, whose order depends only on the seed and the epoch. A commit
is made only when gradients have been synchronised. A resumed run draws the random numbers that it would have drawn
without the interruption.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn

from torch.nn import SyncBatchNorm

from everstep.checkpoint import Checkpointer, SettingUnusable, StateMismatch
from everstep.contract import refusal
from everstep.data import ElasticLoader
from everstep.recovery.errors import LoopError
from everstep.recovery.state.switches import SWITCHES, Switches
from everstep.train import refused_end
from everstep.train.adapters import missing
from everstep.train.adapters.late import LateRng
from everstep.train.adapters.rank_checks import RankChecks
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.evaluation import figures
from everstep.train.feeding.feed import say_global_batch
from everstep.train.further_loops import TakenOnce
from everstep.train.guards.common_samples import SAMPLES

try:
    from accelerate.utils import DistributedType, send_to_device
except ImportError as e:
    raise missing("accelerate", "accelerate", "accelerate") from e

from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler

from everstep.torch_private.accelerate import models_of, optimizers_of
from everstep.train.adapters import accelerated
from everstep.train.adapters.order import known_order
from everstep.train.adapters.own_loop import prepared_objects, trained_loader
from everstep.train.adapters.prepared import Prepared, unwrapped

accelerated.follow(loops=True)

log = logging.getLogger("everstep.train")


class Position:
    """The position of a prepared DataLoader, for a commit, and the remaining batches from there.

    `rng` is applied after the first batch of a resumed epoch was fetched, because making an iterator draws a number.
    Raises `SettingUnusable` for a loader whose order cannot be reproduced.
    """

    def __init__(self, accelerator: Any, loader: Any, rng: LateRng | None = None) -> None:
        known_order(loader)
        self._accelerator = accelerator
        self._loader = loader
        self._rng = rng
        self._taken = 0  # batches that this rank's loop has got in this epoch
        self.epoch = 0

    @property
    def read(self) -> list[Any]:
        """The DataLoader inside, if each rank reads its share; none if rank 0 alone reads."""
        return [self._loader.base_dataloader] if isinstance(self._loader, DataLoaderShard) else []

    @property
    def batch_size(self) -> int:
        """The samples of one process's batch, if Accelerate does not split it."""
        return int(self._loader.total_batch_size // self._accelerator.num_processes)

    def __len__(self) -> int:
        """The number of batches of a whole epoch on this rank."""
        return len(self._loader)

    def rest(self) -> Iterator[Any]:
        """The remaining batches of the present epoch. After them the next epoch begins."""
        self._loader.set_epoch(self.epoch)
        loader = self._accelerator.skip_first_batches(self._loader, self._taken) if self._taken else self._loader
        for batch in loader:
            self._resumed()
            self._taken += 1
            yield batch
        self._resumed()

    def next_epoch(self) -> None:
        self.epoch, self._taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        samples = self._taken * self._loader.total_batch_size
        return {"epoch": self.epoch, "samples": samples, "seed": getattr(self._sampler(), "initial_seed", None)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `StateMismatch` if the position is inside a global batch of this world."""
        size, samples = self._loader.total_batch_size, state["samples"]
        taken, inside = divmod(samples, size)
        if samples >= self._loader.total_dataset_length:
            taken, inside = len(self._loader), 0
        if inside:
            raise StateMismatch(
                f"the commit is {samples} samples into epoch {state['epoch']}, which is no multiple of the {size} "
                "samples of a global batch: keep batch size x processes as they were, or use everstep.data."
                "ElasticLoader, which can go on at any size"
            )
        self.epoch, self._taken = state["epoch"], taken
        if state["seed"] is not None and isinstance(self._sampler(), SeedableRandomSampler):
            self._sampler().initial_seed = state["seed"]

    def _sampler(self) -> Any:
        return self._loader.get_sampler()

    def _resumed(self) -> None:
        if self._rng is not None:
            self._rng.apply()


class Run:
    """A loop that is restored, saved and stopped; `start` makes it. Use it in `with`: its end commits the last
    state."""

    def __init__(
        self, accelerator: Any, coordinator: StepCoordinator, state: dict[str, Any], *, compare_samples: bool = True
    ) -> None:
        self._accelerator = accelerator
        self._coordinator = coordinator
        self._data: Position | ElasticLoader = state["data"]
        self._rng = state["rng"]
        self._in_hand: Any = None
        self._total: int | None = None
        self._until = 0  # epochs: the most that a loop of the script's was over
        self._is_epoch_taken = False  # whether the script has got all batches of its loop's present epoch
        self._closed = False
        self._checks = RankChecks(coordinator, "start", compares=compare_samples)
        state[SAMPLES] = self._checks.samples
        state[SWITCHES] = switches = Switches(state)
        with refused_end.remembered():
            elastic = self._data if isinstance(self._data, ElasticLoader) else None
            self._checks.reads([elastic] if elastic is not None else self._data.read)
            switches.start()
            coordinator.begin(state)
            self._checks.begin(state, elastic)
        if elastic is not None:
            self._rng.apply()  # this loader draws no random numbers
        elif not coordinator.step and accelerator.is_main_process and not accelerator.split_batches:
            processes = accelerator.num_processes
            say_global_batch(
                processes, self._data.batch_size, accelerator.gradient_accumulation_steps,
                accelerated.batch_advice(processes),
            )  # fmt: skip
        coordinator.watch()
        self._first_epoch = self._data.epoch

    @property
    def completed(self) -> int:
        """The number of completed optimizer steps."""
        return self._coordinator.step

    @property
    def epoch(self) -> int:
        return self._data.epoch

    def epochs(self, until: int) -> Iterator[int]:
        """The remaining epochs, until `until` are done. A resumed epoch comes again with its remaining batches. It may
        have none, if the commit was made at its end."""
        return TakenOnce(self._epochs(until), self._asked_again)

    def _epochs(self, until: int) -> Iterator[int]:
        if until <= self._until:
            self._refuse_second_loop()
        self._until = until
        per_step = 1 if isinstance(self._data, ElasticLoader) else self._accelerator.gradient_accumulation_steps
        self._total = until * math.ceil(len(self._data) / per_step)
        while self._data.epoch < until:
            epoch, self._is_epoch_taken = self._data.epoch, False
            yield epoch
            if isinstance(self._data, Position):
                self._data.next_epoch()
            elif self._data.epoch == epoch:
                raise SettingUnusable(f"epoch {epoch} was left before its end: take all of run.batches()")

    def _asked_again(self, parts: int | None) -> None:
        """An iterator over epochs is asked again: see `TakenOnce`."""
        if parts is None or not (parts > 1 or self._first_epoch):
            self._refuse_second_loop()

    def _refuse_second_loop(self) -> NoReturn:
        raise LoopError(
            f"a second loop over the epochs of this run, behind step {self.completed}: it would train nothing. Write "
            "one loop over all of them, `for epoch in run.epochs(10):`; for phases, one that decides by `epoch`"
        )

    def batches(self) -> Iterator[Any]:
        """The remaining batches of the present epoch, on the accelerator's device. An `ElasticLoader` yields its
        `Batch`es."""
        if self._is_epoch_taken:
            raise LoopError(
                f"a second loop over the batches of epoch {self.epoch}, behind step {self.completed}: the first takes "
                "all of them. Write `for batch in run.batches():`, or `run.train(fn)`, once in the body of `for epoch "
                "in run.epochs(10):`, with all of a step's work in it"
            )
        if isinstance(self._data, Position):
            yield from self._data.rest()
        else:
            for batch in self._data:
                self._in_hand = replace(batch, data=send_to_device(batch.data, self._accelerator.device))
                yield self._in_hand
        self._is_epoch_taken = self._until > 0

    def train(self, fn: Callable[[Any], Any]) -> None:
        """Call `fn` with each of `batches`. If it returns a mapping, that is logged."""
        for batch in self.batches():
            self.step(**figures(fn(batch)))

    def evaluate(self, fn: Callable[[], Any]) -> None:
        """Call `fn` now. If it returns a mapping, that is logged, and stands in the commits of the following steps."""
        self._coordinator.log(figures(fn()), of_state=True)

    @property
    def step(self) -> accelerated.StepNumber:
        """The number of completed optimizer steps. Called, `run.step(loss=loss)`, it tells that the work on a batch is
        done. If the optimizer has stepped, that counts a step, and may save or stop."""
        return accelerated.StepNumber(self.completed, self._batch_done)

    def _batch_done(self, **metrics: Any) -> None:
        self._coordinator.log(metrics)
        if isinstance(self._data, ElasticLoader):
            if not self._in_hand.last:
                return
            self._data.acknowledge()
        elif not self._accelerator.sync_gradients:
            return
        refusal.count_step()
        self._checks.completed()
        self._coordinator.completed(self._coordinator.step + 1, total=self._total, epoch=self._data.epoch)

    def close(self) -> None:
        """End the run, as the end of `with` does: commit the last state. A second call does nothing."""
        self.__exit__(*sys.exc_info())

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if error is None:
                self._checks.completed(last=True)
                self._coordinator.finish(self._coordinator.step)
                refused_end.completed()
        except (Exception, SystemExit) as e:
            error = e
            raise
        finally:
            refused_end.stands(error)
            self._coordinator.leave()


def start(
    accelerator: Any,
    checkpoint: str | Checkpointer | None = None,
    *,
    loader: Any = None,
    every_steps: int | None = None,
    every_seconds: float | None = None,
    compare_samples: bool = True,
    options: Mapping[str, Any] | None = None,
    **objects: Any,
) -> Run | Prepared:
    """Restore the prepared `objects` and the position in `loader` from the newest commit, if there is one.

    `checkpoint`: a URL or folder (default: `EVERSTEP_CHECKPOINT_URL`), or a `Checkpointer`; without one, `options` are
    passed to the new Checkpointer. `loader`: a prepared DataLoader, or an `ElasticLoader`, which must not be prepared.
    `objects`: the model, optimizer, scheduler and the rest of the training's state, by names of your choice.
    `compare_samples`: compare a few samples with those of the other ranks and of the saved run. Collective.

    Without `objects` the state is all that the accelerator has prepared, and the script keeps its own loop over the
    prepared loader, in `for epoch in run.epochs(n):`.
    """
    _check(accelerator)
    recovery, own_loop = accelerated.recovery(), not objects
    if own_loop and recovery is None:
        raise SettingUnusable(
            "start(accelerator, …) without objects, for a script's own loop over the prepared loader, works under "
            "everstep-run alone: here pass model=, optimizer=, loader=, and take `for batch in run.batches():`"
        )
    if not own_loop and loader is None:
        raise SettingUnusable("start(accelerator, …, model=…): say which loader is trained on, loader=train_dataloader")
    if own_loop:
        _check_own(accelerator)
        loader, objects = trained_loader(accelerator) if loader is None else loader, prepared_objects(accelerator)
    coordinator = StepCoordinator.find(checkpoint, every_steps, every_seconds, options or {})
    if recovery is not None:
        return Prepared(
            accelerator, coordinator, recovery, loader, objects, own_loop=own_loop, compare_samples=compare_samples
        )
    state = track(accelerator, loader=loader, **objects)
    return Run(accelerator, coordinator, state, compare_samples=compare_samples)


def _check_own(accelerator: Any) -> None:
    if accelerator.distributed_type is DistributedType.FSDP:
        raise SettingUnusable(
            "Accelerate shards the model by FSDP, which start() cannot recover: leave that plugin out for "
            "DistributedDataParallel, or shard by fully_shard over everstep.start(…).mesh(shard=N)"
        )
    if not optimizers_of(accelerator) or not models_of(accelerator):
        raise SettingUnusable(
            "start(accelerator, …): the accelerator has prepared no model and optimizer yet: call it after "
            "accelerator.prepare(model, optimizer, loader)"
        )
    if any(isinstance(part, SyncBatchNorm) for model in models_of(accelerator) for part in model.modules()):
        raise SettingUnusable(
            "SyncBatchNorm runs collectives in the forward pass, where a script's own loop cannot catch the loss of a "
            "peer: pass model=, optimizer=, loader= to start, make the loop's body a function, `def learn(batch): …`, "
            "and write `run.train(learn)`"
        )


def track(accelerator: Any, *, loader: Any, **objects: Any) -> dict[str, Any]:
    """The state of prepared objects for a `Checkpointer`: unwrapped, with the gradient scaler if there is one, the
    random generators as "rng" and the position as "data" (a `Position`, or the `ElasticLoader` itself).

    Raises `SettingUnusable` for a plugin whose engine holds state that no object of the script has."""
    _check(accelerator)
    rng = LateRng()
    data = loader if isinstance(loader, ElasticLoader) else Position(accelerator, loader, rng)
    state: dict[str, Any] = {"rng": rng, "data": data}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    for name, value in objects.items():
        if name in state:
            raise SettingUnusable(f"track({name}=…): the name {name!r} is taken; use another")
        state[name] = unwrapped(accelerator, value)
    return state


def _check(accelerator: Any) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise SettingUnusable(
            f"Accelerate trains with {kind.value}, whose engine keeps parameters and optimizer state that no commit "
            "would hold: leave that plugin out, for DistributedDataParallel, or save with accelerator.save_state()"
        )
