"""Keeps Accelerate's view of the world up to date while an agent announces rounds, and peers leave and join.

Accelerate makes the process group when the script first asks it for the rank, and keeps rank and world size for the
life of the process. After `follow` Everstep makes the group. Until the first round only this process is in it, and a
script that asks for the number of processes, or for the length of a prepared loader, gets that of the most processes
that the job may have. `move` tells Accelerate the rank and world size of each round. Nothing changes under a launcher
that announces no rounds, or if the script has made a process group itself: then a lost peer ends the processes, and
they resume from a commit.

Invariant: no optimizer steps in a process that was in no round yet. `optimizer.step()` raises an error there; with a
Trainer, preparing the model does.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

from everstep.contract.library_files import is_library
from everstep.recovery.announcements import Announcements
from everstep.recovery.engine import Recovery
from everstep.recovery.errors import LoopError
from everstep.recovery.group.script_location import ScriptPhase
from everstep.torch_private import names
from everstep.torch_private.accelerate import shared_state
from everstep.torch_private.patches import around, replace
from everstep.train.process_place import most_processes


class _Process:
    """State that this process has once."""

    recovery: Recovery | None = None
    building = False
    following = False
    loops = False  # the script has its own loop, without a Trainer


# The loaders that were prepared for a script's own loop, with the arguments from which they were made.
_loaders: weakref.WeakKeyDictionary[Any, tuple[Any, Any, dict[str, Any]]] = weakref.WeakKeyDictionary()


def follow(*, loops: bool = False) -> None:
    """Follow the rounds from now on. A second call does nothing. `loops`: the script prepares its objects itself, for
    its own loop."""
    _Process.loops |= loops
    if _Process.following:
        return
    _Process.following = True
    names.check("accelerate")
    replace("__init__", around(_make), PartialState)
    replace("wait_for_everyone", around(_wait), PartialState)
    replace("prepare_model", around(_prepare), Accelerator)
    replace("prepare_data_loader", around(_load), Accelerator)
    replace("__len__", around(_length), DataLoaderShard)
    replace("step", around(_step), AcceleratedOptimizer)
    count_whole_job(Accelerator, "num_processes")


def _make(make: Any, *arguments: Any, **named: Any) -> None:
    if not shared_state(PartialState):
        recovery()
    make(*arguments, **named)


def _prepare(
    prepare: Any, accelerator: Any, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
) -> Any:
    if not evaluation_mode and not _Process.building and not _Process.loops and _alone():
        raise LoopError(
            "Accelerate cannot prepare a model for training yet: this process is still alone, and each rank would "
            "train a model of its own. Begin the training with callback.train(trainer), where callback is an "
            "EverstepCallback, instead of trainer.train(). In a script without a Trainer, import "
            "everstep.train.adapters.accelerate, and not everstep.train.adapters.huggingface"
        )
    return prepare(accelerator, model, device_placement, evaluation_mode)


def _load(load: Any, accelerator: Any, data_loader: Any, *arguments: Any, **named: Any) -> Any:
    made = load(accelerator, data_loader, *arguments, **named)
    if _Process.loops and _alone() and made is not data_loader:
        given = dict(zip(("device_placement", "slice_fn_for_dispatch"), arguments, strict=False))
        _loaders[made] = accelerator, data_loader, {**given, **named}
    return made


def _length(length: Any, loader: Any) -> int:
    """As `count_whole_job`: the batches that each process of the whole job has of it, which Accelerate counts so too.
    The loader is not divided yet, and a library that goes through it gets the number of all batches."""
    batches = int(length(loader))
    if is_library(sys._getframe(2).f_code.co_filename) or loader not in _loaders or not _alone():
        return batches
    drops_last = getattr(loader.batch_sampler, "drop_last", False)
    return batches // most_processes() if drops_last else -(-batches // most_processes())


def _wait(wait: Any, state: Any) -> None:
    if not _alone():  # otherwise each process would prepare its data alone
        wait(state)


def _step(step: Any, optimizer: Any, closure: Any = None) -> Any:
    if _alone():
        raise LoopError(
            "optimizer.step(): this process is still alone, and each rank would train its own model. Make the body "
            "of the loop a function of the batch, and let Everstep call it: run = "
            "everstep.train.adapters.accelerate.start(accelerator, …), `for epoch in run.epochs(N): "
            "run.train(function)`"
        )
    return step(optimizer, closure)


class StepNumber(int):
    """`run.step` of a loop over what Accelerate prepared: the number of completed steps, as of a session's run. As a
    call it is what a loop over `run.batches()` says behind each batch."""

    _call: Callable[..., None]

    def __new__(cls, number: int, call: Callable[..., None]) -> StepNumber:
        made = super().__new__(cls, number)
        made._call = call
        return made

    def __call__(self, **metrics: Any) -> None:
        self._call(**metrics)


def batch_advice(processes: int) -> str:
    """How a script that keeps its DataLoader has another batch. A formula alone would be wrong: the batch may not be
    divisible, and the schedule has to follow."""
    return (
        f"A prepared schedule moves {processes} times a step. For another batch docs/how-to-restructure.md has the "
        'form under "The number of processes with Accelerate"'
    )


def count_whole_job(kind: type, name: str) -> None:
    """Let `name`, a property of `kind`, tell a script that does not train yet the most processes that the job may have:
    it computes its batch, its steps and its schedule from them. The library itself gets the number of the present
    world."""

    def counting(count: Any) -> property:
        @functools.wraps(count.fget)
        def counted(owner: Any) -> int:
            asked_by_script = not is_library(sys._getframe(1).f_code.co_filename)
            return most_processes() if asked_by_script and _alone() else int(count.fget(owner))

        return property(counted)

    replace(name, counting, kind)


def _alone() -> bool:
    """Whether this process was in no round yet, and the job may have other processes."""
    if _Process.recovery is None or most_processes() == 1:
        return False
    return _Process.recovery.program.scope.where is ScriptPhase.BUILDING


def recovery() -> Recovery | None:
    """The object that keeps this process in the newest round; None if the world does not change here."""
    if _Process.recovery is None and not dist.is_initialized() and (rounds := Announcements.find()) is not None:
        _Process.recovery = Recovery(rounds)
        _Process.recovery.start(most_processes())
    return _Process.recovery


def prepared_loaders(accelerator: Any) -> list[tuple[Any, tuple[Any, Mapping[str, Any]]]]:
    """The loaders that `accelerator` prepared before the first round, each with its DataLoader and other arguments."""
    return [(made, (loader, named)) for made, (by, loader, named) in _loaders.items() if by is accelerator]


@contextmanager
def building() -> Iterator[None]:
    """A context in which models are prepared for later worlds."""
    _Process.building = True
    try:
        yield
    finally:
        _Process.building = False


def move(rank: int, world_size: int) -> None:
    """Tell Accelerate the rank and world size of a round that has formed.

    Raises `LoopError` if Accelerate does not train over several processes.
    """
    if world_size > 1 and shared_state(PartialState).get("distributed_type") is DistributedType.NO:
        raise LoopError(
            "Accelerate has not found a device for each process, and would train each rank alone: on machines without "
            "a GPU write TrainingArguments(use_cpu=True), or Accelerator(cpu=True)"
        )
    values = {
        "num_processes": world_size,
        "process_index": rank,
        "local_process_index": int(os.environ.get("LOCAL_RANK", "0")),
    }
    for kind in (PartialState, AcceleratorState):
        if state := shared_state(kind):
            state.update(values)


def forget_loaders() -> None:
    """Forget the loaders that an interrupted loop has left open."""
    if shared_state(GradientState):
        GradientState().dataloader_references = [None]
