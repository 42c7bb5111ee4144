"""Accelerate's view of the world, where an agent announces rounds: one that peers leave and join.

Accelerate makes the process group when it is first asked where it is, and keeps rank and world size for the life of
the process. From `follow` on the group is Everstep's, of this process alone until the first round; `move` tells
Accelerate of each round. Nothing changes under a launcher that announces no rounds, or if the script has made a process
group by itself: then a lost peer ends the processes, and they go on from a commit.

Invariant: nothing is prepared for training in a world of one that nobody would take into a round: that is refused.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

from everstep.train.recovery.recovery import Recovery
from everstep.train.recovery.rounds import AgentRounds
from everstep.train.step import LoopError
from everstep.train.world import most_processes


class _Process:
    """Of this process."""

    recovery: Recovery | None = None
    building = False
    following = False


def follow() -> None:
    """From now on. Once more does nothing."""
    if _Process.following:
        return
    _Process.following = True
    make, prepare = PartialState.__init__, Accelerator.prepare_model

    @functools.wraps(make)
    def made(state: Any, *arguments: Any, **named: Any) -> None:
        if not PartialState._shared_state:
            recovery()
        make(state, *arguments, **named)

    @functools.wraps(prepare)
    def prepared(
        accelerator: Any, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        if _Process.recovery is not None and not evaluation_mode and not _Process.building and most_processes() > 1:
            raise LoopError(
                "Accelerate is to prepare a model for training, and this process is still alone: each rank would train "
                "its own. Begin the training by callback.train(trainer), of an EverstepCallback, instead of "
                "trainer.train(); in a script without a Trainer do not import everstep.train.adapters.huggingface"
            )
        return prepare(accelerator, model, device_placement, evaluation_mode)

    PartialState.__init__ = made
    Accelerator.prepare_model = prepared


def recovery() -> Recovery | None:
    """What keeps this process in the newest round; None if worlds do not change here."""
    if _Process.recovery is None and not dist.is_initialized() and (rounds := AgentRounds.find()) is not None:
        _Process.recovery = Recovery(rounds)
        _Process.recovery.start(most_processes())
    return _Process.recovery


@contextmanager
def building() -> Iterator[None]:
    """While it is entered, models are prepared for worlds to come."""
    _Process.building = True
    try:
        yield
    finally:
        _Process.building = False


def move(rank: int, world_size: int) -> None:
    """A round has formed. Raises `LoopError` where Accelerate does not train over several processes."""
    if world_size > 1 and PartialState._shared_state.get("distributed_type") is DistributedType.NO:
        raise LoopError(
            "Accelerate has found no device of its own for each process, and would train each rank alone: on machines "
            "without an accelerator say TrainingArguments(use_cpu=True)"
        )
    place = {
        "num_processes": world_size,
        "process_index": rank,
        "local_process_index": int(os.environ.get("LOCAL_RANK", "0")),
    }
    for state in (PartialState, AcceleratorState):
        if state._shared_state:
            state._shared_state.update(place)


def forget_loaders() -> None:
    """Those that an interrupted loop has left open."""
    if GradientState._shared_state:
        GradientState().dataloader_references = [None]
