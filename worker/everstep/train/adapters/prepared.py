"""Runs a loop over objects that an `Accelerator` prepared, in a session with a changing world.

The session takes over the prepared loader, and calls the loop's body with one batch at a time, so it can call it again.
A step is `gradient_accumulation_steps` batches. Other prepared loaders are divided again for each world.

Invariants: `accelerator.backward` weights each batch, so that the sum over all ranks and batches of a step is the mean
over its samples; a prepared schedule moves as in a job of full size, because a step has the samples of one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn

from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import send_to_device
from torch.utils.data import IterableDataset

from everstep.contract import refusal
from everstep.data import Batch, DataError, ElasticLoader
from everstep.data.plan.assignment import World
from everstep.data.takeover import TakenOver
from everstep.recovery.engine import Recovery
from everstep.recovery.errors import LoopError
from everstep.torch_private import patches
from everstep.torch_private.accelerate import loaders_of, shared_state
from everstep.train.adapters import accelerated
from everstep.train.adapters.order import known_order
from everstep.train.adapters.own_loop import OwnLoop
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.evaluation import figures
from everstep.train.further_loops import TakenOnce
from everstep.train.process_place import take_place
from everstep.train.session import Run, strict_by_environment


class Session(Run):
    """The session's own run. It calls `resharding` in each world."""

    def __init__(self, coordinator: StepCoordinator, recovery: Recovery, resharding: AcceleratorResharding) -> None:
        super().__init__(
            take_place(), coordinator, recovery, rng=True, strict=strict_by_environment(),
            compare_gradients=False,  # Accelerate keeps its rank in many places
        )  # fmt: skip
        self._resharding.add(resharding)

    @property
    def epoch(self) -> int:
        return self._feed.epoch if self._feed is not None else 0

    def taken_once(self, epochs: Iterator[int]) -> Iterator[int]:
        return TakenOnce(epochs, self._asked_again)

    def taken(self, loader: Any, micros: int, *, compare_samples: bool) -> TakenOver:
        try:
            return TakenOver(
                loader, ranks=self.process.most, world=self._cut(), batches=micros, compare_samples=compare_samples
            )
        except DataError as e:
            raise LoopError(
                f"start(loader=…): the prepared DataLoader cannot be taken over: {e}. Or pass an everstep.data."
                "ElasticLoader, which is not to be prepared",
                certain=refusal.find(e) is not None,
            ) from e


