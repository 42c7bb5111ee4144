"""Notes the steps of a script whose loop is Hugging Face Trainer's or Lightning's, beside Everstep's adapters. For a
script with Horovod's interface it calls that distribution, which knows its own loop.

A step is the library's own: an optimizer step. Its samples are those that the library trains on, not those that its
loader has fetched ahead. The values of the script's own are its variables, and the attributes of its own classes among
the callbacks, the modules, the data module and the trainer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from everstep.rehearse.own_loop import OwnLoop
from everstep.rehearse.record import LIBRARY
from everstep.rehearse.watch import Watch, rank, replace_all, samples
from everstep.train.adapters.script_state import attributes_set_by_script
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.guards.script_objects import given_to, is_own, variables

HUGGINGFACE, LIGHTNING = "everstep.train.adapters.huggingface", "everstep.train.adapters.lightning"
# By name, because the library does not know the distributions that are built on it.
HOROVOD, HOROVOD_REHEARSED = "everstep_horovod.training", "everstep_horovod.rehearsed"


class LibraryLoop:
    """Of one process, beside the `watch` of the session's loop."""

    def __init__(self, watch: Watch, own: OwnLoop) -> None:
        self._watch, self._own = watch, own
        self._wrapped: set[str] = set()

    def install(self) -> None:
        """Wrap an adapter when the script makes its callback: to import an adapter here would import its library.
        Likewise Horovod's interface when the script has joined its world."""
        find = StepCoordinator.find

        def found(*arguments: Any, **options: Any) -> StepCoordinator:
            for name, wrap in (
                (HUGGINGFACE, self._wrap_huggingface), (LIGHTNING, self._wrap_lightning), (HOROVOD, self._wrap_horovod),
            ):  # fmt: skip
                if name in sys.modules and name not in self._wrapped:
                    self._wrapped.add(name)
                    wrap(sys.modules[name])
            return find(*arguments, **options)

        replace_all((StepCoordinator, "find", found))

    def _wrap_huggingface(self, adapter: Any) -> None:
        trainer_class: Any = sys.modules["transformers"].Trainer
        callback_class, watch = adapter.EverstepCallback, self._watch
        train, begins, ends = callback_class.train, callback_class._step_begins, callback_class.on_step_end
        work = trainer_class._maybe_log_save_evaluate

        def trained(callback: Any, trainer: Any, **arguments: Any) -> Any:
            self._begins()
            step = trainer.training_step

            def training(model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
                watch.samples += samples(inputs)
                return step(model, inputs, *more, **named)

            trainer.training_step = training  # of this object, because a subclass may have its own
            return train(callback, trainer, **arguments)

        def began(callback: Any, state: Any) -> None:
            begins(callback, state)
            watch.samples = []
            watch.enters(state.global_step - watch.base, rank())

        def ended(callback: Any, *arguments: Any, **more: Any) -> None:
            watch.reach("tail")
            ends(callback, *arguments, **more)

        def working(trainer: Any, *arguments: Any, **more: Any) -> Any:
            # It is called once more at an epoch's end, and where a peer was lost in it.
            done = trainer.state.global_step - watch.base
            if watch.step is not None and done > watch.step:
                if done >= watch.limit:
                    trainer.control.should_training_stop = True
                optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
                watch.tracked = {"model": trainer.model, "optimizer": optimizer, "scheduler": trainer.lr_scheduler}
                objects = [trainer, *trainer.callback_handler.callbacks, *trainer.model.modules()]
                self._note(done, objects, sys._getframe(1))
            return work(trainer, *arguments, **more)

        replace_all(
            (callback_class, "train", trained), (callback_class, "_step_begins", began),
            (callback_class, "on_step_end", ended), (trainer_class, "_maybe_log_save_evaluate", working),
        )  # fmt: skip

    def _wrap_lightning(self, adapter: Any) -> None:
        callback_class, watch = adapter.EverstepCallback, self._watch
        starts, begins, ends = (
            callback_class.on_fit_start, callback_class.on_train_batch_start, callback_class.on_train_batch_end,
        )  # fmt: skip

        def started(callback: Any, trainer: Any, module: Any) -> None:
            self._begins()
            starts(callback, trainer, module)

        def began(callback: Any, trainer: Any, module: Any, batch: Any, number: int) -> None:
            in_rounds = callback._fitting
            goes_on = watch.step is not None if in_rounds is None else in_rounds._in_step  # with a further micro-batch
            begins(callback, trainer, module, batch, number)
            if not goes_on:
                watch.samples = []
                watch.enters(trainer.global_step - watch.base, rank())
            watch.samples += samples(batch)

        def ended(callback: Any, trainer: Any, module: Any, *more: Any) -> None:
            done = trainer.global_step - watch.base
            whole = watch.step is not None and done > watch.step
            if whole:
                watch.reach("tail")
            ends(callback, trainer, module, *more)
            if not whole:
                return
            if done >= watch.limit:
                trainer.fit_loop.epoch_loop.max_steps = trainer.global_step
            watch.tracked = {"model": module}
            watch.tracked |= {f"optimizer_{i}": one for i, one in enumerate(trainer.optimizers)}
            watch.tracked |= {f"scheduler_{i}": one.scheduler for i, one in enumerate(trainer.lr_scheduler_configs)}
            objects = [trainer, *trainer.callbacks, trainer.datamodule, *module.modules()]
            self._note(done, objects, sys._getframe(1), _of_loader(trainer.train_dataloader))

        replace_all(
            (callback_class, "on_fit_start", started), (callback_class, "on_train_batch_start", began),
            (callback_class, "on_train_batch_end", ended),
        )  # fmt: skip

    def _wrap_horovod(self, _: Any) -> None:
        importlib.import_module(HOROVOD_REHEARSED).install(self._own)

    def _begins(self) -> None:
        self._watch.in_library = True
        (self._watch.folder / LIBRARY).touch()

    def _note(
        self, step: int, objects: list[Any], frame: FrameType | None, more: Iterable[tuple[str, Any]] = ()
    ) -> None:  # fmt: skip
        """So many steps are complete. `objects`: those that the library holds and a script may have a class for.
        `more`: other values that only the library holds, by name."""
        names = {id(value): name for name, value in reversed(list(variables(frame)))}
        attributes = [pair for each in objects for pair in _own(names.get(id(each), type(each).__name__), each)]
        attributes += more
        self._watch.note(step, rank(), frame, attributes, closed=objects)
        self._watch.leaves()


def _own(name: str, each: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object of one of the script's own classes, but for modules, which are objects themselves. Of
    a subclass of the library's trainer only those that the script's methods set: the others are the library's. Of
    objects of the library what the script has given them: a dataset, a collate function."""
    if not isinstance(each, torch.nn.Module):  # the model's are read with it
        yield from ((f"{name}{path}", value) for path, value in given_to(each))
    if not is_own(type(each)):
        return
    sets = attributes_set_by_script(type(each))
    for key, value in vars(each).items():
        if key == "_hparams":  # of Lightning's `save_hyperparameters`
            yield f"{name}.hparams", value
        elif key in sets and not isinstance(value, torch.nn.Module):
            yield f"{name}.{key}", value


def _of_loader(loader: Any) -> Iterator[tuple[str, Any]]:
    """The dataset of a loader and the function that collates its samples, where they are the script's."""
    for key in ("dataset", "collate_fn"):
        if is_own(type(value := getattr(loader, key, None))):
            yield f"train_dataloader.{key}", value
