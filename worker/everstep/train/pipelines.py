"""Schedules of `torch.distributed.pipelining` that follow the world: each round makes them anew.

A schedule and its stages exchange data with their peers in their first step and remember it. A process that comes later
would ask peers that no longer answer. So all members of a round make their schedules anew, and all ask in that round's
first step.

Invariant: a schedule that runs was made in the present round, of stages with given shapes. Stages that infer their
shapes would run their layers once more, which uses random numbers and buffers of the step. A stage receives into a
tensor of the given shape, and torch does not compare what was sent: a smaller tensor would leave rows of an older
micro-batch behind it, and other numbers would be read from a tensor of another type. So both are compared here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from everstep.recovery.errors import LoopError
from everstep.recovery.group.torch_functions import MadeStage, making_schedule
from everstep.torch_private.patches import replace
from everstep.torch_private.pipelines import microbatches_of


class PipelineSchedule:
    """The result of `run.pipeline`: its `step` and `eval` are those of the schedule that `make` made for this round."""

    def __init__(self, make: Callable[[], Any], round_number: Callable[[], int | None]) -> None:
        self._make, self._round_number = make, round_number
        self._made: tuple[int | None, Any] | None = None
        self._rows: dict[str, int] = {}  # of the inputs and the target of this round's first batch

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The schedule's `step`: all micro-batches of this rank's stages, forward and backward. Call it in a step."""
        schedule = self.schedule
        self._check_rows(args, kwargs)
        _check_target(schedule, kwargs.get("target"))
        return schedule.step(*args, **kwargs)

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """The schedule's `eval`: all micro-batches forward. Call it in a step, or in a function of `run.evaluate`."""
        schedule = self.schedule
        self._check_rows(args, kwargs)
        return schedule.eval(*args, **kwargs)

    @property
    def schedule(self) -> Any:
        """torch's schedule, of the present round."""
        number = self._round_number()
        if self._made is None or self._made[0] != number:
            with making_schedule() as stages:
                made = self._make()
            if not hasattr(made, "step"):
                raise LoopError(
                    f"run.pipeline(make): make() returned a {type(made).__name__}, and a schedule is expected: `return "
                    "Schedule1F1B(PipelineStage(…), n_microbatches, loss_fn=…)`"
                )
            if number is not None and not stages:
                raise LoopError(
                    "run.pipeline(make): make() made no stage, and is called once in each round. A stage that was kept "
                    "from an earlier round has other peers, and those that are new would wait for it for ever. Make "
                    "all stages in make(), each time: `return Schedule1F1B(PipelineStage(module, …), …)`. The modules "
                    "are made once, outside of it"
                )
            for stage in stages:
                _check_outputs(stage)
            self._made, self._rows = (number, made), {}
        return self._made[1]

    def _check_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the rows of the inputs and of the target, which torch divides into micro-batches."""
        for name, given in (("input", next(iter(args), None)), ("target", kwargs.get("target"))):
            if isinstance(given, torch.Tensor) and given.dim():
                first = self._rows.setdefault(name, given.shape[0])
                if given.shape[0] != first:
                    raise LoopError(
                        f"run.pipeline: its {name} has {given.shape[0]} rows, and had {first}. {_ONE_SHAPE}"
                    )


def _check_target(schedule: Any, target: Any) -> None:
    """A schedule's loss is the mean over its micro-batches, so a smaller one's rows would count more than others."""
    parts = microbatches_of(schedule)
    if isinstance(target, torch.Tensor) and target.dim() and target.shape[0] % parts:
        raise LoopError(
            f"run.pipeline: its target has {len(target)} rows, which {parts} micro-batches do not divide. {_ONE_SHAPE}"
        )


def _check_outputs(made: MadeStage) -> None:
    """Let a stage compare each tensor that it sends on with its output_args=, before it is sent."""
    stage = made.stage
    expected = made.outputs if isinstance(made.outputs, (tuple, list)) else (made.outputs,)

    def checking(original: Any) -> Any:
        @functools.wraps(original)
        def forward_one_chunk(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            given = output if isinstance(output, (tuple, list)) else (output,)
            if not stage.is_last and _kinds(given) != _kinds(expected):
                raise LoopError(
                    f"run.pipeline: stage {stage.stage_index} returned {_kinds(given)}, and its output_args= are "
                    f"{_kinds(expected)}. {_ONE_SHAPE}. If the type differs (autocast), give output_args= and the next "
                    "stage's input_args= the type that the stage returns"
                )
            return output

        return forward_one_chunk

    replace("forward_one_chunk", checking, stage)


def _kinds(tensors: Any) -> str:
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in tensors)


_ONE_SHAPE = (
    "All micro-batches of a pipeline have one shape, because the next stage has made room for it: a rank's "
    "rows of a batch are a multiple of the micro-batches. An epoch's last batch has the rows that are left: write "
    "`drop_last=True` in run.loader(…) or DataLoader(…)"
)