class AcceleratorResharding:
    """Tells Accelerate and its loaders of each world."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.world = World(0, 1)

    def reshard(self, rank: int, world_size: int) -> None:
        self.world = World(rank, world_size)
        accelerated.move(rank, world_size)
        for made, (original, arguments) in accelerated.prepared_loaders(self._accelerator):
            _cut_anew(self._accelerator, made, original, arguments)


class Prepared:
    """The run that `everstep.train.adapters.accelerate.start` returns if a lost peer does not end the others."""

    def __init__(
        self,
        accelerator: Any,
        coordinator: StepCoordinator,
        recovery: Recovery,
        loader: Any,
        objects: Mapping[str, Any],
        *,
        own_loop: bool = False,
        compare_samples: bool = True,
    ) -> None:
        self._accelerator = accelerator
        self._resharding = AcceleratorResharding(accelerator)
        self._session = Session(coordinator, recovery, self._resharding)
        self._micros = accelerator.gradient_accumulation_steps
        self._scales = not isinstance(loader, ElasticLoader)
        self._loader = loader
        if self._scales:
            self._loader = self._session.taken(_base(loader), self._micros, compare_samples=compare_samples)
            self._loader.samples_option = "start(accelerator, …, compare_samples=False)"
            self._loader.batch_advice = accelerated.batch_advice(self._loader.processes)
        if not self._scales and self._micros > 1:
            raise LoopError(
                f"gradient_accumulation_steps={self._micros} with an ElasticLoader, which makes micro-batches itself: "
                "leave it at 1, and pass ElasticLoader(micro_batch=…)"
            )
        self._session.track(**_inner(accelerator, objects))
        self._batch: Batch[Any] | None = None  # in hand
        self._backward, self._weighted = accelerator.backward, 0
        self._own: OwnLoop | None = None
        if own_loop:
            self._own = OwnLoop(accelerator, self._session, loader, self._micros, recovery.program.scope)
        if self._own is None:
            accelerator.backward = self._weighting
        for value in objects.values():
            if isinstance(value, AcceleratedScheduler):
                _full_size(value, self._processes_of_a_step)

    def _processes_of_a_step(self) -> int:
        """That of a job of full size; where a run goes on from a commit of another size, of that."""
        return self._loader.processes if isinstance(self._loader, TakenOver) else self._session.process.most

    @property
    def completed(self) -> int:
        """Completed optimizer steps."""
        return self._session.step

    @property
    def micro(self) -> int:
        """The number of the batch in its step, from 0. A step in which a peer was lost begins again with 0."""
        batch = self._batch if self._own is None else self._own.batch
        if batch is None:
            raise LoopError("run.micro is the number of a batch in its step: ask in the loop over the prepared loader")
        return batch.micro

    @property
    def epoch(self) -> int:
        return self._session.epoch

    def epochs(self, until: int) -> Iterator[int]:
        """The remaining epochs, until `until` are done."""
        return self._session.taken_once(self._epochs(until))

    def _epochs(self, until: int) -> Iterator[int]:
        try:
            for epoch in self._session.epochs(self._loader, until):
                yield epoch
                if self._own is not None:
                    self._own.check_epoch()
        finally:
            if self._own is not None:
                self._own.end()

    def track(self, **objects: Any) -> None:
        """Add to the training state, such as a dict in which the loop counts: see `Run.track`. Call it before the loop
        over epochs."""
        self._session.track(**objects)

    def untracked(self, *names: str) -> None:
        """Name what training changes and what may be lost with its process: see `Run.untracked`."""
        self._session.untracked(*names)

    def train(self, fn: Callable[[Any], Any]) -> None:
        """Call `fn` with each remaining batch of the present epoch, on the accelerator's device. The batches of a step
        in which a peer was lost come again. If `fn` returns a mapping, that is logged."""

        if self._own is not None:
            raise LoopError(
                "run.train(fn) after start(accelerator, …) without objects, which has given the prepared loader to the "
                "script's own loop: write `for batch in loader:`, or pass model=, optimizer=, loader= to start"
            )

        def work(given: Any) -> Any:
            result: Any = None
            accelerated.forget_loaders()
            for batch in (given,) if isinstance(given, Batch) else given:
                result = self._attempt(fn, replace(batch, data=send_to_device(batch.data, self._accelerator.device)))
            return result

        self._session.train(work)

    def evaluate(self, fn: Callable[[], Any]) -> None:
        """Call `fn` on all ranks now, and again if a peer is lost in it. Use it in the loop over epochs and outside of
        `train`. If `fn` returns a mapping, that is logged."""
        self._session.evaluate(fn)

    def batches(self) -> NoReturn:
        """Not supported here: the session cannot catch an error that is raised in the body of a script's loop."""
        raise LoopError(
            "run.batches() under everstep-run: a step in which a peer is lost could not be made again. Make the loop's "
            "body a function of the batch, `def learn(batch): …`, and write `run.train(learn)`, without run.step()"
        )

    @property
    def step(self) -> accelerated.StepNumber:
        """The number of completed optimizer steps. To call it is not supported here, as `batches`."""
        return accelerated.StepNumber(self.completed, self._refuse_step)

    def _refuse_step(self, **metrics: Any) -> NoReturn:
        raise LoopError("run.step(…) under everstep-run: run.train(fn) counts the steps. Return what is to be logged "
                        "from fn, as a mapping")  # fmt: skip

    def close(self) -> None:
        """End the run, as the end of `with` does. Right behind the loop over epochs: what is changed or called after it
        is no part of the training. A second call does nothing."""
        self.__exit__(*sys.exc_info())

    def __enter__(self) -> Prepared:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own is None:
            self._accelerator.backward = self._backward
        else:
            self._own.end()
        self._session.__exit__(kind, error, trace)

    def _attempt(self, fn: Callable[[Any], Any], batch: Batch[Any]) -> Any:
        accelerator = self._accelerator
        # `accumulate` counts batches, and synchronises gradients at each multiple of that number.
        accelerator.step = before = self._micros - 1 if batch.last else 0
        self._batch, self._weighted = batch, 0
        try:
            result = fn(batch.data if self._scales else batch)
        finally:
            self._batch = None
        if self._scales and self._weighted == 0:
            raise LoopError(
                "run.train(fn): fn has not called accelerator.backward(loss), which weights the batch: write it in "
                "the place of loss.backward()"
            )
        if self._micros > 1 and accelerator.step == before:
            raise LoopError(
                f"gradient_accumulation_steps={self._micros}, and fn has not entered accelerator.accumulate(model): "
                "write `with accelerator.accumulate(model):` around its work"
            )
        return figures(result)

    def _weighting(self, loss: Any, **named: Any) -> Any:
        if self._batch is not None and self._scales:
            self._weighted += 1
            loss = self._batch.scale(loss) * self._micros  # Accelerate divides by it
        return self._backward(loss, **named)


