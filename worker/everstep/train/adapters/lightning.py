"""An adapter for Lightning: a callback that restores, saves and stops, and `Elastic`, a loader that resumes without
reading data again: docs/reference/adapters.md.

It is a callback and no `CheckpointIO`, because Lightning calls that on rank 0 only, and all ranks take part in a save.
A step is committed when the next batch has arrived: then its validation is done. Other loaders than `Elastic` come back
to their position by reading and dropping the batches before it, with the random generators as they were when the epoch
began.

If an agent announces rounds, a lost peer ends no other process: `fitting` begins Lightning's loop again in the next
world. Invariants: the parameters, the progress and the generators of a commit are of the same moment. Batches that were
given out but not trained on are given out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from everstep.checkpoint import Checkpointer, SettingUnusable, StateMismatch
from everstep.contract import refusal
from everstep.data import ElasticLoader
from everstep.recovery.errors import LoopError
from everstep.recovery.state.switches import SWITCHES, Switches
from everstep.train import refused_end
from everstep.train.adapters import missing
from everstep.train.adapters.late import Late, LateRng, RngAt
from everstep.train.adapters.rank_checks import RankChecks, divides
from everstep.train.adapters.script_state import CallbackWeights, ScriptAttributes
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.guards.common_samples import SAMPLES

try:
    from lightning.pytorch import Callback
except ImportError as e:
    raise missing("lightning", "lightning", "lightning") from e

from torch.utils.data import DistributedSampler

from everstep.torch_private import lightning as private
from everstep.torch_private import names
from everstep.train.adapters import epochs, fitting
from everstep.train.adapters.fitting import Logged

names.check("lightning")


class ElasticBatch(NamedTuple):
    """A batch. `data` is the result of the loader's `collate_fn`. Multiply the mean loss over its rows by `weight`."""

    data: Any
    weight: float


