"""The session: a training loop that is restored, saved, reported and stopped in order.

Provisional: not exported by `everstep` until recovery in process is built on it (docs/adr).

    with session.start("s3://bucket/run", every_steps=100) as run:
        model, optimizer = …
        run.track(model=model, optimizer=optimizer)
        loader = run.loader(dataset, global_batch=512)
        for step in run.steps(loader, until=10_000):
            with step as batch:
                loss = criterion(model(batch.data[0]), batch.data[1])
                batch.scale(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)

Invariants: what is saved is the state between two steps, the data's position in it; every rank saves, stops and ends at
the same step; a step that raised is not counted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from everstep.checkpoint import Checkpointer, Fenced, RngState, SaveFailed
from everstep.data import ElasticLoader
from everstep.storage.errors import StoreUnusable
from everstep.train import termination
from everstep.train.intent import Intent, Wish, group_of_its_own
from everstep.train.keeper import Keeper
from everstep.train.metrics import Metrics
from everstep.train.report import Reporter, default_reporter
from everstep.train.step import LoopError, Phase, Step
from everstep.train.stopping import Preempted, StopSignal
from everstep.train.world import Place, take_place

log = logging.getLogger("everstep.train")

RESERVED = ("step", "data", "rng")
PEER_SECONDS = 600.0  # a collective of the session fails after so long


def start(
    checkpoint: str | Checkpointer | None = None,
    *,
    every_steps: int | None = None,
    every_seconds: float | None = None,
    rng: bool = True,
    reporter: Reporter | None = None,
    **options: Any,
) -> Run:
    """Join the world that the environment describes (alone without one) and begin a run.

    `checkpoint`: a URL or folder (default: `EVERSTEP_CHECKPOINT_URL`; without either nothing is saved), or a
    `Checkpointer`; `options` go to the one that is made. `rng`: save and restore the random generators too.
    """
    place = take_place()
    keeper = Keeper.find(checkpoint, every_steps, every_seconds, options)
    return Run(place, keeper, reporter or default_reporter(), rng=rng)


class Run:
    """One run of a training script in this process; see the module. Made by `start`."""

    def __init__(self, place: Place, keeper: Keeper | None, reporter: Reporter, *, rng: bool) -> None:
        self.place = place
        self._keeper = keeper
        self._reporter = reporter
        self._metrics = Metrics()
        self._state: dict[str, Any] = {"rng": RngState()} if rng else {}
        self._completed = 0
        self._loop = False
        self._group = group_of_its_own(PEER_SECONDS)
        reporter.started()
        if keeper is None and place.rank == 0:
            log.warning("no checkpoint URL: nothing is saved. Pass one to start() or set EVERSTEP_CHECKPOINT_URL")

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._completed

    def track(self, **objects: Any) -> None:
        """Name what makes up the training state: modules, optimizers, schedulers, scalers, tensors, anything with
        `state_dict` and `load_state_dict`. Before the first step."""
        if self._loop:
            raise LoopError("track() after the first step: what was restored by then is not in the new object")
        for name, value in objects.items():
            if name in RESERVED or name in self._state:
                what = "reserved" if name in RESERVED else "tracked already"
                raise LoopError(f"track({name}=…): the name {name!r} is {what}; use another")
            self._state[name] = value

    def loader(self, dataset: Any, *, global_batch: int, seed: int = 0, **options: Any) -> ElasticLoader:
        """An `ElasticLoader` cut for this rank; pass it to `steps`."""
        return ElasticLoader(
            dataset, global_batch=global_batch, seed=seed, rank=self.rank, world_size=self.world_size, **options
        )

    def log(self, **metrics: Any) -> None:
        """Numbers or 0-d tensors of this step, for the progress report. Never waits for a device."""
        self._metrics.log(metrics)

    def steps(
        self, loader: ElasticLoader | None = None, *, until: int | None = None, epochs: int | None = None
    ) -> Iterator[Step]:
        """Restore, then yield the steps that are left until `until` steps, or `epochs` epochs of `loader`, are done.

        Saves as the checkpointer's policy says and after the last step. On SIGTERM every rank finishes the same step,
        the state is committed, and `Preempted` is raised (exit code 86).
        """
        total = self._total(loader, until, epochs)
        if self._loop:
            raise LoopError("steps() was called before in this run; one loop over all steps is what can be resumed")
        self._loop = True
        self._restore(loader)
        intent = Intent(self._group)
        source = _Source(loader)
        with StopSignal() as stop:
            while self._completed < total:
                step = Step(self._completed, source.batches(), source.whole, lambda: self._count(loader, total))
                yield step
                if step.phase is not Phase.DONE:
                    raise LoopError(
                        f"step {step.number} was taken and not completed: write `with step as batch:` around its work"
                    )
                self._between(intent, stop, last=self._completed >= total)
            intent.settle()
            self._finish()

    def close(self) -> None:
        """Finish the save in flight and leave the process group, if this run made it."""
        if self._keeper is not None:
            self._keeper.checkpointer.close()
        if self.place.made and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        match error:
            case None:
                self.close()
            case Fenced() | StoreUnusable():
                # Both have an exit code that the operator reads: a fenced process is not a failure, and an unusable
                # store is not tried again.
                termination.write_error(error)
                print(f"everstep: {error}", file=sys.stderr)  # noqa: T201  the last words of the process
                raise SystemExit(error.exit_code) from error
            case _:
                pass

    # Between steps.

    def _total(self, loader: ElasticLoader | None, until: int | None, epochs: int | None) -> int:
        if (until is None) == (epochs is None):
            raise LoopError("steps(): say either until=STEPS or epochs=N")
        if until is not None:
            return until
        assert epochs is not None
        if loader is None:
            raise LoopError("steps(epochs=…) needs a loader, whose length is an epoch; without one say until=STEPS")
        return epochs * len(loader)

    def _restore(self, loader: ElasticLoader | None) -> None:
        if self._keeper is not None:
            if loader is not None:
                self._state["data"] = loader
            self._completed = self._keeper.restore(self._state)

    def _count(self, loader: ElasticLoader | None, total: int) -> None:
        """A step is complete."""
        if loader is not None:
            loader.acknowledge()
        self._completed += 1
        epoch = loader.epoch if loader is not None else None
        self._reporter.step(self._completed, total_steps=total, epoch=epoch, metrics=self._metrics.ready())

    def _between(self, intent: Intent, stop: StopSignal, *, last: bool) -> None:
        keeper = self._keeper
        wanted = keeper is not None and self.rank == 0 and keeper.due()
        agreed = intent.at_boundary(Wish(stop=stop.asked, save=wanted))
        if last:
            return
        if agreed.stop:
            self._stop(intent, stop)
        if keeper is not None and (keeper.due_at(self._completed) or agreed.save):
            keeper.save(self._completed, self._state)

    def _stop(self, intent: Intent, stop: StopSignal) -> None:
        """All ranks are here, after the same step."""
        intent.settle()
        committed = self._save_now(stop.remaining)
        error = Preempted(self._completed, committed)
        termination.write(str(error), error.code if isinstance(error.code, int) else 1, [])
        if self.rank == 0:
            log.warning("%s", error)
        self._reporter.flush()
        raise error

    def _finish(self) -> None:
        if self._keeper is not None and not self._save_now(lambda: None):
            raise SaveFailed(f"the last step, {self._completed}, could not be committed")
        self._reporter.done()

    def _save_now(self, remaining: Callable[[], float | None]) -> bool:
        """Commit the present state, unless it is; whether it is durable, the same answer on every rank."""
        if self._keeper is None:
            return False
        if self._all(self._keeper.durable(self._completed, remaining())):
            return True
        self._keeper.save(self._completed, self._state)
        return self._all(self._keeper.durable(self._completed, remaining()))

    def _all(self, done: bool) -> bool:
        """Whether every rank says so; rank 0 does only when the commit exists, so nobody leaves before."""
        if self._group is None:
            return done
        answer = torch.tensor([int(done)], dtype=torch.int32)
        dist.all_reduce(answer, dist.ReduceOp.MIN, group=self._group)
        return bool(answer.item())


class _Source:
    """The loader's batches, epoch after epoch."""

    def __init__(self, loader: ElasticLoader | None) -> None:
        self._loader = loader
        self._stream = self._endless(loader) if loader is not None else None
        self.whole = loader is None or loader.micro_batch is None

    def batches(self) -> Iterator[Any] | None:
        return self._stream

    @staticmethod
    def _endless(loader: ElasticLoader) -> Iterator[Any]:
        while True:
            yield from loader