def _base(loader: Any) -> Any:
    """The DataLoader inside a prepared one. Raises `LoopError`."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        known_order(loader)
    if type(loader) is not DataLoaderShard:
        raise LoopError(
            f"start(loader=…): {type(loader).__qualname__}: a DataLoader that accelerator.prepare() returned is "
            "expected, without dispatch_batches, or an everstep.data.ElasticLoader, which is not to be prepared"
        )
    return loader.base_dataloader


def _inner(accelerator: Any, objects: Mapping[str, Any]) -> dict[str, Any]:
    if getattr(accelerator, "split_batches", False):
        raise LoopError(
            "split_batches=True: a batch of the loader is that of all processes. Leave it out, and say the batch of "
            "one; or pass an everstep.data.ElasticLoader(global_batch=…)"
        )
    inner = {name: unwrapped(accelerator, value) for name, value in objects.items()}
    if accelerator.scaler is not None:
        inner["scaler"] = accelerator.scaler
    return inner


def _full_size(schedule: Any, processes: Callable[[], int]) -> None:
    """Let a schedule that moves once for each process move so many times as a step has the samples of processes."""
    shared = [shared_state(kind) for kind in (PartialState, AcceleratorState)]  # the second copies the first one's

    def at_full_size(step: Callable[..., None]) -> Callable[..., None]:
        def stepped(*arguments: Any, **named: Any) -> None:
            present = shared[0]["num_processes"]
            _set_processes(shared, processes())
            try:
                step(*arguments, **named)
            finally:
                _set_processes(shared, present)

        return stepped

    patches.replace("step", at_full_size, schedule)


def _set_processes(shared: Iterable[dict[str, Any]], processes: int) -> None:
    for state in shared:
        state["num_processes"] = processes


def _cut_anew(accelerator: Any, made: Any, original: Any, arguments: Mapping[str, Any]) -> None:
    """Divide the loader as if it had been prepared in the present world."""
    sampler = made.get_sampler()  # before: it is prepared in place, in the script's own loader
    fresh = accelerator.prepare_data_loader(original, **arguments)
    loaders_of(accelerator).remove(fresh)
    if isinstance(sampler, SeedableRandomSampler):
        fresh.set_sampler(sampler)  # its seed; and the session, which has taken the loader over, finds it unchanged
    for name in ("base_dataloader", "rng_types", "synchronized_generator"):
        if hasattr(fresh, name):
            setattr(made, name, getattr(fresh, name))


def unwrapped(accelerator: Any, value: Any) -> Any:
    """The object inside a prepared one. It goes into commits."""
    if hasattr(value, "forward"):
        return accelerator.unwrap_model(value)
    for inner in ("optimizer", "scheduler"):
        if type(value).__module__.startswith("accelerate.") and hasattr(value, inner):
            return getattr(value, inner)
    return value