class Elastic:
    """An `ElasticLoader` for `trainer.fit`. It yields `ElasticBatch`es, and the callback saves its position."""

    def __init__(self, loader: ElasticLoader) -> None:
        self._loader = loader
        self._position = loader.state_dict()

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def inner(self) -> ElasticLoader:
        """The loader itself."""
        return self._loader

    def __iter__(self) -> Iterator[ElasticBatch]:
        self.acknowledge()
        for batch in self._batches(iter(self._loader)):
            yield ElasticBatch(batch.data, batch.weight)

    def acknowledge(self) -> None:
        """Tell that the batches given out so far are trained on."""
        self._loader.acknowledge()
        self._position = self._loader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The position before the newest batch, which counts as trained on only when the next one is asked for."""
        return self._position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._position = self._loader.state_dict()

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            self.acknowledge()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch


class EverstepCallback(Callback):  # type: ignore[misc]  # its types are not followed: see pyproject.toml
    """Restores when `fit` starts, saves between steps, stops at SIGTERM with a commit. One object for one run.

    `checkpoint`: a URL or folder (default: `EVERSTEP_CHECKPOINT_URL`), or a `Checkpointer`; without one, `options` are
    passed to the new Checkpointer. The state is that of the module, the optimizers, schedulers, precision plug-in, data
    module, loops, other callbacks (their `state_dict`) and random generators. `in_process`: under everstep-run a lost
    peer does not end the other processes. `compare_samples`: compare a few samples with those of the other ranks and of
    the saved run.
    """

    def __init__(
        self,
        checkpoint: str | Checkpointer | None = None,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        in_process: bool = True,
        compare_samples: bool = True,
        **options: Any,
    ) -> None:
        self._recovery = fitting.recovery() if in_process else None
        self._fitting: fitting.Fitting | None = None
        self._coordinator = StepCoordinator.find(checkpoint, every_steps, every_seconds, options)
        self._checks = RankChecks(self._coordinator, "EverstepCallback", compares=compare_samples)
        self._rng, self._data, self._logged = LateRng(), Late(), Logged()
        self._epoch_rng: RngAt | None = None
        self._others: _Others
        self._skip = 0  # batches to read and drop
        self._unread = False  # the commit's generators are those before its next batch was read
        self._chosen: tuple[Callback, ...] = ()  # the callbacks that save into a folder that Lightning chooses
        self._fresh = self._begun = self._ended = False
        self._state: dict[str, Any] = {}  # in a world that does not change
        self._weights: CallbackWeights | None = None
        self._counted = 0  # the newest step that a refusal would count
        self._looked = -1  # the step after which `_weights` has looked

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # Lightning sets up its checkpoint callbacks after all others, so their folders are not chosen yet.
        if stage == "fit" and self._recovery is not None:
            self._chosen = tuple(c for c in trainer.checkpoint_callbacks if getattr(c, "dirpath", "") is None)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._epoch_rng = RngAt()
        progress = epochs.LoopProgress(trainer)
        if self._recovery is not None:
            self._fit_in_rounds(self._recovery, trainer, pl_module, progress)
            return
        with refused_end.remembered():
            self._state = self._everything(trainer, pl_module, progress)
            self._counted = step = self._coordinator.begin(self._state)
        if step == 0:
            self._fresh = True
            return
        if trainer.ckpt_path is not None:
            raise SettingUnusable(
                f"fit(ckpt_path={str(trainer.ckpt_path)!r}) would overwrite the commit of step {step}: leave ckpt_path "
                "out of a run that goes on"
            )
        if progress.batches is not None:
            self._skip, self._unread = progress.batches, progress.cut
            epochs.begin_with_a_batch(trainer.fit_loop)
            self._epoch_rng.apply()  # the epoch's order is drawn again
        else:  # between two epochs
            epochs.begin_an_epoch(trainer.fit_loop)
            self._rng.apply()
            self._epoch_rng.keep()
            self._fresh = True

    def _fit_in_rounds(self, recovery: Any, trainer: Any, pl_module: Any, progress: epochs.LoopProgress) -> None:
        if trainer.ckpt_path is not None:
            raise SettingUnusable(
                "fit(ckpt_path=…) under everstep-run: leave ckpt_path out, the newest commit is loaded"
            )
        if isinstance(private.data_given_to(trainer.fit_loop), Elastic):
            raise LoopError(
                "trainer.fit(module, Elastic(…)) under everstep-run: pass an ordinary DataLoader, " + fitting.INSTEAD
            )
        kept = fitting.Progress(trainer, progress.state_dict)
        self._fitting = fitting.Fitting(trainer, recovery, self._coordinator, kept)
        state = self._everything(trainer, pl_module, progress) | {"loops": kept}
        for name in ("data", "rng", "rng_of_epoch"):
            del state[name]
        self._fitting.begin(state)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._checks.reads(_read_by(trainer), changes=bool(trainer.reload_dataloaders_every_n_epochs))
        if self._fitting is not None:
            _drop(trainer, self._fitting.skip)
            return
        self._coordinator.watch()  # ours replaces Lightning's handler, which calls a collective from the signal
        if isinstance(trainer.train_dataloader, Elastic):
            self._data.bind(trainer.train_dataloader)
            self._checks.begin(self._state, trainer.train_dataloader.inner)
        else:
            self._data.bind(_Worlds(trainer))
            self._checks.begin(self._state)
            _drop(trainer, self._skip)
        if self._unread:
            self._rng.apply()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fitting is not None:
            return
        assert self._epoch_rng is not None
        if not self._fresh:  # a process's first iterator exists by now: its generators were kept in on_fit_start
            self._epoch_rng.keep()
        self._fresh = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._looked:
            self._looked = trainer.global_step
            self._weights = self._weights or CallbackWeights(trainer.callbacks, pl_module)
            self._weights.check()
        if self._fitting is not None:
            self._fitting.batch_begins()
        elif not self._begun:
            self._begun = True
            self._others.train_began()
            self._rng.apply()
        elif trainer.global_step > self._coordinator.step:
            self._others.look()
            self._coordinator.log(self._logged.new(trainer))
            total = fitting.total_steps(trainer)
            self._checks.completed()
            self._coordinator.completed(trainer.global_step, total=total, epoch=trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._fitting is not None:
            self._fitting.batch_ends()
        elif trainer.global_step > self._counted:
            self._counted = trainer.global_step
            refusal.count_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fitting is not None:
            return
        if isinstance(trainer.train_dataloader, Elastic):
            trainer.train_dataloader.acknowledge()
        self._ended = True
        self._coordinator.log(self._logged.new(trainer))
        try:
            self._checks.completed(last=True)
            self._coordinator.finish(trainer.global_step)
        finally:
            self._coordinator.leave()  # before Lightning removes its own handler

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._ended and self._fitting is None:  # the commit is of the last step: nothing was trained
            self._coordinator.finish(trainer.global_step, save=False)
        self._others.fit_ended()
        refused_end.completed()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        refused_end.stands(exception)
        self._coordinator.leave()

    def _everything(self, trainer: Any, pl_module: Any, progress: epochs.LoopProgress) -> dict[str, Any]:
        self._others = _Others(trainer, self, self._chosen)
        state: dict[str, Any] = {
            "model": pl_module, "loops": progress, "callbacks": self._others,
            "data": self._data, "rng": self._rng, "rng_of_epoch": self._epoch_rng,
        }  # fmt: skip
        state |= {f"optimizer_{i}": o for i, o in enumerate(trainer.optimizers)}
        state |= {f"scheduler_{i}": c.scheduler for i, c in enumerate(trainer.lr_scheduler_configs)}
        if trainer.precision_plugin.state_dict():
            state["precision"] = trainer.precision_plugin
        if trainer.datamodule is not None:
            state["datamodule"] = trainer.datamodule
        state[SAMPLES] = self._checks.samples
        state[SWITCHES] = switches = Switches(state)
        switches.start()
        return state


def _read_by(trainer: Any) -> list[Any]:
    """The loaders that `fit` trains on, without those whose ranks read by an order of their own."""
    loaders = private.loaders_of(trainer.fit_loop)
    trained = [loader for loader in loaders if isinstance(loader, Elastic) or divides(loader)]
    return [loader.inner if isinstance(loader, Elastic) else loader for loader in trained]


_ATTRIBUTES = "everstep attributes"
_OF_SCRIPT = "everstep script attributes"
_METRICS = "everstep metrics"
_FOLDER = "dirpath"


class _Others:
    """The states of the other callbacks, by Lightning's keys.

    `chosen`: the callbacks whose folder Lightning chooses, the next free `version_N`. Each process chooses for itself,
    so all take the run's folder: a `ModelCheckpoint` with another folder than the state's would not load its best
    scores, and would save when the others do not.
    """

    everstep_settles = True  # a timer's differs between ranks

    def __init__(self, trainer: Any, own: Callback, chosen: Sequence[Callback] = ()) -> None:
        self._trainer = trainer
        self._callbacks = [c for c in trainer.callbacks if c is not own]
        self._chosen = chosen
        self._of_script: ScriptAttributes | None = None  # where worlds change, `Progress` has them
        self._saved_attributes: Mapping[str, Any] = {}
        self._metrics: Mapping[str, float] = {}

    def train_began(self) -> None:
        """All hooks were called for the beginning of the training, in a world that does not change."""
        self._of_script = fitting.attributes_of(self._trainer)
        self._of_script.put_back(self._saved_attributes)

    def look(self) -> None:
        """See which attributes a step has changed."""
        if self._of_script is not None:
            self._of_script.now()

    def state_dict(self) -> dict[str, Any]:
        states = {c.state_key: c.state_dict() for c in self._callbacks}
        saved = {key: state for key, state in states.items() if state}
        newest = {c.state_key: private.newest_save(c) for c in self._callbacks}
        if newest := {key: values for key, values in newest.items() if values}:
            saved[_ATTRIBUTES] = newest
        if self._of_script is not None:
            saved[_OF_SCRIPT] = self._of_script.now()
        if metrics := private.logged_metrics(self._trainer):
            saved[_METRICS] = {name: float(value) for name, value in metrics.items()}
        return saved

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        self._saved_attributes, self._metrics = states.get(_OF_SCRIPT, {}), states.get(_METRICS, {})
        for callback in self._callbacks:
            if callback.state_key in states:
                state = states[callback.state_key]
                if callback in self._chosen and _FOLDER in state:
                    setattr(callback, _FOLDER, state[_FOLDER])
                callback.load_state_dict(state)
            private.set_newest_save(callback, states.get(_ATTRIBUTES, {}).get(callback.state_key, {}))

    def fit_ended(self) -> None:
        """Scripts read `trainer.callback_metrics` behind `fit`, also in a process that had nothing left to train."""
        kept = private.logged_metrics(self._trainer)
        for name, value in self._metrics.items():
            kept.setdefault(name, torch.tensor(value))


class _Worlds:
    """Takes the place of a position, for a loader that comes back to its place by counting batches."""

    def __init__(self, trainer: Any) -> None:
        self._size = trainer.world_size

    def state_dict(self) -> dict[str, Any]:
        return {"world_size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("world_size") != self._size:
            raise StateMismatch(
                f"the commit counts batches of {state.get('world_size', 'an Elastic loader')} processes, this run has "
                f"{self._size}: only Elastic(everstep.data.ElasticLoader(...)) goes on at another size"
            )


def _drop(trainer: Any, batches: int) -> None:
    """Read and drop the batches that were trained on before. Only the fetcher owns the iterator that the loop will
    use."""
    loop, fetcher = trainer.fit_loop, private.fetcher_of(trainer.fit_loop)
    epoch = loop.epoch_progress.current.processed
    samplers = [getattr(loader, "sampler", None) for loader in private.loaders_of(loop)]
    if epoch and (by_epoch := [s for s in samplers if isinstance(s, DistributedSampler)]):
        for sampler in by_epoch:
            sampler.set_epoch(epoch)  # Lightning does it when the epoch begins, which is too late
        iter(fetcher)  # workers may have begun to read
    for _ in range(batches):
        next(fetcher)
    fetcher.fetched = 0  # the loop adds its own count
